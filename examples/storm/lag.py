"""How late the event loop is, and whose callbacks made it so.

Lag is what everybody on the loop waits beyond what was asked for: by callbacks that ran
long, by threads that held the interpreter, by the machine. A callback is one run of a
task from an await to the next. Tasks of the cache bear its name; a client's task
includes the calls that it makes on the cache, so its longest run bounds both together.
"""

from __future__ import annotations

import asyncio
import gc
import time
from asyncio.events import Handle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

TICK_S = 0.002


class Owner(Enum):
    """Whose callback it is."""

    CACHE = "the cache's own tasks"
    CLIENTS = "clients, cache calls included"
    REST = "batch, bar, ticker"


@dataclass(slots=True)
class Lag:
    """What was seen of the loop.

    Attributes:
        late_s: How late each tick came, with its time.
        runs_s: The length of each callback, by owner.
        collections_s: The length of each run of the garbage collector.
    """

    late_s: list[tuple[float, float]] = field(default_factory=list)
    runs_s: dict[Owner, list[float]] = field(
        default_factory=lambda: {owner: [] for owner in Owner}
    )
    collections_s: list[float] = field(default_factory=list)

    def late_ms(self, part: float) -> float:
        """Return the lag that so large a part of all ticks kept."""
        return 1e3 * quantile([late for _, late in self.late_s], part)

    async def tick(self) -> None:
        """Measure until cancelled; the clock starts now."""
        began = time.perf_counter()
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            self.late_s.append((now - began, now - due))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Time every callback of every loop, and the collector, meanwhile."""
        run, runs, started = Handle._run, self.runs_s, 0.0  # noqa: SLF001 - no other way

        def timed(handle: Handle) -> None:
            owner, start = _owner(handle), time.perf_counter()
            run(handle)
            runs[owner].append(time.perf_counter() - start)

        def collected(phase: str, _info: dict[str, int]) -> None:
            nonlocal started
            if phase == "start":
                started = time.perf_counter()
            else:
                self.collections_s.append(time.perf_counter() - started)

        Handle._run = timed  # type: ignore[assignment]  # noqa: SLF001 - as above
        gc.callbacks.append(collected)
        try:
            yield
        finally:
            gc.callbacks.remove(collected)
            Handle._run = run  # type: ignore[method-assign]  # noqa: SLF001 - as above


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value that so large a part of all values keeps; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def _owner(handle: Handle) -> Owner:
    callback = handle._callback  # type: ignore[attr-defined]  # noqa: SLF001 - as above
    who = getattr(callback, "__self__", None)
    if isinstance(who, asyncio.Task):
        name = who.get_name()
        if name.startswith("asyncache"):
            return Owner.CACHE
        return Owner.CLIENTS if name.startswith("client") else Owner.REST
    module = getattr(type(who), "__module__", "")
    return Owner.CACHE if module.startswith("asyncache") else Owner.REST
