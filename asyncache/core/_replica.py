"""The replica: the one door to a cache's state, the same on every rank.

Only a *call* or a *verdict* changes it; both are folded into its digest. Equal calls
and verdicts in equal order leave equal replicas, whatever the ranks' clocks, stores
and clients do in between: those only move votes.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncache.core import (
    _brackets,
    _invariants,
    _requests,
    _verdicts,
)
from asyncache.core._agenda import Load, Request
from asyncache.core._effects import Effect
from asyncache.core._errors import ClosedError
from asyncache.core._eviction import Policy, lru
from asyncache.core._hashes import Namespace, PageHash, root_hash
from asyncache.core._layout import KVLayout
from asyncache.core._ledger import PageState
from asyncache.core._state import Bounds, State
from asyncache.core._votes import Ballot, cast


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
        evictable_pages: Pages of the first full-attention pool that could be evicted.
    """

    pools: Mapping[str, PoolStatistics]
    num_nodes: int
    num_open: int
    num_requests: int
    num_waiting: int
    promised_pages: int
    evictable_pages: int


class Replica:
    """One rank's copy of the deterministic state.

    A call on a request that has ended raises :class:`ClosedError`. A call that raises
    has changed nothing, but for InvariantError, after which the replica is over.

    Args:
        layout: The pools of the model.
        num_pages: Pages of each pool, by name, as agreed by all ranks.
        bounds: What may be open at once.
        policy: Which leaf is evicted first, as a sort key over nodes.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: Mapping[str, int],
        bounds: Bounds,
        policy: Policy = lru,
    ) -> None:
        self._state = State(layout, num_pages, bounds, policy)
        self._layout = layout

    # Calls.

    def open(
        self, tokens: bytes, *, namespace: Namespace = None, num_reserve_tokens: int = 0
    ) -> Request:
        """Open a request for packed tokens; it holds nothing yet.

        Raises:
            ValueError: If ``num_reserve_tokens`` is negative.
            OutOfPagesError: If the prompt and its reserve can never fit a pool.
            TooManyRequestsError: If ``bounds.requests`` are open.
        """
        root = self._root(namespace)
        request = _requests.open_request(self._state, tokens, root, num_reserve_tokens)
        facts = (len(tokens), num_reserve_tokens, zlib.crc32(tokens), zlib.crc32(root))
        self._called(b"open", request, *facts)
        return request

    def restore(self, request: Request, *, ask_store: bool = True) -> None:
        """Begin to restore; :class:`Restored` and :class:`Settled` follow as effects.

        Raises:
            OrderError: If the request has extended, or a restore of it is open.
            OutOfPagesError: If what was appended can never fit a pool.
        """
        self._check_open(request)
        _requests.restore(self._state, request, ask_store=ask_store)
        self._called(b"restore", request, ask_store)

    def extend(self, request: Request, num_tokens: int) -> int:
        """Give the first ``num_tokens`` pages; return how many were added.

        Raises:
            ValueError: If ``num_tokens`` falls, or is more than are known.
            OrderError: If a restore waits for its answer.
            OutOfPagesError: If what is not reserved is not there.
        """
        self._check_open(request)
        added = _requests.extend(self._state, request, num_tokens)
        self._called(b"extend", request, num_tokens)
        return added

    def append(self, request: Request, tokens: bytes) -> None:
        """Add known tokens, packed."""
        self._check_open(request)
        _requests.append(request, tokens)
        self._called(b"append", request, len(tokens), zlib.crc32(tokens))

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Forget the tokens past ``num_tokens``.

        Raises:
            ValueError: If it is below what is shared, or more than are known.
            OrderError: If a restore waits for its answer.
        """
        self._check_open(request)
        _requests.truncate(self._state, request, num_tokens)
        self._called(b"truncate", request, num_tokens)

    def commit(self, request: Request, num_tokens: int) -> int:
        """Publish the first ``num_tokens``; return how many are shared by now.

        Raises:
            ValueError: If ``num_tokens`` falls, or is more than have pages.
        """
        self._check_open(request)
        shared = _requests.commit(self._state, request, num_tokens)
        self._called(b"commit", request, num_tokens)
        return shared

    def suspend(self, request: Request) -> None:
        """Give back all that a request holds but its tokens."""
        self._check_open(request)
        _requests.suspend(self._state, request)
        self._called(b"suspend", request)

    def abort(self, request: Request) -> None:
        """Abort a request by a call of every rank, in place of a vote."""
        self._check_open(request)
        _requests.end_request(self._state, request, aborted=True)
        self._called(b"abort", request)

    def forward(self, requests: Sequence[Request]) -> int:
        """Open a bracket around a forward; return its number."""
        for request in requests:
            self._check_open(request)
        number = _brackets.open_bracket(self._state, requests)
        self._called(b"forward", None, *(request.seq for request in requests))
        return number

    def attach(self) -> None:
        """From now on look up, load and offload."""
        self._state.store_attached = True
        self._called(b"attach", None)

    def _check_open(self, request: Request) -> None:
        if not self._state.agenda.is_open(request):
            raise ClosedError(f"request {request.seq} has ended: open another")

    def _root(self, namespace: Namespace) -> PageHash:
        return root_hash(self._layout, namespace)

    def _called(self, name: bytes, request: Request | None, *facts: int) -> None:
        state = self._state
        state.fold(name, 0 if request is None else request.seq, *facts)
        _verdicts.tend(state)

    # Verdicts.

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to agree on."""
        return not self._state.agenda.open and not self._state.brackets

    def ballot(self) -> Ballot:
        """Return the slot table of the next step."""
        return cast(self._state)

    def apply(self, ballot: Ballot, verdict: array[int]) -> None:
        """Apply what the ranks agreed on.

        Args:
            ballot: The ballot that the verdict answers.
            verdict: Minimum over ranks of ``Votes.fill(ballot)``, shape
                [ballot.num_ints], int32.

        Raises:
            RankError: If the replicas differ, or a rank has stopped.
        """
        _verdicts.apply(self._state, ballot, verdict)

    def take_effects(self) -> list[Effect]:
        """Return what is to be done, in order; it is the caller's now."""
        effects, self._state.effects = self._state.effects, []
        return effects

    # Looking changes nothing.

    @property
    def num_moving(self) -> int:
        """Loads and offloads that are open, and nodes that wait to be offloaded."""
        state = self._state
        loads = sum(isinstance(t, Load) for t in state.agenda.open.values())
        return loads + state.num_offloading + len(state.dirty)

    def is_open(self, seq: int) -> bool:
        """Whether a transaction has not ended."""
        return seq in self._state.agenda.open

    def match(self, tokens: bytes, *, namespace: Namespace = None) -> int:
        """Return how many leading tokens are resident; the last one never counts."""
        tree = self._state.tree
        root = tree.roots.get(self._root(namespace))
        limit = (len(tokens) // 4 - 1) // tree.page_tokens
        walk = tree.walk(root, tokens[: limit * tree.stride])
        return tree.boundary(walk, limit, resident=True) * tree.page_tokens

    def statistics(self) -> ReplicaStatistics:
        """Return a snapshot."""
        state = self._state
        pools = {
            pool.name: PoolStatistics(*(ledger.count(s) for s in PageState))
            for pool, ledger in zip(self._layout.pools, state.ledgers, strict=True)
        }
        num_requests = sum(isinstance(t, Request) for t in state.agenda.open.values())
        return ReplicaStatistics(
            pools=pools,
            num_nodes=state.tree.num_nodes,
            num_open=len(state.agenda.open),
            num_requests=num_requests,
            num_waiting=len(state.waiting),
            promised_pages=state.promised,
            evictable_pages=state.evictable(state.tree.backbone),
        )

    def check_invariants(self) -> None:
        """Raise InvariantError unless every law of the state holds."""
        _invariants.check(self._state)

    def dump(self) -> tuple[object, ...]:
        """Return the whole replicated state as values, for comparing replicas."""
        return _invariants.dump(self._state)
