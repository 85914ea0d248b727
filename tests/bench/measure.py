"""How things are timed: in turns, without the collector, and by the median.

A shared machine drifts by a third within minutes. So what is compared runs A, B, B, A
in one process, and a target is a ratio wherever there is something to compare with.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from random import Random
from statistics import median

NUM_ROUNDS = 21
NUM_QUICK_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table.

    Args:
        name: What was measured.
        ours: Our number, in ``unit``.
        unit: Such as "us".
        baseline: The other's number; None where there is nothing to compare with.
        against: Who the other is, or why there is none.
        bound: What the ratio, or our number without a baseline, may be; None for a
            line that is there for information.
        at_least: Whether more is better: ``bound`` is a minimum then.
    """

    name: str
    ours: float
    unit: str = "us"
    baseline: float | None = None
    against: str = ""
    bound: float | None = None
    at_least: bool = False

    @property
    def ratio(self) -> float | None:
        """Ours over the baseline."""
        return None if self.baseline is None else self.ours / self.baseline

    @property
    def verdict(self) -> str:
        """Whether the target is met: ``ok``, ``over``, or nothing without one."""
        if self.bound is None:
            return ""
        value = self.ours if self.ratio is None else self.ratio
        good = value >= self.bound if self.at_least else value <= self.bound
        return "ok" if good else "over"


@dataclass(slots=True)
class Stopwatch:
    """Sums what is done under ``with stopwatch:``; the collector is off meanwhile."""

    seconds: float = 0.0
    _start: float = 0.0

    def __enter__(self) -> None:
        gc.disable()
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start
        gc.enable()


Work = Callable[[], float]
"""Does something and returns the seconds that it took."""


def interleave(*works: Work, num_rounds: int) -> list[float]:
    """Run each work in turn, round after round; return the median of each."""
    for work in works:
        work()  # warm up
    times: list[list[float]] = [[] for _ in works]
    for place in _in_turn(len(works), num_rounds):
        times[place].append(works[place]())
    return list(map(median, times))


async def interleave_async(
    *works: Callable[[], Awaitable[float]], num_rounds: int
) -> list[float]:
    """Do as :func:`interleave` with works that await."""
    for work in works:
        await work()  # warm up
    times: list[list[float]] = [[] for _ in works]
    for place in _in_turn(len(works), num_rounds):
        times[place].append(await works[place]())
    return list(map(median, times))


def _in_turn(num_works: int, num_rounds: int) -> Iterator[int]:
    """Yield whose turn it is, in an order of its own in every round.

    Each leaves its data in caches, and threads that wind down, to the one after it: who
    came after itself each second time was ahead by a twentieth.
    """
    dice = Random(0)
    for _ in range(num_rounds):
        yield from dice.sample(range(num_works), num_works)


def repeat(call: Callable[[], object], count: int) -> Work:
    """Return a work that makes a call so many times, and takes the mean."""

    def work() -> float:
        with (watch := Stopwatch()):
            for _ in range(count):
                call()
        return watch.seconds / count

    return work
