"""Looking at a replica: whatever is asked here, and how often, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from asyncache.core import _holdings, _invariants, _stages
from asyncache.core._agenda import Load, Request, SlotCopy
from asyncache.core._boundaries import servable
from asyncache.core._hashes import Namespace, root_hash
from asyncache.core._holdings import Holding, Resident
from asyncache.core._ledger import PageState
from asyncache.core._stages import Stage
from asyncache.core._state import State

_MOST_BRACKETS = 64


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Pages of one pool by state; the sum is the pool."""

    free: int
    request: int
    tree: int
    transit: int
    quarantine: int


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """A snapshot of a replica.

    Args:
        pools: Pages by state, a pool.
        num_nodes: Nodes of the tree.
        num_open: Open transactions, requests included.
        num_requests: Open requests.
        num_waiting: Requests that wait for a reservation.
        promised_pages: Pages that requests were promised and have not taken.
        promised_slots: Slots of each state pool that are kept for what may be loaded.
        evictable_pages: Pages of the first full-attention pool that could be evicted.
    """

    pools: Mapping[str, PoolStatistics]
    num_nodes: int
    num_open: int
    num_requests: int
    num_waiting: int
    promised_pages: int
    promised_slots: int
    evictable_pages: int


class Look:
    """What can be seen of one replica."""

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open, no request and no forward."""
        return not self._state.agenda.open and not self._state.brackets

    @property
    def has_store(self) -> bool:
        """Whether a store is attached."""
        return self._state.store_attached

    @property
    def needs_verdict(self) -> bool:
        """Whether ranks have something to agree on; the same on every rank.

        Forwards alone can wait, unless something waits for their end, and there is an
        end to how many may.
        """
        state, agenda = self._state, self._state.agenda
        if len(agenda.open) > agenda.num_open_requests:
            return True
        if not state.bounds.aborts_by_call:
            return bool(agenda.open or state.brackets)
        if len(state.brackets) >= _MOST_BRACKETS:
            return True
        is_awaited = bool(state.dirty or state.parked)
        return any(
            is_awaited or bracket.held or bracket.is_awaited
            for bracket in state.brackets.values()
        )

    @property
    def num_moving(self) -> int:
        """Loads and offloads that are open, and nodes that wait to be offloaded."""
        state = self._state
        loads = sum(isinstance(t, Load) for t in state.agenda.open.values())
        return loads + state.num_offloading + len(state.dirty)

    def is_open(self, seq: int) -> bool:
        """Whether a transaction has not ended."""
        return seq in self._state.agenda.open

    def request(self, seq: int) -> Request | None:
        """Return an open request by its sequence number."""
        found = self._state.agenda.open.get(seq)
        return found if isinstance(found, Request) else None

    def match(self, tokens: bytes, *, namespace: Namespace = None) -> int:
        """Return how many leading tokens are resident; the last one never counts."""
        tree = self._state.tree
        root = tree.roots.get(root_hash(self._state.layout, namespace))
        limit = (len(tokens) // 4 - 1) // tree.page_tokens
        walk = tree.walk(root, tokens[: limit * tree.stride])
        return servable(tree, walk, limit, resident=True) * tree.page_tokens

    def statistics(self) -> ReplicaStatistics:
        """Return a snapshot."""
        state = self._state
        pools = {
            pool.name: PoolStatistics(*(ledger.count(s) for s in PageState))
            for pool, ledger in zip(state.layout.pools, state.ledgers, strict=True)
        }
        num_requests = sum(isinstance(t, Request) for t in state.agenda.open.values())
        return ReplicaStatistics(
            pools=pools,
            num_nodes=state.tree.num_nodes,
            num_open=len(state.agenda.open),
            num_requests=num_requests,
            num_waiting=len(state.waiting),
            promised_pages=state.promised,
            promised_slots=state.promised_slots,
            evictable_pages=state.evictable(state.tree.backbone),
        )

    def copies(self, bracket: int) -> list[SlotCopy]:
        """Return what is to be copied as an open forward begins, by its number."""
        return list(self._state.brackets[bracket].copies)

    def check_invariants(self) -> None:
        """Raise InvariantError unless every law of the state holds."""
        _invariants.check(self._state)

    def holdings(self) -> Iterator[Holding]:
        """Yield all that holds pages, from scratch; for checks."""
        return _holdings.holdings(self._state)

    def residents(self) -> Iterator[Resident]:
        """Yield all pages that anyone may be given as a hit; for checks."""
        return _holdings.residents(self._state)

    def stages(self) -> dict[int, Stage]:
        """Return where each open transaction is, by sequence number."""
        return _stages.stages(self._state)

    @property
    def digest(self) -> int:
        """Of all calls and verdicts so far: it changes with each."""
        return self._state.digest

    def dump(self) -> tuple[object, ...]:
        """Return the whole replicated state as values, for comparing replicas."""
        return _invariants.dump(self._state)
