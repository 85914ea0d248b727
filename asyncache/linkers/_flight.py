"""The copies of one load that are under way, while its next pages are read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from asyncache.devices import Copy
from asyncache.linkers._abc import Landed


class Flight:
    """Copies onto a device, in the order in which they began.

    Used as ``async with Flight(landed) as flight``: the block is left, however, only
    when none of them touches anything any more.

    Args:
        landed: Told of layers: with a fence once all their copies have begun, without
            once all are over. Of nothing, once a copy has failed.
    """

    def __init__(self, landed: Landed) -> None:
        self._landed = landed
        self._num_begun = 0
        self._running: dict[int, Copy] = {}
        self._landings: deque[tuple[int, int]] = deque()
        """Layers, and how many copies had begun when they were complete."""
        self._last: Copy | None = None
        self._error: BaseException | None = None

    def add(self, copy: Copy, over: Callable[[], None]) -> None:
        """Take a copy along, and make a call when it is over."""
        number, self._num_begun = self._num_begun, self._num_begun + 1
        self._running[number], self._last = copy, copy
        copy.when_over(over)
        copy.when_over(lambda: self._ended(number, copy))

    def complete(self, layer: int) -> None:
        """Take note that the copies of a layer, and of all before, have begun."""
        self._landings.append((self._num_begun, layer))
        fence = None if self._last is None else self._last.fence
        if fence is not None and self._running and self._error is None:
            self._landed(layer, fence)
        self._land()

    async def arrive(self) -> None:
        """Wait for all copies.

        Raises:
            DeviceError: If one of them failed.
        """
        for copy in list(self._running.values()):
            await copy.wait()
        if self._error is not None:
            raise self._error

    def _ended(self, number: int, copy: Copy) -> None:
        del self._running[number]
        self._error = self._error or copy.error
        self._land()

    def _land(self) -> None:
        oldest = next(iter(self._running), self._num_begun)
        while self._landings and self._landings[0][0] <= oldest:
            _, layer = self._landings.popleft()
            if self._error is None:
                self._landed(layer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        running, cancelled = list(self._running.values()), None
        if kind is GeneratorExit:
            # Thrown away: nothing can be awaited any more.
            for copy in running:
                copy.block()
            return
        for copy in running:
            try:
                # If one is left, its load has failed already, of something else.
                await copy.settle()
            except asyncio.CancelledError as another:
                cancelled = another
        if cancelled is not None:
            raise cancelled
