"""When to leave a store alone. A clock decides here, so it may only move votes.

============  =========================  ==============================================
the store is  since                      and then
============  =========================  ==============================================
up            it answered                down, after so many failures in a row
down          then                       on trial, after ``Limits.breaker_s``
on trial      somebody asked             up if it answers, down if it fails; if it does
                                         neither, the next may ask
============  =========================  ==============================================

One lookup at a time tries a store that was down: many at once would each wait for it,
as if nobody knew.

A store that refuses pages is not down. It may have a bound for each namespace, so only
the one whose pages were refused waits until it is tried again.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncache.engine._limits import Limits
from asyncache.engine._observe import (
    Event,
    StoreDown,
    StoreFull,
    StoreHealth,
    TransferKind,
)

_MOST_DOUBLINGS = 30
# Of a delay, so that those who failed together do not come back together.
_JITTER = 0.25


class Trial:
    """Whether somebody tries a store that was down."""

    is_on = False

    def end(self) -> None:
        """Let the next one try, if need be."""
        self.is_on = False


_NO_TRIAL = Trial()


class Health:
    """Counts failures in a row, and says how long to wait before the next try.

    Each kind of transfer counts for itself: a store that answers look-ups and loses
    every read would never seem to be down.

    Args:
        limits: How many failures, how many seconds.
        clock: Seconds, monotonic.
        tell: Takes an event.
    """

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        tell: Callable[[Event], None],
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._tell = tell
        self._num_failures = dict.fromkeys(TransferKind, 0)
        self._down_until = 0.0
        self._full_until: dict[bytes, float] = {}
        """By the tags of namespaces; those that are over go when the next comes."""
        self._is_down = False
        self._trial = Trial()

    @property
    def state(self) -> StoreHealth:
        """How the store is now."""
        now = self._clock()
        return StoreHealth(
            is_down=self._is_down,
            is_full=any(now < until for until in self._full_until.values()),
            num_failures=max(self._num_failures.values()),
            retry_s=max(0.0, self._down_until - now),
        )

    def begin_asking(self) -> Trial | None:
        """Return what to end once the store was asked; None if it may not be."""
        if not self._is_down:
            return _NO_TRIAL
        if self._trial.is_on or self._clock() < self._down_until:
            return None
        self._trial.is_on = True
        return self._trial

    def offload_delay_s(self, attempts: int, tag: bytes) -> float:
        """Return the seconds to wait before an offload, after so many failures."""
        now = self._clock()
        left_s = max(self._down_until, self._full_until.get(tag, 0.0)) - now
        if not attempts:
            return max(0.0, left_s)
        doublings = min(attempts - 1, _MOST_DOUBLINGS)
        # A clock has chance enough, and the same again where it is simulated.
        spread = 1 + _JITTER * (now * 1e6 % 1000 / 1000)
        return float(max(left_s, self._limits.retry_s * 2**doublings * spread))

    def succeeded(self, kind: TransferKind) -> None:
        """Take note of an answer."""
        self._num_failures[kind] = 0
        # What was asked before it went down tells nothing of how it is now.
        self._is_down = self._is_down and self._clock() < self._down_until

    def failed(self, kind: TransferKind) -> None:
        """Take note of no answer."""
        self._num_failures[kind] += 1
        num_failures = self._num_failures[kind]
        is_down = self._clock() < self._down_until
        if num_failures >= self._limits.breaker_failures and not is_down:
            retry_s = self._limits.breaker_s
            self._down_until = self._clock() + retry_s
            self._is_down = True
            self._tell(StoreDown(num_failures, retry_s))

    def rejected(self, num_pages: int, tag: bytes) -> None:
        """Take note that the store is full, for a namespace at least."""
        now, retry_s = self._clock(), self._limits.breaker_s
        waiting = {t: until for t, until in self._full_until.items() if now < until}
        if tag not in waiting:
            self._tell(StoreFull(num_pages, retry_s))
        self._full_until = waiting | {tag: now + retry_s}
