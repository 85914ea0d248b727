"""When to leave a store alone. A clock decides here, so it may only move votes."""

from __future__ import annotations

from collections.abc import Callable

from asyncache.engine._limits import Limits
from asyncache.engine._observe import Event, StoreDown, StoreFull, TransferKind

_MOST_DOUBLINGS = 30


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
        self._full_until = 0.0

    @property
    def is_down(self) -> bool:
        """Whether the store is not to be asked at all."""
        return self._clock() < self._down_until

    def offload_delay_s(self, attempts: int) -> float:
        """Return the seconds to wait before an offload, after so many failures."""
        wait_until = max(self._down_until, self._full_until)
        doublings = min(attempts - 1, _MOST_DOUBLINGS)
        backoff = self._limits.retry_s * 2**doublings if attempts else 0.0
        return max(0.0, wait_until - self._clock(), backoff)

    def succeeded(self, kind: TransferKind) -> None:
        """Take note of an answer."""
        self._num_failures[kind] = 0

    def failed(self, kind: TransferKind) -> None:
        """Take note of no answer."""
        self._num_failures[kind] += 1
        num_failures = self._num_failures[kind]
        if num_failures >= self._limits.breaker_failures and not self.is_down:
            retry_s = self._limits.breaker_s
            self._down_until = self._clock() + retry_s
            self._tell(StoreDown(num_failures, retry_s))

    def rejected(self, num_pages: int) -> None:
        """Take note that the store is full."""
        retry_s = self._limits.breaker_s
        if self._clock() >= self._full_until:
            self._tell(StoreFull(num_pages, retry_s))
        self._full_until = self._clock() + retry_s
