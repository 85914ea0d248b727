"""What a cache tells about itself: events as they happen, statistics when asked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Protocol

from asyncache.core import (
    Fact,
    FactKind,
    PagesCached,
    PagesDropped,
    ReplicaStatistics,
)
from asyncache.engine._queues import Queues


class TransferKind(Enum):
    """What a transfer was doing."""

    LOOKUP = auto()
    LOAD = auto()
    OFFLOAD = auto()


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """A transfer ended otherwise than it should; the cache goes on without it.

    ``error`` is what the store, linker or device raised; None if it only said that it
    is unavailable.
    """

    kind: TransferKind
    num_pages: int
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class StoreFull:
    """The store refused pages; others of their namespace wait for ``retry_s`` seconds.

    It may be full for all, or keep no more of this one: other namespaces find out for
    themselves.
    """

    num_pages: int
    retry_s: float


@dataclass(frozen=True, slots=True)
class StoreSmaller:
    """The store was opened with so many bytes less than it was set up to have."""

    missing_bytes: int


@dataclass(frozen=True, slots=True)
class StoreDown:
    """Transfers failed in a row; the store is left alone for ``retry_s`` seconds."""

    num_failures: int
    retry_s: float


@dataclass(frozen=True, slots=True)
class Overdue:
    """Something has run for ``Limits.overdue_s`` and still does; its pages are its own.

    A copy that never ends cannot be stopped: only the end of the process gives its
    pages back.

    Args:
        kind: What kind of transfer it is; None for a forward.
        num_pages: Positions that a transfer moves; 0 for a forward.
    """

    kind: TransferKind | None
    num_pages: int


Event = (
    Fact
    | PagesCached
    | PagesDropped
    | TransferFailed
    | Overdue
    | StoreSmaller
    | StoreFull
    | StoreDown
)


class Observer(Protocol):
    """Gets every event, after the change that it tells of is complete.

    It runs on the event loop between two changes and may call the cache. What it
    raises goes to the loop's exception handler and to nobody else.
    """

    def on_event(self, event: Event) -> None:
        """Take note of an event; must not block."""


class Stage(Enum):
    """How far a request has come."""

    OPENED = auto()
    WAITING = auto()
    LOOKING_UP = auto()
    LOADING = auto()
    COMPUTING = auto()


@dataclass(slots=True)
class Counters:
    """Sums since the cache was opened, in pages unless they say otherwise."""

    restores: int = 0
    lookup_tokens: int = 0
    device_tokens: int = 0
    store_tokens: int = 0
    loaded_pages: int = 0
    loaded_bytes: int = 0
    cut_pages: int = 0
    published_pages: int = 0
    stored_pages: int = 0
    stored_bytes: int = 0
    offloads_failed: int = 0
    forgotten_pages: int = 0
    evicted_pages: int = 0
    evicted_unsaved_pages: int = 0
    resets: int = 0
    shortened: int = 0
    aborted: int = 0
    aborted_waiting: int = 0
    aborted_looking_up: int = 0
    aborted_loading: int = 0
    aborted_computing: int = 0
    closed: int = 0
    late_completions: int = 0
    transfers_failed: int = 0
    overdue: int = 0

    def count_abort(self, stage: Stage) -> None:
        """Add a request that was aborted."""
        name = _ABORTED[stage]
        if name:
            setattr(self, name, getattr(self, name) + 1)

    def count(self, fact: Fact, bytes_a_page: int) -> None:
        """Add a fact of the core."""
        if fact.kind is FactKind.OFFLOAD_FAILED:
            self.offloads_failed += 1
            return
        if fact.kind is FactKind.RESET:
            self.resets += 1
            return
        name = _COUNTER[fact.kind]
        setattr(self, name, getattr(self, name) + fact.num_pages)
        num_bytes = fact.num_pages * bytes_a_page
        if fact.kind is FactKind.LANDED:
            self.loaded_bytes += num_bytes
        elif fact.kind is FactKind.STORED:
            self.stored_bytes += num_bytes


_COUNTER = {
    FactKind.LANDED: "loaded_pages",
    FactKind.LOAD_CUT: "cut_pages",
    FactKind.STORED: "stored_pages",
    FactKind.OFFLOAD_FORGOTTEN: "forgotten_pages",
    FactKind.EVICTED: "evicted_pages",
    FactKind.EVICTED_UNSAVED: "evicted_unsaved_pages",
    FactKind.PUBLISHED: "published_pages",
}
_ABORTED = {
    Stage.OPENED: None,
    Stage.WAITING: "aborted_waiting",
    Stage.LOOKING_UP: "aborted_looking_up",
    Stage.LOADING: "aborted_loading",
    Stage.COMPUTING: "aborted_computing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """How the store is, as transfers found it.

    Args:
        is_down: Whether it failed ``Limits.breaker_failures`` times in a row, and has
            not answered since: lookups miss at once, but for one that tries it when
            ``retry_s`` have passed.
        is_full: Whether it refused pages a while ago: offloads of their namespace wait.
        num_failures: Failures in a row, of the kind of transfer that has most.
        retry_s: Seconds until it is tried again.
    """

    is_down: bool
    is_full: bool
    num_failures: int
    retry_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A snapshot of a cache; counters never fall and are never reset.

    Args:
        replica: Pages by state, nodes, open transactions, promises.
        counters: Sums since the cache was opened. ``lookup_tokens`` were asked for in
            restores, of which ``device_tokens`` were resident and ``store_tokens``
            agreed to be loaded. ``late_completions`` came for what had ended. Of
            the ``aborted`` requests some waited for room, for a lookup or for a load,
            some had pages to compute into, and the rest had nothing yet.
        transfers: Transfers that run now.
        store: How the store is; also where there is none, which never fails.
    """

    replica: ReplicaStatistics
    counters: Counters
    transfers: int
    store: StoreHealth

    @property
    def leaked_pages(self) -> int:
        """Pages that are neither free nor in the tree.

        Open requests, loads and forwards hold pages; without them it is 0, always.
        """
        pools = self.replica.pools.values()
        return sum(pool.request + pool.transit + pool.quarantine for pool in pools)


def snapshot(counters: Counters) -> Counters:
    """Return a copy that no longer changes."""
    return Counters(**{f.name: getattr(counters, f.name) for f in fields(counters)})


class Teller:
    """Tells events to whom they concern; what an observer raises is its own affair."""

    def __init__(
        self, observer: Observer | None, queues: Queues, counters: Counters
    ) -> None:
        self._observer = observer
        self._queues = queues
        self._counters = counters

    def pass_on(self, event: Event) -> None:
        """Tell an event from where the transfers live."""
        self._queues.into(self.tell, event)

    def tell(self, event: Event) -> None:
        """Tell an event; in the driver's thread."""
        if isinstance(event, TransferFailed):
            self._counters.transfers_failed += 1
        elif isinstance(event, Overdue):
            self._counters.overdue += 1
        if self._observer is None:
            return
        try:
            self._observer.on_event(event)
        except Exception as error:  # noqa: BLE001 - foreign code, told to the loop
            self._queues.complain("a cache observer failed", error)
