"""Copies that go on by themselves: whoever began one may be gone when it ends.

As on a DMA engine or in a thread, memory changes while a copy is under way, and the
task that waits for it has no part in that. A copy is torn until it ends: half of each
target is new at its begin, the rest at its end.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import anyio

from asyncache.threads import outlast

Move = tuple[memoryview, memoryview]
"""Target and source, of one length, format "B"."""


@dataclass(eq=False, slots=True)
class Running:
    """One copy under way."""

    number: int
    moves: Sequence[Move]
    ended: Callable[[], None]
    timer: asyncio.TimerHandle | None = None


class Copies:
    """All copies of one machine that are under way."""

    def __init__(self) -> None:
        self.running: dict[Running, None] = {}
        self._numbers = itertools.count(1)
        self.num_changes = 0
        """Counts begins and ends."""

    async def run(
        self, moves: Sequence[Move], duration_s: float, *, recallable: bool = False
    ) -> None:
        """Copy; returns, or raises a cancellation, once no byte moves any more.

        Args:
            moves: What is copied whither.
            duration_s: From its begin to its end, in the loop's time.
            recallable: Whether a cancellation stops it at once, half-way.
        """
        over = anyio.Event()
        copy = self.start(moves, duration_s, over.set)
        recall = (lambda: self._end(copy)) if recallable else None
        await outlast(over, on_cancel=recall)

    def start(
        self, moves: Sequence[Move], duration_s: float, ended: Callable[[], None]
    ) -> Running:
        """Begin to copy; make a call once no byte moves any more."""
        self.num_changes += 1
        copy = Running(next(self._numbers), moves, ended)
        self.running[copy] = None
        for target, source in copy.moves:
            half = len(target) // 2
            target[:half] = source[:half]
        loop = asyncio.get_running_loop()
        copy.timer = loop.call_later(duration_s, self._finish, copy)
        return copy

    def _finish(self, copy: Running) -> None:
        for target, source in copy.moves:
            half = len(target) // 2
            target[half:] = source[half:]
        self._end(copy)

    def _end(self, copy: Running) -> None:
        if copy in self.running:
            self.num_changes += 1
            del self.running[copy]
            assert copy.timer is not None
            copy.timer.cancel()
            copy.ended()


def pair(
    targets: Sequence[memoryview], sources: Sequence[memoryview]
) -> Iterator[Move]:
    """Cut two runs of buffers of one total length into pieces that fit each other."""
    left, right = iter(targets), iter(sources)
    target, source = next(left, None), next(right, None)
    while target is not None and source is not None:
        size = min(len(target), len(source))
        yield target[:size], source[:size]
        target = target[size:] if len(target) > size else next(left, None)
        source = source[size:] if len(source) > size else next(right, None)
