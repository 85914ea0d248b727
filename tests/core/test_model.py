"""The tree against a model that is a set of prefixes; look-ups against brute force."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from asyncache.core import (
    Asked,
    Coverage,
    FactKind,
    LookupPlan,
    PageHash,
    PageState,
    Pool,
    fifo,
    filo,
    lfu,
    lru,
    mru,
    priority,
    restorable,
    slru,
)
from tests.core.cluster import (
    FULL,
    Cluster,
    layout_of,
    pack,
    state_pool,
    window_pool,
)

WINDOW = 2
prompts = st.builds(
    lambda stem, cut, tail: stem[:cut] + tail,
    st.sampled_from([[0] * 16, [0] * 4 + [1] * 12, [0] * 8 + [1] * 8, [1] * 16]),
    st.integers(0, 16),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
names = st.sampled_from([None, None, "a"])


class Model(RuleBasedStateMachine):
    """One replica, and a set of (namespace, prefix) for each pool.

    The model knows evictions by asking which leaf a policy takes first, by a look at
    all of them, before the replica evicts. Nothing is ever taken from the replica's
    answer.
    """

    pools: tuple[Pool, ...] = (FULL,)

    @initialize(
        num_pages=st.sampled_from([11, 14, 20]),
        policy=st.sampled_from([lru, lru, mru, lfu, fifo, filo, slru, priority]),
    )
    def begin(self, num_pages, policy) -> None:
        sizes = {pool.name: self.size_of(pool, num_pages) for pool in self.pools}
        self.windows = {
            index: 1 if pool.coverage is Coverage.ENDPOINT else WINDOW
            for index, pool in enumerate(self.pools)
            if pool is not FULL
        }
        self.states = [
            index
            for index, pool in enumerate(self.pools)
            if pool.coverage is Coverage.ENDPOINT
        ]
        self.policy = policy
        self.cluster = Cluster(
            layout_of(*self.pools), sizes, attach=False, requests=4, policy=policy
        )
        self.resident: list[set[tuple[str | None, bytes]]] = [set() for _ in self.pools]
        self.num_evicted = 0

    @staticmethod
    def size_of(pool: Pool, num_pages: int) -> int:
        if pool.coverage is Coverage.ENDPOINT:
            return num_pages // 3
        return num_pages if pool is FULL else 11

    # What happens.

    @rule(
        tokens=prompts,
        name=names,
        keep=st.sampled_from([False, False, True]),
        urgency=st.integers(0, 2),
    )
    def serve(self, tokens, name, keep, urgency) -> None:
        """Restore, compute and commit a request, as far as there is room."""
        cluster = self.cluster
        if len(cluster.requests) == 4:
            return
        seq = cluster.open(tokens, name, priority=urgency)
        if seq is None:
            return
        expected = self.longest(tokens, name)
        kept = {pack(tokens)[: 8 * expected]} if expected else set()
        victims = [self.coldest_state(pool, name, kept) for pool in self.states]
        cluster.do("restore", seq)
        request = cluster.request(seq)
        if not request.promise:
            cluster.do("abort", seq)
            return
        assert request.hit == expected
        self.forget_states(victims)
        needed = -(-len(tokens) // 2) - request.hit
        self.evict(needed)
        cluster.do("extend", seq, len(tokens))
        self.check_residents()
        cluster.forward([seq])
        has_state = self.checkpoint(seq)
        cluster.finish_forward(cluster.first)
        cluster.step()
        if cluster.do("commit", seq, len(tokens)) // 2 == len(tokens) // 2:
            self.add(tokens, name, request.hit)
            for pool in self.states if has_state else ():
                self.resident[pool].add((name, pack(tokens)))
        if not keep:
            cluster.end(seq)
            cluster.step()

    @rule(number=st.integers(0, 3))
    def end(self, number) -> None:
        seqs = list(self.cluster.requests)
        if seqs:
            self.cluster.end(seqs[number % len(seqs)])
            self.cluster.step()

    @rule(tokens=prompts, name=names)
    def match(self, tokens, name) -> None:
        found = self.cluster.replica.look.match(pack(tokens), namespace=name)
        assert found == 2 * self.longest(tokens, name)

    def checkpoint(self, seq: int) -> bool:
        """Keep the state at the end of a prompt, if that is a boundary."""
        request = self.cluster.request(seq)
        if not self.states or request.extent % 2 or request.extent // 2 == request.hit:
            return False
        victims = [self.coldest_state(pool, None, set()) for pool in self.states]
        is_kept = self.cluster.checkpoint(seq)
        assert is_kept == all(found for found, _ in victims)
        if is_kept:
            self.forget_states(victims)
        return is_kept

    # What the model makes of it.

    def coldest_state(self, pool: int, name, kept: set) -> tuple:
        """Return whether a slot can be had, and the (pool, prefix) that goes for it."""
        state = self.cluster.first.state
        if state.ledgers[pool].num_free:
            return True, None
        held = self.in_windows(pool)
        victims = []
        for node in state.tree.nodes():
            *_, prefix = self.prefixes(node)
            is_needed = (node, node.end - 1) in held or (
                prefix[0] == name and prefix[1] in kept
            )
            if node.pages[pool] is not None and not is_needed:
                victims.append((node.used, node.serial, pool, prefix))
        return bool(victims), min(victims)[2:] if victims else None

    def forget_states(self, victims: list[tuple]) -> None:
        for _, victim in victims:
            if victim is not None:
                self.resident[victim[0]].remove(victim[1])

    def add(self, tokens, name, hit: int) -> None:
        packed = pack(tokens)
        for end in range(1, len(tokens) // 2 + 1):
            self.resident[0].add((name, packed[: 8 * end]))
            for pool in self.windows:
                if end > hit and pool not in self.states:
                    self.resident[pool].add((name, packed[: 8 * end]))

    def longest(self, tokens, name) -> int:
        packed = pack(tokens)

        def is_there(pool: int, position: int) -> bool:
            return (name, packed[: 8 * (position + 1)]) in self.resident[pool]

        limit = (len(tokens) - 1) // 2
        return max(
            end
            for end in range(limit + 1)
            if all(is_there(0, position) for position in range(end))
            and all(
                is_there(pool, position)
                for pool, window in self.windows.items()
                for position in range(max(0, end - window), end)
            )
        )

    def evict(self, num_needed: int) -> None:
        """Forget, in the order of the policy, until each pool has room.

        Leaves go from their tails; of a window pool, the least recently used node's
        first pages do, whatever the policy.
        """
        state = self.cluster.first.state
        gone = self.evict_leaves(state, num_needed)
        for pool in self.windows:
            if pool not in self.states:
                self.evict_windows(state, pool, num_needed, gone)

    def evict_leaves(self, state, num_needed: int) -> dict:
        """Return how many pages go from the tail of each node."""
        gone: dict = {}
        num_free = state.ledgers[0].num_free
        while num_free < num_needed:
            nodes = [n for n in state.tree.nodes() if gone.get(n, 0) < n.end - n.start]
            parents = {node.parent for node in nodes}
            leaves = [n for n in nodes if n not in parents and not n.locks]
            # What is left of a leaf is a new node.
            victim = min(leaves, key=lambda n: (*self.policy(n), n in gone, n.serial))
            left = victim.end - victim.start - gone.get(victim, 0)
            count = min(left, num_needed - num_free)
            gone[victim] = gone.get(victim, 0) + count
            self.num_evicted += count
            num_free += count
            pages = list(self.prefixes(victim))[left - count : left]
            for resident in self.resident:
                resident -= set(pages)
        return gone

    def evict_windows(self, state, pool: int, num_needed: int, gone: dict) -> None:
        has = {
            node: [
                position
                for position in range(node.start_of(pool), node.end)
                if position < node.end - gone.get(node, 0)
            ]
            for node in state.tree.nodes()
        }
        num_there = sum(map(len, has.values()))
        num_free = state.ledgers[pool].num_pages - num_there - self.num_own(pool)
        held = self.in_windows(pool)
        while num_free < num_needed:
            free = {
                node: [at for at in positions if (node, at) not in held]
                for node, positions in has.items()
            }
            victim = min(
                (node for node in free if free[node]),
                key=lambda n: (n.used, n in gone, n.serial),
            )
            position = free[victim][0]
            has[victim].remove(position)
            num_free += 1
            pages = list(self.prefixes(victim))
            self.resident[pool].discard(pages[position - victim.start])

    def num_own(self, pool: int) -> int:
        return self.cluster.count(PageState.REQUEST, pool)

    def in_windows(self, pool: int) -> set:
        """Return the (node, position) that some open request's window needs."""
        held = set()
        for requests in self.cluster.requests.values():
            anchor = node = requests[0].anchor
            while node is not None and node.parent is not None:
                start = anchor.end - self.windows[pool]
                window = range(max(node.start, start), node.end)
                held |= {(node, position) for position in window}
                node = node.parent
        return held

    def prefixes(self, node):
        """Yield the (namespace, prefix) of each page of a node."""
        key, above = node.edge, node.parent
        while above.parent is not None:
            key, above = above.edge + key, above.parent
        for end in range(node.start + 1, node.end + 1):
            yield self.cluster.roots[node.root.hashes[-1]], key[: 8 * end]

    def check_residents(self) -> None:
        """The replica evicted what the model did, and said so."""
        for pool, expected in enumerate(self.resident):
            found = {
                prefix
                for node in self.cluster.first.state.tree.nodes()
                for prefix in list(self.prefixes(node))[
                    node.start_of(pool) - node.start :
                ]
            }
            assert found == expected
        told = sum(fact[1] for fact in self.cluster.facts(FactKind.EVICTED))
        assert told == self.num_evicted


class ModelWithAWindow(Model):
    """The same with a window pool, whose pages are evicted by themselves too."""

    pools = (FULL, window_pool(2 * WINDOW))


class ModelWithAState(Model):
    """The same with states, which are kept at the ends of some prompts only."""

    pools = (FULL, state_pool())


class ModelWithAll(Model):
    """The same with a window and states of two kinds."""

    pools = (FULL, state_pool("slow"), window_pool(2 * WINDOW), state_pool("fast"))


MACHINES = [Model, ModelWithAWindow, ModelWithAState, ModelWithAll]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_a_match_is_the_longest_prefix_that_a_set_of_prefixes_allows(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=100))


# Look-ups.


def plan_of(start, end, covered, window, resident):
    """Return a plan that asks for pages from ``covered`` on, and a window's rest."""
    origin = max(0, start + 1 - window)
    asks = [Asked(0, covered, [PageHash(b"")] * (end - covered))]
    row = resident[origin:end]
    missing = [origin + at for at, is_in in enumerate(row) if not is_in]
    asks += [Asked(1, position, [PageHash(b"")]) for position in missing]
    windows = ((1, window, origin, bytes(row)),)
    return LookupPlan(7, start, end, tuple(asks), windows)


@given(data=st.data(), end=st.integers(1, 9), window=st.integers(1, 5))
def test_restorable_boundaries_are_those_whose_pages_are_all_there(data, end, window):
    start = data.draw(st.integers(0, end - 1))
    covered = data.draw(st.integers(start, end))
    flags = st.lists(st.booleans(), min_size=end, max_size=end)
    full, stored, resident = data.draw(flags), data.draw(flags), data.draw(flags)
    plan = plan_of(start, end, covered, window, resident)
    present = [[full[position] for position in range(covered, end)]]
    present += [[stored[ask.start]] for ask in plan.asks[1:]]
    there = [one or other for one, other in zip(stored, resident, strict=True)]
    assert restorable(plan, present) == [
        boundary
        for boundary in range(start + 1, end + 1)
        if all(full[covered:boundary])
        and all(there[max(0, boundary - window) : boundary])
    ]


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(0, 3))
def test_full_attention_restores_up_to_its_first_missing_page(found, start):
    plan = LookupPlan(7, start, start + len(found), (Asked(0, start, found),))
    first_missing = (*found, False).index(False)
    expected = list(range(start + 1, start + first_missing + 1))
    assert restorable(plan, [found]) == expected


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), lost=st.sets(st.integers(0, 30), max_size=4))
def test_what_is_restored_is_the_longest_that_device_and_store_allow(seed, lost):
    """Loads, the store and the tree together, against brute force over both."""
    draw = random.Random(seed)
    layout = layout_of(FULL, window_pool(2 * WINDOW), state_pool())
    cluster = Cluster(layout, {"kv": 60, "window": 14, "state": 9}, requests=4)
    stem = [1] * 20
    pages = cluster.learn(pack(stem), None)
    cluster.fill_stores(stem)
    everything = sorted(cluster.first.store)
    for place in lost:
        cluster.first.store.discard(everything[place % len(everything)])
    for _ in range(4):
        tokens = [*stem[: draw.randrange(1, 21)], draw.randrange(1, 3)]
        there = resident_pages(cluster, pack(stem))
        for pool, page in cluster.first.store:
            if page in pages:
                there[pool].add(pages.index(page))
        limit = min((len(tokens) - 1) // 2, 10)
        expected = max(
            end
            for end in range(limit + 1)
            if there[0].issuperset(range(end))
            and there[1].issuperset(range(max(0, end - WINDOW), end))
            and there[2].issuperset(range(max(0, end - 1), end))
        )
        assert cluster.serve(tokens) == 2 * expected


def resident_pages(cluster: Cluster, packed: bytes) -> list[set[int]]:
    """Return the positions of a prompt that each pool has, by a look at every node."""
    there: list[set[int]] = [set() for _ in cluster.layout.pools]
    for node in cluster.first.state.tree.nodes():
        key, above = node.edge, node.parent
        while above.parent is not None:
            key, above = above.edge + key, above.parent
        if packed.startswith(key):
            for pool in range(len(there)):
                there[pool] |= set(range(node.start_of(pool), node.end))
    return there


def test_the_least_recently_opened_prefix_is_evicted_first():
    cluster = Cluster(num_pages=9, attach=False)
    for number in (1, 2, 3):
        cluster.serve([number] * 5)
    cluster.do("abort", cluster.open([1] * 5))
    for num_tokens, expected in [(10, [4, 0, 4]), (14, [4, 0, 0]), (18, [0, 0, 0])]:
        seq = cluster.open([9] * num_tokens)
        cluster.do("extend", seq, num_tokens)
        found = [cluster.replica.look.match(pack([number] * 5)) for number in (1, 2, 3)]
        assert found == expected
        cluster.do("abort", seq)


def test_looking_ticks_nothing():
    cluster = Cluster(num_pages=9, attach=False)
    for number in (1, 2):
        cluster.serve([number] * 5)
    before = cluster.replica.look.dump()
    for _ in range(3):
        assert cluster.replica.look.match(pack([1] * 5)) == 4
        cluster.replica.look.statistics()
        cluster.replica.look.check_invariants()
        repr(list(cluster.first.state.tree.nodes()))
    assert cluster.replica.look.dump() == before
