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
        self._left_s = _MOST_S
        self._since_s = time.monotonic()

    def pause(self) -> None:
        """Wait until it is idle, or the budget is spent."""
        if self._idle.is_set():
            return
        if (left_s := self._earn()) > 0:
            begin_s = time.monotonic()
            self._idle.wait(left_s)
            self._spend(time.monotonic() - begin_s)

    def _earn(self) -> float:
        """Return what is left of the budget."""
        with self._lock:
            now_s = time.monotonic()
            earned_s = _EARNED * (now_s - self._since_s)
            self._left_s = min(_MOST_S, self._left_s + earned_s)
            self._since_s = now_s
            return self._left_s

    def _spend(self, waited_s: float) -> None:
        with self._lock:
            self._left_s -= waited_s
            self._since_s = time.monotonic()  # a wait earns nothing
