"""Replicas in lockstep, each with pages of its own whose contents can be checked.

A page's content is what it means: ``(namespace, tokens up to the page's end)``, or
GARBAGE. Transfers and forwards write pages as real ones do: whenever they like while
they are open, and never after. So a page that is served before it landed, or given out
while something still writes it, shows as content that is not its prefix.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

from asyncache.core import (
    AskStore,
    AsyncacheError,
    Bounds,
    Ended,
    KVLayout,
    LoadPlan,
    LookupPlan,
    OffloadPlan,
    OfferOffload,
    PageState,
    Replica,
    RequestState,
    Restored,
    Settled,
    Shortened,
    StartLoad,
    StartOffload,
    Stop,
    Votes,
    restorable,
)

GARBAGE = "garbage"


@dataclass
class Forward:
    """What one rank's run of the model will write when it ends."""

    number: int
    writes: list[tuple[int, int, tuple[object, bytes]]]


@dataclass
class Rank:
    """One rank: a replica, its votes, its pages, and what is under way on it."""

    replica: Replica
    pages: list[list[object]]
    votes: Votes = field(default_factory=Votes)
    lookups: dict[int, LookupPlan] = field(default_factory=dict)
    loads: dict[int, LoadPlan] = field(default_factory=dict)
    offloads: dict[int, OffloadPlan] = field(default_factory=dict)
    readies: dict[int, OfferOffload] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)
    store: set[tuple[int, bytes]] = field(default_factory=set)
    told: list[object] = field(default_factory=list)


class Cluster:
    """Ranks that make the same calls and reduce their votes."""

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        *,
        num_ranks: int,
        bounds: Bounds,
        seed: int = 0,
    ) -> None:
        self.layout = layout
        self.random = random.Random(seed)
        self.stride = 4 * layout.page_tokens
        sizes = {pool.name: num_pages for pool in layout.pools}
        self.ranks = [
            Rank(
                Replica(layout, sizes, bounds),
                [[GARBAGE] * num_pages for _ in layout.pools],
            )
            for _ in range(num_ranks)
        ]
        self.names: dict[int, object] = {}
        self.requests: dict[int, list[RequestState]] = {}
        self.flight: list[tuple[list, list[array]]] = []
        self.call("attach")

    # Calls, the same on every rank.

    def call(self, name: str, seq: int | None = None, *args, **kwargs):
        """Make a call on every rank; all return alike or raise alike."""
        results = []
        for place, rank in enumerate(self.ranks):
            method = getattr(rank.replica, name)
            first = () if seq is None else (self.requests[seq][place],)
            try:
                results.append(method(*first, *args, **kwargs))
            except (AsyncacheError, ValueError) as error:
                results.append(repr(error))
                if type(error).__name__ == "InvariantError":
                    raise
            self.carry_out(rank)
        self.check()
        return results

    def open(self, tokens: list[int], namespace=None, reserve=0) -> int | None:
        packed = array("i", tokens).tobytes()
        results = self.call(
            "open", None, packed, namespace=namespace, num_reserve_tokens=reserve
        )
        if isinstance(results[0], str):
            assert len(set(results)) == 1
            return None
        seq = results[0].seq
        self.requests[seq] = results
        self.names[seq] = namespace
        return seq

    def simple(self, name: str, seq: int, *args):
        """Make a call whose results are values."""
        results = self.call(name, seq, *args)
        assert len(set(map(str, results))) == 1, results
        return results[0]

    def forward(self, seqs: list[int]) -> None:
        """Run the model on some requests: it reads what is there, writes at its end."""
        number = None
        for place, rank in enumerate(self.ranks):
            requests = [self.requests[seq][place] for seq in seqs]
            number = rank.replica.forward(requests)
            self.carry_out(rank)
            writes = [w for seq, r in zip(seqs, requests) for w in self.computed(seq, r)]
            rank.forwards.append(Forward(number, writes))
        self.check()

    def computed(self, seq: int, request: RequestState):
        """Return what a forward over a request's own pages writes."""
        key, name = bytes(request.tokens), self.names[seq]
        whole = request.extent // self.layout.page_tokens
        for pool, table in enumerate(request.tables):
            for position in range(request.hit, len(table)):
                end = (position + 1) * self.stride
                content = (name, key[:end]) if position < whole else GARBAGE
                if request.own[pool][position]:
                    yield pool, table[position], content

    def finish_forward(self, rank: Rank) -> None:
        """End the oldest forward of a rank: now its writes are there."""
        forward = rank.forwards.pop(0)
        for pool, page, content in forward.writes:
            rank.pages[pool][page] = content
        rank.votes.finished = forward.number

    # Effects: what the engine of one rank would start.

    def carry_out(self, rank: Rank) -> None:
        for effect in rank.replica.take_effects():
            match effect:
                case AskStore(plan):
                    rank.lookups[plan.seq] = plan
                case StartLoad(plan):
                    rank.loads[plan.seq] = plan
                    self.tear(rank, plan)
                case StartOffload(plan):
                    rank.offloads[plan.seq] = plan
                case OfferOffload(seq=seq):
                    rank.readies[seq] = effect
                case Stop(seq):
                    rank.lookups.pop(seq, None)
                case Ended(request=request):
                    rank.told.append(("ended", request.seq))
                case Restored(request, pages) | Shortened(request, pages):
                    rank.told.append((type(effect).__name__, request.seq, pages))
                case Settled(request, pages):
                    rank.told.append(("Settled", request.seq, pages))
                case _:
                    rank.told.append((effect.kind, effect.num_pages, effect.hashes))

    def tear(self, rank: Rank, plan: LoadPlan) -> None:
        for pool, _, pages, _ in plan.pieces:
            for page in pages:
                rank.pages[pool][page] = GARBAGE

    # What one rank learns by itself: it moves votes only.

    def answer_lookup(self, rank: Rank, seq: int, *, lie: bool = False) -> None:
        plan = rank.lookups.pop(seq)
        present = [
            [lie or (ask.pool, page) in rank.store for page in ask.hashes]
            for ask in plan.asks
        ]
        rank.votes.answer(seq, restorable(plan, present))

    def finish_load(self, rank: Rank, seq: int, contents) -> None:
        """Write what is stored; vouch for the leading part; be quiet."""
        plan = rank.loads.pop(seq)
        good = plan.end
        for pool, start, pages, hashes in plan.pieces:
            for index, (page, name) in enumerate(zip(pages, hashes)):
                if (pool, name) in rank.store:
                    rank.pages[pool][page] = contents[name]
                else:
                    rank.pages[pool][page] = GARBAGE
                    good = min(good, start + index)
        rank.votes.sink(seq, max(0, good - plan.start))
        rank.votes.quiet(seq)

    def finish_offload(self, rank: Rank, seq: int, claim: int, contents) -> None:
        plan = rank.offloads.pop(seq)
        for pool, _, pages, hashes in plan.pieces:
            for page, name in zip(pages, hashes):
                content = rank.pages[pool][page]
                assert content == contents[name], "an offload reads what it should"
                if claim == 1:
                    rank.store.add((pool, name))
        rank.votes.sink(seq, claim)
        rank.votes.quiet(seq)

    # The barrier.

    def cast(self) -> None:
        """Send a ballot; several may be under way."""
        ballots = [rank.replica.ballot() for rank in self.ranks]
        vectors = [
            rank.votes.fill(ballot)
            for rank, ballot in zip(self.ranks, ballots, strict=True)
        ]
        assert len({len(vector) for vector in vectors}) == 1, "one shape on every rank"
        self.flight.append((ballots, vectors))

    def apply(self) -> None:
        """Apply the oldest verdict that is under way."""
        ballots, vectors = self.flight.pop(0)
        verdict = array("i", map(min, zip(*vectors, strict=True)))
        for rank, ballot in zip(self.ranks, ballots, strict=True):
            rank.replica.apply(ballot, array("i", verdict))
            self.carry_out(rank)
            for seq in rank.votes.said():
                if not rank.replica.is_open(seq):
                    rank.votes.forget(seq)
        for seq in list(self.requests):
            if not self.ranks[0].replica.is_open(seq):
                del self.requests[seq]
        self.check()

    def step(self) -> None:
        self.cast()
        self.apply()

    # Laws.

    def check(self) -> None:
        first = self.ranks[0]
        first.replica.check_invariants()
        for rank in self.ranks:
            self.check_contents(rank)
        if len({len(rank.told) for rank in self.ranks}) == 1:
            for rank in self.ranks[1:]:
                assert rank.told == first.told, "every rank is told the same"
                assert rank.replica.dump() == first.replica.dump(), "replicas are equal"

    def check_contents(self, rank: Rank) -> None:
        """Every page that is served holds what its prefix says."""
        state = rank.replica._state
        roots = {rank.replica._root(name): name for name in (None, "a", "b")}
        for root_hash, root in state.tree.roots.items():
            stack = [(root, b"")]
            while stack:
                node, key = stack.pop()
                key += node.edge
                stack += [(child, key) for child in node.children.values()]
                for pool, run in enumerate(node.pages):
                    if run is None or node.loads[pool] is not None:
                        continue
                    if node.written > min(self.done(rank), state.num_finished):
                        continue
                    for index, page in enumerate(run):
                        end = (node.start + index + 1) * self.stride
                        want = (roots[root_hash], key[:end])
                        assert rank.pages[pool][page] == want, (node, pool, page)

    def done(self, rank: Rank) -> int:
        return rank.votes.finished

    def states(self, state: PageState) -> int:
        return sum(
            ledger.count(state) for ledger in self.ranks[0].replica._state.ledgers
        )
