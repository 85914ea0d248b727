"""Pauses between two pages, in which jobs let others pass that come first.

They have a budget: 20 ms at most, which grows while they do not wait. So a short read
is let pass whole, and neither one that hangs nor one after the other takes more than
four fifths of the time.
"""

from __future__ import annotations

import threading
import time

_MOST_S = 0.02
_EARNED = 4.0
"""Seconds that may be waited for each that was not."""


class Pauses:
    """The pauses of jobs that share a budget. Any thread may call it.

    Args:
        idle: Set while no job is left that comes first.
    """

    def __init__(self, idle: threading.Event) -> None:
        self._idle = idle
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._left_s = _MOST_S
        self._since_s = time.monotonic()

    def pause(self) -> None:
        """Wait until it is idle, or the budget is spent."""
        if self._idle.is_set():
            return
        if (left_s := self._begin()) > 0:
            self._idle.wait(left_s)
            self._end()

    def _begin(self) -> float:
        """Return how long to wait."""
        with self._lock:
            self._account()
            if self._left_s > 0:
                self._num_waiting += 1
            return self._left_s

    def _end(self) -> None:
        with self._lock:
            self._account()
            self._num_waiting -= 1

    def _account(self) -> None:
        """Pay for the time since the last account, or earn by it.

        Those that wait at the same time pay once.
        """
        now_s = time.monotonic()
        passed_s, self._since_s = now_s - self._since_s, now_s
        if self._num_waiting:
            self._left_s -= passed_s
        else:
            self._left_s = min(_MOST_S, self._left_s + _EARNED * passed_s)
