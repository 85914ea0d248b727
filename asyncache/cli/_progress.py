"""A progress bar for a person who watches; for a pipe or a log nothing, or a line."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")

LINE_S = 20.0
"""How often a watch without a bar says that it lives."""


@contextmanager
def progress(items: Sequence[T], label: str) -> Iterator[Iterable[T]]:
    """Give the items back one by one, with a bar on stderr if that is a terminal.

    Without ``rich``, which the extra ``cli`` installs, there is no bar.
    """
    bar = _bar()
    if bar is None:
        yield items
        return
    with bar:
        yield bar.track(items, description=label)


class Watch:
    """Shows how a long count comes along: how fast, and how much of it failed.

    On a terminal that is a bar on stderr; elsewhere, or without ``rich``, a line every
    ``LINE_S`` seconds. What the command says meanwhile, it says by :meth:`say`.

    Args:
        total: How much there is to count; None if nobody knows.
        unit: What is counted, in the plural.
    """

    def __init__(self, total: int | None, unit: str) -> None:
        self.count = 0
        self.num_failed = 0
        self._total = total
        self._unit = unit
        self._began = self._told = time.monotonic()
        self._bar = _bar()
        self._task = None if self._bar is None else self._bar.add_task("", total=total)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    @property
    def per_second(self) -> float:
        """How many a second, so far."""
        return self.count / max(self.seconds, 1e-9)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, *, failed: bool) -> None:
        """Count one more."""
        self.count += 1
        self.num_failed += failed
        self.live()

    def live(self, doing: str = "") -> None:
        """Show that something goes on, and what, if it is not the counting."""
        text = f"{self.per_second:.0f} {self._unit}/s, {self.num_failed} failed"
        text += f", {doing}" if doing else ""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.count, description=text)
        elif time.monotonic() - self._told >= LINE_S:
            self._told = time.monotonic()
            of_all = "" if self._total is None else f" of {self._total}"
            part = f"{self.count}{of_all} {self._unit}"
            sys.stderr.write(f"{part}, {text}\n")
            sys.stderr.flush()

    def say(self, text: str) -> None:
        """Print a line on stdout, clear of the bar."""
        if self._bar is not None:
            self._bar.stop()
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        if self._bar is not None:
            self._bar.start()


def _bar() -> Progress | None:
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console  # noqa: PLC0415 - optional
        from rich.progress import Progress  # noqa: PLC0415 - optional
    except ImportError:
        return None
    # What goes to stdout is a result, and must not end up on stderr.
    return Progress(console=Console(stderr=True), transient=True, redirect_stdout=False)
