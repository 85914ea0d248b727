"""What runs for too long is told of, once: one timer for all that runs.

A timer of its own for each would cost every transfer more than its verdict does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from asyncache.engine._queues import Timer

Thing = TypeVar("Thing")


class Late(Generic[Thing]):
    """Things that run, in the order in which they began.

    Args:
        after_s: Seconds after which one is late.
        clock: Returns seconds, monotonic.
        call_later: Makes a call in so many of them, where this is used.
        tell: Told of what is late.
    """

    def __init__(
        self,
        after_s: float,
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], Timer],
        tell: Callable[[Thing], object],
    ) -> None:
        self._after_s = after_s
        self._clock = clock
        self._call_later = call_later
        self._tell = tell
        self._running: dict[int, tuple[float, Thing]] = {}
        self._timer: Timer | None = None

    def begin(self, number: int, thing: Thing) -> None:
        """Take note that something runs."""
        self._running[number] = (self._clock() + self._after_s, thing)
        if self._timer is None:
            self._timer = self._call_later(self._after_s, self._look)

    def end(self, number: int) -> None:
        """Take note that it does not any more."""
        self._running.pop(number, None)

    def close(self) -> None:
        """Tell of nothing any more."""
        self._running.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer, now = None, self._clock()
        while self._running:
            number, (due, thing) = next(iter(self._running.items()))
            if due > now:
                self._timer = self._call_later(due - now, self._look)
                return
            del self._running[number]
            self._tell(thing)
