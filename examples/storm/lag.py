"""How late the event loop is, and how much of that it spent inside the cache.

Lag is what everybody on the loop waits beyond what was asked for: for callbacks that
ran long or many, for threads that held the interpreter, for the machine. What of it
fell into the cache's own callbacks and into calls made on it is the cache's part, and
that includes a collector or a thread that cut in just there.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from examples.storm.inside import Inside

TICK_S = 0.002


class Tick(NamedTuple):
    """One tick of the clock on the loop."""

    at_s: float
    """When it came, since the first."""
    late_s: float
    """How late it came."""
    cache_s: float
    """How much of that the loop spent inside the cache, by the clock."""
    worked_s: float
    """How much of that it worked there."""


@dataclass(slots=True)
class Lag:
    """What was seen of the loop.

    Attributes:
        ticks: Every tick.
        inside: When the loop was inside the cache.
        collections_s: The length of each run of the garbage collector.
    """

    ticks: list[Tick] = field(default_factory=list)
    inside: Inside = field(default_factory=Inside)
    collections_s: list[float] = field(default_factory=list)

    async def tick(self) -> None:
        """Measure until cancelled; the clock starts now."""
        began = time.perf_counter()
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            stay = self.inside.take(due, now)
            self.ticks.append(
                Tick(now - began, now - due, stay.stop - stay.start, stay.worked_s)
            )

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the cache and the collector meanwhile."""
        started = 0.0

        def collected(phase: str, _info: dict[str, int]) -> None:
            nonlocal started
            if phase == "start":
                started = time.perf_counter()
            else:
                self.collections_s.append(time.perf_counter() - started)

        gc.callbacks.append(collected)
        try:
            with self.inside.watch():
                yield
        finally:
            gc.callbacks.remove(collected)


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value that so large a part of all values keeps; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0
