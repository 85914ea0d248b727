"""A progress bar for a person who watches; nothing for a pipe or a log."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def progress(items: Sequence[T], label: str) -> Iterator[Iterable[T]]:
    """Give the items back one by one, with a bar on stderr if that is a terminal.

    Without ``rich``, which the extra ``cli`` installs, there is no bar.
    """
    if not sys.stderr.isatty():
        yield items
        return
    try:
        from rich.console import Console  # noqa: PLC0415 - optional
        from rich.progress import Progress  # noqa: PLC0415 - optional
    except ImportError:
        yield items
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield bar.track(items, description=label)
