"""Replicas in lockstep, each with pages of its own whose contents can be checked.

A page's content is what it means: its :class:`Content`, or GARBAGE. Transfers and
forwards write pages as real ones do: whenever they like while they are open, and never
after. So a page that is served before it landed, or given out while something still
writes it, or kept across a reset, shows as content that is not its prefix.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from asyncache.core import (
    GOOD,
    AskStore,
    AsyncacheError,
    AttentionPool,
    Ballot,
    Bounds,
    Fact,
    FactKind,
    Hurry,
    InvariantError,
    KVLayout,
    LoadPlan,
    LookupPlan,
    OfferOffload,
    OffloadPlan,
    PageHash,
    PagesCached,
    PagesDropped,
    PageState,
    Policy,
    Replica,
    RequestState,
    SlotCopy,
    StartLoad,
    StartOffload,
    StatePool,
    Stop,
    Votes,
    WindowPool,
    hash_pages,
    lru,
    restorable,
    root_hash,
)

GARBAGE = "garbage"
NAMESPACES = (None, "a", "b")
SHAPE = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "dtype": "uint8"}
FULL = AttentionPool(name="kv", **SHAPE)


def window_pool(num_tokens: int, name: str = "window") -> WindowPool:
    return WindowPool(name=name, window_tokens=num_tokens, **SHAPE)


def state_pool(name: str = "state") -> StatePool:
    return StatePool(name=name, num_layers=1, shape=(1,), dtype="uint8")


def layout_of(*pools, page_tokens: int = 2) -> KVLayout:
    return KVLayout(model="m", page_tokens=page_tokens, pools=pools or (FULL,))


def pack(tokens: Iterable[int]) -> bytes:
    return array("i", tokens).tobytes()


class Content(NamedTuple):
    """What the bytes of a page are: weights and namespace, and all tokens so far."""

    root: PageHash
    tokens: bytes
    generation: int | None = None
    """Resets before it was computed; None for what the store had."""


class Era(NamedTuple):
    """What a request's pages are computed by: its first page decides for all."""

    root: PageHash
    generation: int


def is_of(content: Content | str, era: Era, tokens: bytes) -> bool:
    """Whether a page is what an era makes of some tokens."""
    if isinstance(content, str):
        return False
    generations = (None, era.generation)
    same = (content.root, content.tokens) == (era.root, tokens)
    return same and content.generation in generations


Contents = dict[PageHash, Content]


class Read(NamedTuple):
    """A page that a forward reads until it ends, and what that must be."""

    pool: int
    page: int
    era: Era
    tokens: bytes


@dataclass
class Forward:
    """What one rank's run of the model does: all of it as late as may be."""

    number: int
    seqs: list[int]
    copies: list[SlotCopy]
    reads: list[Read]
    writes: list[tuple[int, int, Content | str]]
    checkpoints: list[SlotCopy] = field(default_factory=list)


def resident(rank: Rank) -> set[tuple[str, PageHash]]:
    """Return what the tree has, pool by pool, by page hash."""
    tree, pools = rank.state.tree, rank.state.layout.pools
    return {
        (pools[pool].name, page)
        for node in tree.nodes()
        for pool, run in enumerate(node.pages)
        if run is not None and node.loads[pool] is None
        for page in tree.hashes(node)[node.start_of(pool) - node.start :]
    }


@dataclass
class Rank:
    """One rank: a replica, its votes, its pages, and what is under way on it."""

    replica: Replica
    pages: list[list[Content | str]]
    votes: Votes = field(default_factory=Votes)
    lookups: dict[int, LookupPlan] = field(default_factory=dict)
    loads: dict[int, LoadPlan] = field(default_factory=dict)
    offloads: dict[int, OffloadPlan] = field(default_factory=dict)
    readies: dict[int, OfferOffload] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)
    store: set[tuple[int, PageHash]] = field(default_factory=set)
    told: list[object] = field(default_factory=list)
    cached: set[tuple[str, PageHash]] = field(default_factory=set)
    """What is resident, by what was told of pages that came and went."""

    @property
    def state(self):
        return self.replica._state

    def note(self, news: Fact | PagesCached | PagesDropped | Hurry) -> None:
        """Do as an observer that keeps account of what is resident."""
        match news:
            case PagesCached(pool, hashes):
                new = {(pool, page) for page in hashes}
                assert not new & self.cached, "a page comes once"
                self.cached |= new
            case PagesDropped(pool, hashes):
                old = {(pool, page) for page in hashes}
                assert old <= self.cached, "a page goes that had come"
                self.cached -= old
            case Hurry(seq):
                self.told.append(("Hurry", seq))
            case Fact(kind, num_pages, hashes):
                self.told.append((kind, num_pages, hashes))
                if kind is FactKind.RESET:
                    self.cached.clear()


class Cluster:
    """Ranks that make the same calls and reduce their votes."""

    def __init__(
        self,
        layout: KVLayout | None = None,
        num_pages: int | dict[str, int] = 16,
        *,
        num_ranks: int = 1,
        attach: bool = True,
        policy: Policy = lru,
        **bounds: int,
    ) -> None:
        self.layout = layout_of() if layout is None else layout
        self.bounds = Bounds(**bounds)
        self.stride = 4 * self.layout.page_tokens
        sizes = num_pages
        if isinstance(sizes, int):
            sizes = {pool.name: num_pages for pool in self.layout.pools}
        self.ranks = [
            Rank(
                Replica(self.layout, sizes, self.bounds, policy, tells_pages=True),
                [[GARBAGE] * sizes[pool.name] for pool in self.layout.pools],
            )
            for _ in range(num_ranks)
        ]
        self.roots = {root_hash(self.layout, name): name for name in NAMESPACES}
        self.names: dict[int, str | None] = {}
        self.generation = 0
        self.eras: dict[int, Era] = {}
        self.requests: dict[int, list[RequestState]] = {}
        self.covered: dict[int, int] = {}
        """Tokens of a request that a forward has computed, or has begun to."""
        self.slotted: dict[int, bytes] = {}
        """What a request's own slots are the state of, once its forwards have ended."""
        self.contents: Contents = {}
        """What each page is that may be in a store."""
        self.flight: list[tuple[list[Ballot], list[array[int]]]] = []
        if attach:
            self.call("attach")

    @property
    def first(self) -> Rank:
        return self.ranks[0]

    @property
    def replica(self) -> Replica:
        return self.first.replica

    def request(self, seq: int) -> RequestState:
        return self.requests[seq][0]

    def fill_stores(self, tokens: Iterable[int], name: str | None = None) -> None:
        """Put each page of a prompt, of all pools, into every rank's store."""
        for page in self.learn(pack(tokens), name):
            for rank in self.ranks:
                rank.store |= {(pool, page) for pool in range(len(self.layout.pools))}

    def learn(self, packed: bytes, name: str | None) -> list[PageHash]:
        """Note what the pages of a prompt are; return their hashes."""
        root = root_hash(self.layout, name)
        hashes = hash_pages(packed, page_tokens=self.layout.page_tokens, parent=root)
        for index, page in enumerate(hashes):
            self.contents[page] = Content(root, packed[: (index + 1) * self.stride])
        return hashes

    def now(self, name: str | None) -> Era:
        """Return what is computed from now on in a namespace."""
        return Era(root_hash(self.layout, name), self.generation)

    # Calls, the same on every rank.

    def call(self, name: str, seq: int | None = None, *args, **kwargs):
        """Make a call on every rank; all return alike or raise alike."""
        results = []
        for place, rank in enumerate(self.ranks):
            method = getattr(rank.replica.calls, name)
            first = () if seq is None else (self.requests[seq][place],)
            try:
                results.append(method(*first, *args, **kwargs))
            except InvariantError:
                raise
            except (AsyncacheError, ValueError) as error:
                results.append(error)
            self.carry_out(rank)
        if not isinstance(results[0], Exception):
            self.note_eras(name, seq, *args)
        self.forget_ended()
        self.check()
        return results

    def open(
        self,
        tokens,
        name: str | None = None,
        reserve: int = 0,
        priority: int = 0,
        *,
        is_prefetch: bool = False,
    ) -> int | None:
        """Open a request; return its number, or None if all ranks refuse it."""
        packed = pack(tokens)
        results = self.call(
            "open",
            None,
            packed,
            namespace=name,
            num_reserve_tokens=reserve,
            priority=priority,
            is_prefetch=is_prefetch,
        )
        if isinstance(results[0], Exception):
            assert len({repr(error) for error in results}) == 1
            return None
        seq = results[0].seq
        self.requests[seq], self.names[seq], self.covered[seq] = results, name, 0
        self.eras[seq] = self.now(name)
        self.learn(packed, name)
        return seq

    def do(self, name: str, seq: int, *args, **kwargs):
        """Make a call on a request; return what all ranks return, or raise it."""
        results = self.call(name, seq, *args, **kwargs)
        assert len(set(map(repr, results))) == 1, results
        if isinstance(results[0], Exception):
            raise results[0]
        if name == "append":
            self.learn(bytes(self.request(seq).tokens), self.names[seq])
        return results[0]

    def note_eras(self, name: str, seq: int | None, revision: object = None) -> None:
        """Note which weights make what requests compute from now on."""
        if name == "reset":
            self.generation += 1
            if isinstance(revision, str):
                self.layout = replace(self.layout, revision=revision)
                self.roots |= {root_hash(self.layout, n): n for n in NAMESPACES}
            for other, (request, *_) in self.requests.items():
                if not any(map(len, [*request.tables, *request.spare])):
                    self.eras[other] = self.now(self.names[other])
                self.learn(bytes(request.tokens), self.names[other])
        elif seq is not None and name in {"restore", "suspend"}:
            self.eras[seq] = self.now(self.names[seq])
            self.slotted.pop(seq, None)

    def forward(self, seqs: list[int]) -> None:
        """Run the model on some requests: it reads what is there, writes at its end."""
        for place, rank in enumerate(self.ranks):
            requests = [self.requests[seq][place] for seq in seqs]
            writes = [
                write
                for seq, request in zip(seqs, requests, strict=True)
                for write in self.computed(seq, request)
            ]
            number = rank.replica.calls.forward(requests)
            self.carry_out(rank)
            copies = rank.replica.look.copies(number)
            forward = Forward(number, seqs, copies, [], writes)
            for seq, request in zip(seqs, requests, strict=True):
                forward.reads += self.read(seq, request)
                forward.reads += self.begun_with(seq, request)
            rank.forwards.append(forward)
        for seq in seqs:
            request = self.request(seq)
            self.covered[seq] = request.extent
            num_tokens = max(request.extent, request.hit * self.layout.page_tokens)
            if request.slots.own and num_tokens:
                self.slotted[seq] = bytes(request.tokens[: 4 * num_tokens])
        self.check()

    def read(self, seq: int, request: RequestState) -> Iterator[Read]:
        """Yield the whole pages that a forward looks back to."""
        page_tokens, key = self.layout.page_tokens, bytes(request.tokens)
        start = max(self.covered[seq], request.hit * page_tokens)
        for pool, table in enumerate(request.tables):
            pool_kind = self.layout.pools[pool]
            first = 0
            if isinstance(pool_kind, StatePool):
                continue
            if isinstance(pool_kind, WindowPool):
                first = max(0, start - pool_kind.window_tokens) // page_tokens
            for position in range(first, start // page_tokens):
                assert table[position] >= 0, (request, pool, position)
                # A hit that is on its way may come to nothing.
                if not request.needs:
                    tokens = key[: (position + 1) * self.stride]
                    yield Read(pool, table[position], self.eras[seq], tokens)

    def begun_with(self, seq: int, request: RequestState) -> Iterator[Read]:
        """Yield the states that a forward goes on from: a hit's, or its last one."""
        key = bytes(request.tokens)
        tokens = self.slotted.get(seq, key[: request.hit * self.stride])
        # After a truncate the model computes from something of its own.
        if tokens and key.startswith(tokens):
            for pool, slot in self.own_slots(request):
                yield Read(pool, slot, self.eras[seq], tokens)

    def own_slots(self, request: RequestState) -> Iterator[tuple[int, int]]:
        states = self.first.state.tree.states
        return zip(states, request.slots.own, strict=False)

    def can_checkpoint(self, seq: int) -> bool:
        """Whether all ranks are in a forward that brings the slots to a boundary."""
        request, packed = self.request(seq), self.slotted.get(seq, b"")
        return (
            len(packed) == 4 * request.computed
            and request.computed % self.layout.page_tokens == 0
            and request.tokens.startswith(packed)
            and all(any(seq in f.seqs for f in rank.forwards) for rank in self.ranks)
        )

    def checkpoint(self, seq: int) -> bool:
        """Keep the state that the last forward over a request brings its slots to."""
        assert self.can_checkpoint(seq)
        copies = self.call("checkpoint", seq, self.request(seq).computed)
        assert len(set(map(repr, copies))) == 1, copies
        if isinstance(copies[0], Exception):
            raise copies[0]
        for rank, moved in zip(self.ranks, copies, strict=True):
            forward = [f for f in rank.forwards if seq in f.seqs][-1]
            forward.checkpoints += moved
        return bool(copies[0])

    def computed(self, seq: int, request: RequestState) -> Iterator[tuple]:
        """Yield what a forward over a request's own pages writes."""
        key, era = bytes(request.tokens), self.eras[seq]
        whole = request.extent // self.layout.page_tokens
        for pool, table in enumerate(request.tables):
            for position in range(request.hit, len(table)):
                end = (position + 1) * self.stride
                known = Content(era.root, key[:end], era.generation)
                content = known if position < whole else GARBAGE
                if request.own[pool][position]:
                    yield pool, table[position], content
        if request.extent > request.hit * self.layout.page_tokens:
            tokens = key[: 4 * request.extent]
            for pool, slot in self.own_slots(request):
                yield pool, slot, Content(era.root, tokens, era.generation)

    def finish_forward(self, rank: Rank) -> None:
        """End the oldest forward of a rank: now its writes are there."""
        forward = rank.forwards.pop(0)
        for pool, source, target in forward.copies:
            rank.pages[pool][target] = rank.pages[pool][source]
        for pool, page, era, tokens in forward.reads:
            content = rank.pages[pool][page]
            assert is_of(content, era, tokens), (forward, pool, page, content)
        for pool, page, content in forward.writes:
            rank.pages[pool][page] = content
        for pool, source, target in forward.checkpoints:
            rank.pages[pool][target] = rank.pages[pool][source]
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
                    rank.readies.pop(seq, None)
                case Fact() | PagesCached() | PagesDropped() | Hurry():
                    rank.note(effect)
                case _:
                    rest = getattr(effect, "num_pages", getattr(effect, "aborted", 0))
                    rank.told.append((type(effect).__name__, effect.request.seq, rest))

    def tear(self, rank: Rank, plan: LoadPlan) -> None:
        for pool, _, pages, _ in plan.pieces:
            for page in pages:
                rank.pages[pool][page] = GARBAGE

    def facts(self, kind: FactKind) -> list[tuple]:
        """Return the facts of a kind that the first rank was told."""
        return [told for told in self.first.told if told[0] is kind]

    # What one rank learns by itself: it moves votes only.

    def answer_lookup(self, rank: Rank, seq: int, *, lie: bool = False) -> None:
        plan = rank.lookups.pop(seq)
        present = [
            [lie or (ask.pool, page) in rank.store for page in ask.hashes]
            for ask in plan.asks
        ]
        rank.votes.answer(seq, restorable(plan, present))

    def give_up(self, rank: Rank, seq: int) -> None:
        """Let the clock of a request's restore run out on one rank."""
        request = self.requests[seq][self.ranks.index(rank)]
        if request.wait is not None:
            rank.votes.sink(request.wait.seq, 0)
        elif request.lookup is not None:
            rank.lookups.pop(request.lookup.seq, None)
            rank.votes.answer(request.lookup.seq, ())

    def finish_load(self, rank: Rank, seq: int) -> None:
        """Write what is stored; vouch for the leading part; be quiet."""
        plan = rank.loads.pop(seq)
        good = plan.end
        for pool, start, pages, hashes in plan.pieces:
            for index, (page, name) in enumerate(zip(pages, hashes, strict=True)):
                found = (pool, name) in rank.store
                rank.pages[pool][page] = self.contents[name] if found else GARBAGE
                good = good if found else min(good, start + index)
        rank.votes.sink(seq, max(0, good - plan.start))
        rank.votes.quiet(seq)

    def finish_offload(self, rank: Rank, seq: int, claim: int = GOOD) -> None:
        plan = rank.offloads.pop(seq)
        for pool, _, pages, hashes in plan.pieces:
            for page, name in zip(pages, hashes, strict=True):
                content = rank.pages[pool][page]
                known = self.contents[name]
                true = isinstance(content, Content) and content[:2] == known[:2]
                assert true, "an offload reads what it should"
                if claim == GOOD:
                    rank.store.add((pool, name))
        rank.votes.sink(seq, claim)
        rank.votes.quiet(seq)

    def agree_ready(self, rank: Rank, seq: int) -> None:
        rank.readies.pop(seq)
        rank.votes.quiet(seq)

    def end(self, seq: int) -> None:
        """End a request's scope on every rank."""
        for rank in self.ranks:
            rank.votes.quiet(seq)

    def work(self, rank: Rank) -> None:
        """Finish all that is under way on a rank, without a fault."""
        while rank.forwards:
            self.finish_forward(rank)
        for seq in list(rank.lookups):
            self.answer_lookup(rank, seq)
        for seq in list(rank.loads):
            self.finish_load(rank, seq)
        for seq in list(rank.readies):
            self.agree_ready(rank, seq)
        for seq in list(rank.offloads):
            self.finish_offload(rank, seq)

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
                if not rank.replica.look.is_open(seq):
                    rank.votes.forget(seq)
        self.forget_ended()
        self.check()

    def step(self) -> None:
        """Apply all that is under way, or cast and apply."""
        if not self.flight:
            self.cast()
        while self.flight:
            self.apply()

    def settle(self, num_steps: int = 40) -> None:
        """Work without faults until there is nothing left to agree on."""
        for _ in range(num_steps):
            for rank in self.ranks:
                self.work(rank)
            self.step()

    def restore(self, seq: int) -> int:
        """Restore a request from device and store; return the tokens of its hit."""
        self.do("restore", seq)
        return self.run_restored(seq)

    def run_restored(self, seq: int) -> int:
        """Do what a restore waits for; return the tokens of its hit."""
        while self.request(seq).lookup is not None or self.request(seq).wait:
            for rank in self.ranks:
                for lookup in list(rank.lookups):
                    self.answer_lookup(rank, lookup)
                for load in list(rank.loads):
                    self.finish_load(rank, load)
            self.step()
        return self.request(seq).hit * self.layout.page_tokens

    def run(self, seq: int) -> int:
        """Restore, compute and commit a request; return the tokens of its hit."""
        hit = self.restore(seq)
        num_tokens = self.request(seq).num_tokens
        self.do("extend", seq, num_tokens)
        self.forward([seq])
        if self.can_checkpoint(seq) and self.first.state.tree.states:
            self.checkpoint(seq)
        for rank in self.ranks:
            self.finish_forward(rank)
        self.do("commit", seq, num_tokens)
        return hit

    def serve(self, tokens, name: str | None = None) -> int:
        """Run a request from open to end, and let all that follows happen."""
        seq = self.open(tokens, name)
        assert seq is not None
        hit = self.run(seq)
        self.end(seq)
        self.settle(6)
        return hit

    def forget_ended(self) -> None:
        for seq in list(self.requests):
            if not self.replica.look.is_open(seq):
                del self.requests[seq], self.covered[seq]
                self.slotted.pop(seq, None)
                del self.names[seq], self.eras[seq]
            else:
                extent = self.request(seq).extent
                self.covered[seq] = min(self.covered[seq], extent)

    # Laws.

    def check(self) -> None:
        for rank in self.ranks:
            self.check_contents(rank)
            assert rank.cached == resident(rank), "events are residency"
        self.replica.look.check_invariants()
        dump = self.replica.look.dump()
        for rank in self.ranks[1:]:
            assert rank.told == self.first.told, "every rank is told the same"
            assert rank.replica.look.dump() == dump, "replicas are equal"

    def check_contents(self, rank: Rank) -> None:
        """Every page that is served holds what its prefix says."""
        unwritten: set[tuple[int, int]] = set()
        for root, root_node in rank.state.tree.roots.items():
            stack = [(root_node, b"")]
            while stack:
                node, key = stack.pop()
                key += node.edge
                stack += [(child, key) for child in node.children.values()]
                for pool, run in enumerate(node.pages):
                    if run is None or node.loads[pool] is not None:
                        continue
                    if node.written > rank.votes.finished:
                        unwritten |= {(pool, page) for page in run}
                        continue
                    for index, page in enumerate(run):
                        end = (node.start_of(pool) + index + 1) * self.stride
                        content, era = (
                            rank.pages[pool][page],
                            Era(root, self.generation),
                        )
                        assert is_of(content, era, key[:end]), (node, pool, page)
        for seq in self.requests:
            self.check_tables(rank, seq, unwritten)

    def check_tables(self, rank: Rank, seq: int, unwritten: set) -> None:
        """A request's page tables name the pages of its prefix, and nothing else."""
        request = self.requests[seq][self.ranks.index(rank)]
        key, era = bytes(request.tokens), self.eras[seq]
        windows = dict(rank.state.tree.windows)
        self.check_slots(rank, seq, request)
        whole = 0 if rank.forwards else self.covered[seq] // self.layout.page_tokens
        for pool, table in enumerate(request.tables):
            first = max(0, request.hit - windows.get(pool, request.hit))
            first = max(first, request.passed[pool])
            stands = [] if request.needs or request.shared > request.hit else table
            places = set(range(first, request.hit)) & set(range(len(stands)))
            own = request.own[pool][:whole]
            places |= {at for at, mine in enumerate(own) if mine}
            for position in places:
                page = table[position]
                if (pool, page) not in unwritten:
                    tokens, content = (
                        key[: (position + 1) * self.stride],
                        rank.pages[pool][page],
                    )
                    assert is_of(content, era, tokens), (request, pool, position)

    def check_slots(self, rank: Rank, seq: int, request: RequestState) -> None:
        """A request's own slots hold what its forwards have made of them."""
        if seq in self.slotted and not rank.forwards:
            for pool, slot in self.own_slots(request):
                content = rank.pages[pool][slot]
                assert is_of(content, self.eras[seq], self.slotted[seq]), (
                    request,
                    pool,
                )

    def check_rest(self) -> None:
        """Nothing is open: every page is free or in the tree, and nothing is pinned."""
        state = self.first.state
        assert self.replica.look.is_idle, state.agenda.open
        assert not state.pins
        assert not state.promised
        assert not state.dirty
        assert not state.promised_slots
        for held in (PageState.REQUEST, PageState.TRANSIT, PageState.QUARANTINE):
            for pool in range(len(state.ledgers)):
                assert not self.count(held, pool), held

    def count(self, held: PageState, pool: int = 0) -> int:
        return self.first.state.ledgers[pool].count(held)
