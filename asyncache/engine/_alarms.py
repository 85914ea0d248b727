"""Clocks without a loop: their owner looks whether one has run out.

A clock may only move a vote, and votes count when the owner applies them: an alarm that
rings where nobody looks would bring nothing about any earlier.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from operator import attrgetter


class Alarm:
    """A call that is due at some moment."""

    __slots__ = ("_alarms", "call", "due")

    def __init__(
        self, due: float, call: Callable[[], object], alarms: set[Alarm]
    ) -> None:
        self.due = due
        self.call = call
        self._alarms = alarms

    def cancel(self) -> None:
        """Never make the call."""
        self._alarms.discard(self)


class Alarms:
    """The alarms of one thread."""

    def __init__(self) -> None:
        self._alarms: set[Alarm] = set()
        self.due = math.inf
        """No alarm rings before; ``time.monotonic()``. It may be one that is cancelled,
        for seeking the next one each time would cost more than looking too early."""

    def set(self, after_s: float, call: Callable[[], object]) -> Alarm:
        """Make a call in so many seconds, or when somebody looks after that."""
        alarm = Alarm(time.monotonic() + after_s, call, self._alarms)
        self._alarms.add(alarm)
        self.due = min(self.due, alarm.due)
        return alarm

    def ring(self) -> int:
        """Make the calls that are due, in order; return their number."""
        now = time.monotonic()
        if now < self.due:
            return 0
        due = [alarm for alarm in self._alarms if alarm.due <= now]
        num_rung = 0
        for alarm in sorted(due, key=attrgetter("due")):
            # An earlier call may have cancelled it.
            if alarm in self._alarms:
                alarm.cancel()
                alarm.call()
                num_rung += 1
        self.due = min((alarm.due for alarm in self._alarms), default=math.inf)
        return num_rung
