"""Replicas under random calls and random votes stay equal, lawful and truthful."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from asyncache.core import (
    FAILED,
    GOOD,
    PARENT_MISSING,
    AsyncacheError,
    Coverage,
    OrderError,
    OutOfPagesError,
    Pool,
    fifo,
    filo,
    lfu,
    lru,
    mru,
    priority,
    slru,
)
from tests.core.cluster import (
    FULL,
    Cluster,
    Rank,
    layout_of,
    pack,
    state_pool,
    window_pool,
)

pytestmark = pytest.mark.slow

# Few prompts that share much, of few tokens, so that they meet in the tree.
PROMPTS = [
    [int(digit) for digit in digits]
    for digits in (
        "00000000000000",
        "00001111000000",
        "00001111011111",
        "01010101010101",
    )
]
CLAIMS = [GOOD, GOOD, FAILED, PARENT_MISSING]
POLICIES = [lru, lru, lfu, fifo, mru, filo, slru, priority]
CALLS = ["restore", "extend", "forward", "commit", "append", "truncate", "give back"]
CALLS += ["checkpoint"]
MANAGE = ["launch", "attach", "detach", "swap", "reset"]
REVISIONS = [None, "1", "2"]
WORK = ["answer", "load", "offload", "ready", "forward", "all"]
FAULTS = ["end", "hang up", "late", "lie", "load", "offload", "ready", "store"]
MAX_STEPS = 60
numbers = st.integers(0, 11)
places = st.integers(0, 2)


class Lockstep(RuleBasedStateMachine):
    """Everything that loops, clients, clocks, stores and devices can do to replicas.

    Hypothesis switches rules on and off to look in corners, so what a run needs to get
    anywhere is in few rules: each draws what is done, to which of the open requests or
    transfers (``number``), on which rank (``place``), and how much of it (``size``).
    """

    pools: tuple[Pool, ...] = (FULL,)

    @initialize(
        num_pages=st.sampled_from([8, 12, 24]),
        slots=st.sampled_from([2, 3, 8]),
        mask_ints=st.sampled_from([5, 12]),
        write_threshold=st.sampled_from([1, 1, 1, 2, 0]),
        policy=st.sampled_from(POLICIES),
        low_water=st.sampled_from([0, 0, 4, 9]),
        launches=st.sampled_from([False, False, True]),
        lost=st.sets(st.integers(0, 40), max_size=6),
    )
    def begin(self, num_pages, slots, lost, policy, **bounds) -> None:
        self.cluster = Cluster(
            layout_of(*self.pools),
            {pool.name: self.size_of(pool, num_pages) for pool in self.pools},
            num_ranks=3,
            requests=5,
            slots=slots,
            offloads=slots // 2,
            offload_attempts=2,
            policy=policy,
            **bounds,
        )
        for prompt in PROMPTS:
            for name in (None, "a"):
                self.cluster.fill_stores(prompt, name)
        pages = sorted(self.cluster.first.store)
        for place in lost:
            for rank in self.cluster.ranks[place % 3 :]:
                rank.store.discard(pages[place % len(pages)])

    @staticmethod
    def size_of(pool: Pool, num_pages: int) -> int:
        """Return the pages of a pool: windows and states are short of them first."""
        match pool.coverage:
            case Coverage.ALL_PAGES:
                return num_pages
            case Coverage.TRAILING:
                return max(8, num_pages // 2)
            case Coverage.ENDPOINT:
                return num_pages // 3

    def pick(self, number: int) -> int | None:
        return self.pick_of(self.cluster.requests, number)

    @staticmethod
    def pick_of(under_way, number: int) -> int | None:
        return list(under_way)[number % len(under_way)] if under_way else None

    def try_to(self, name: str, seq: int, *args, **kwargs) -> None:
        """Make a call that may be refused, alike on every rank."""
        with suppress(AsyncacheError, ValueError):
            self.cluster.do(name, seq, *args, **kwargs)

    # A serving loop.

    @rule(
        prompt=st.sampled_from(PROMPTS),
        cut=st.integers(1, 14),
        tail=st.lists(st.integers(0, 2), max_size=3),
        name=st.sampled_from([None, None, "a"]),
        reserve=st.sampled_from([0, 0, 3]),
        priority=st.sampled_from([0, 0, 1]),
        is_prefetch=st.booleans(),
    )
    def open(self, prompt, cut, tail, **kwargs) -> None:
        self.cluster.open(prompt[:cut] + tail, **kwargs)

    @rule(rounds=st.lists(st.tuples(numbers, st.booleans()), min_size=1, max_size=8))
    def serve(self, rounds) -> None:
        """Take requests on as a loop does, on ranks that work or lag."""
        for number, is_prompt in rounds:
            self.go_on(number)
            if is_prompt:
                self.launch()
                for rank in self.cluster.ranks:
                    self.cluster.work(rank)
                self.cluster.step()

    @rule(number=numbers, rounds=st.integers(1, 9))
    def serve_one(self, number, rounds) -> None:
        self.serve([(number, True)] * rounds)

    def go_on(self, number: int) -> None:
        cluster, seq = self.cluster, self.pick(number)
        if seq is None:
            return
        request = cluster.request(seq)
        if request.lookup is not None:
            self.answer(number, place=number % 3)
        elif not request.promise:
            self.try_to("restore", seq)
        elif cluster.covered[seq] < request.extent:
            self.forward(number, number)
        elif request.extent < request.num_tokens:
            self.extend(number, self.left_for_later(request, number))
        elif request.committed < request.extent:
            self.try_to("commit", seq, request.extent)
        else:
            cluster.end(seq)

    def left_for_later(self, request, number: int) -> int:
        """Return the tokens to compute later: in pieces where that matters."""
        if not self.cluster.first.state.tree.windows:
            return 0
        start = max(request.extent, 2 * request.hit)
        return max(0, request.num_tokens - start - 3 - number % 4)

    def launch(self) -> None:
        if self.cluster.bounds.launches:
            self.cluster.call("launch")

    # Calls, in any order.

    @rule(what=st.sampled_from(MANAGE), revision=st.sampled_from(REVISIONS))
    def manage(self, what, revision) -> None:
        match what:
            case "reset":
                self.cluster.call("reset", None, revision)
            case "swap":
                self.cluster.call("detach")
                self.cluster.call("attach")
            case _:
                self.cluster.call(what)

    @rule(
        what=st.sampled_from(CALLS),
        number=numbers,
        size=st.integers(0, 7),
    )
    def call(self, what, number, size) -> None:
        if (seq := self.pick(number)) is None:
            return
        if what in {"extend", "forward"}:
            getattr(self, what)(number, size)
        elif what == "give back":
            self.cluster.do("suspend" if size else "abort", seq)
        else:
            self.change(what, seq, size)

    def change(self, what: str, seq: int, size: int) -> None:
        request = self.cluster.request(seq)
        match what:
            case "restore":
                self.try_to("restore", seq, ask_store=size != 0)
            case "commit":
                known = max(request.hit * 2, self.cluster.covered[seq])
                self.try_to("commit", seq, known - size % 4)
            case "append":
                room = 20 - request.num_tokens
                self.cluster.do("append", seq, pack([size % 2] * min(size % 4, room)))
            case "truncate":
                self.try_to("truncate", seq, request.num_tokens - size)
            case "checkpoint" if self.cluster.can_checkpoint(seq):
                with suppress(AsyncacheError, ValueError):
                    self.cluster.checkpoint(seq)

    def extend(self, number: int, less: int) -> None:
        seq = self.pick(number)
        request = self.cluster.request(seq)
        num_tokens = request.num_tokens - less
        promised = request.remainder + len(request.spare[0])
        missing = -(-num_tokens // 2) - len(request.tables[0])
        try:
            self.cluster.do("extend", seq, num_tokens)
        except OutOfPagesError:
            assert not request.promise or missing > promised
        except (AsyncacheError, ValueError):
            pass

    def forward(self, number: int, others: int) -> None:
        cluster = self.cluster
        if len(cluster.first.forwards) < 3:
            seqs = [self.pick(number)]
            seqs += [s for i, s in enumerate(cluster.requests) if others >> i & 1]
            seqs = list(dict.fromkeys(seqs))
            if cluster.first.state.tree.states and self.are_behind(seqs):
                with pytest.raises(OrderError, match="on its way"):
                    cluster.forward(seqs)
                return
            cluster.forward(seqs)
            for seq in seqs if number % 3 else ():
                self.change("checkpoint", seq, 0)

    def are_behind(self, seqs: list[int]) -> bool:
        requests = map(self.cluster.request, seqs)
        return any(request.lookup is not None or request.needs for request in requests)

    # What ranks learn by themselves: it moves their votes.

    @rule(
        what=st.sampled_from(WORK),
        number=numbers,
        place=places,
    )
    def work(self, what, number, place) -> None:
        cluster, rank = self.cluster, self.cluster.ranks[place]
        match what:
            case "answer":
                self.answer(number, place)
            case "load" if rank.loads:
                cluster.finish_load(rank, self.pick_of(rank.loads, number))
            case "offload" if rank.offloads:
                cluster.finish_offload(rank, self.pick_of(rank.offloads, number))
            case "ready" if rank.readies:
                cluster.agree_ready(rank, self.pick_of(rank.readies, number))
            case "forward" if rank.forwards:
                cluster.finish_forward(rank)
            case "all":
                cluster.work(rank)

    def answer(self, number: int, place: int, *, lie: bool = False) -> None:
        rank = self.cluster.ranks[place]
        if rank.lookups:
            seq = self.pick_of(rank.lookups, number)
            self.cluster.answer_lookup(rank, seq, lie=lie)

    @rule(
        what=st.sampled_from(FAULTS),
        number=numbers,
        place=places,
        size=st.integers(0, 7),
    )
    def fail(self, what, number, place, size) -> None:
        if what in {"end", "hang up", "late"}:
            self.fail_a_request(what, number, place)
        elif what == "lie":
            self.answer(number, place, lie=True)
        else:
            self.fail_a_transfer(what, number, self.cluster.ranks[place], size)

    def fail_a_request(self, what: str, number: int, place: int) -> None:
        if (seq := self.pick(number)) is None:
            return
        rank = self.cluster.ranks[place]
        match what:
            case "end":
                for other in self.cluster.ranks if number % 2 else [rank]:
                    other.votes.quiet(seq)
            case "hang up":
                rank.votes.sink(seq, 0)
            case "late":
                self.cluster.give_up(rank, seq)

    def fail_a_transfer(self, what: str, number: int, rank: Rank, size: int) -> None:
        match what:
            case "load" if rank.loads:
                rank.votes.sink(self.pick_of(rank.loads, number), size)
            case "offload" if rank.offloads:
                seq = self.pick_of(rank.offloads, number)
                self.cluster.finish_offload(rank, seq, CLAIMS[size % 4])
            case "ready" if rank.readies:
                seq = self.pick_of(rank.readies, number)
                rank.votes.sink(seq, 0)
                self.cluster.agree_ready(rank, seq)
            case "store" if rank.store:
                rank.store.discard(self.pick_of(sorted(rank.store), 8 * number + size))

    # The barrier: up to two ballots are under way.

    @rule(what=st.sampled_from(["cast", "apply", "step"]))
    def meet(self, what) -> None:
        cluster = self.cluster
        if what == "cast" and len(cluster.flight) < 2:
            cluster.cast()
        elif what == "apply" and cluster.flight:
            cluster.apply()
        elif what == "step":
            cluster.step()

    # Looking changes nothing.

    @rule(place=places, prompt=st.sampled_from(PROMPTS), cut=st.integers(1, 14))
    def look(self, place, prompt, cut) -> None:
        rank = self.cluster.ranks[place]
        before = rank.replica.look.dump()
        rank.replica.look.match(pack(prompt[:cut]), namespace="a")
        rank.replica.look.statistics()
        rank.replica.look.check_invariants()
        assert rank.replica.look.num_moving >= 0
        assert repr([*rank.state.agenda.open.values(), *rank.state.tree.nodes()])
        assert rank.replica.look.dump() == before

    def teardown(self) -> None:
        """Once faults stop, all that is open ends, and nothing is lost."""
        cluster = self.cluster
        for _ in range(MAX_STEPS):
            self.launch()
            cluster.step()
            for rank in cluster.ranks:
                cluster.work(rank)
            for seq in cluster.requests:
                cluster.end(seq)
            if cluster.replica.look.is_idle:
                break
        cluster.check_rest()


class LockstepWithAWindow(Lockstep):
    """The same with a second pool, of which prefixes need the trailing pages only."""

    pools = (FULL, window_pool(4))


class LockstepWithWindows(Lockstep):
    """The same with windows of two sizes."""

    pools = (FULL, window_pool(3), window_pool(6, "wide"))


class LockstepWithAState(Lockstep):
    """The same with recurrent states: a hit ends where one was kept."""

    pools = (FULL, state_pool())


class LockstepWithAll(Lockstep):
    """The same with full attention, windows and states of two kinds, in any order."""

    pools = (state_pool("fast"), window_pool(6), FULL, state_pool("slow"))


MACHINES = [Lockstep, LockstepWithAWindow, LockstepWithWindows]
MACHINES += [LockstepWithAState, LockstepWithAll]


@pytest.mark.parametrize("machine", MACHINES)
def test_replicas_stay_equal_and_pages_true_under_any_calls_and_votes(machine):
    profile = settings()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=2 * profile.max_examples,
            stateful_step_count=2 * profile.stateful_step_count,
            suppress_health_check=list(HealthCheck),
        ),
    )
