"""Loads: a page comes once for all who wait, and a failure costs what it must.

The prompts are of 2 tokens a page; ``STORED`` is in every store, page by page.
"""

from __future__ import annotations

import pytest

from asyncache.core import FactKind, InvariantError, PageState
from tests.core.cluster import FULL, Cluster, layout_of, pack, window_pool

STORED = [1, 2, 3, 4, 5, 6, 7, 8]
PROMPT = [*STORED, 9]
WINDOW = layout_of(FULL, window_pool(4))


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster(num_pages=24, num_ranks=2)
    cluster.fill_stores(STORED)
    return cluster


def begin(cluster: Cluster, tokens: list[int], *, is_prefetch: bool = False) -> int:
    """Open a request and take its restore to where its load has started."""
    seq = cluster.open(tokens, is_prefetch=is_prefetch)
    cluster.do("restore", seq)
    for rank in cluster.ranks:
        for lookup in list(rank.lookups):
            cluster.answer_lookup(rank, lookup)
    cluster.step()
    return seq


def land(cluster: Cluster) -> None:
    for rank in cluster.ranks:
        for load in list(rank.loads):
            cluster.finish_load(rank, load)
    cluster.step()


def lose(cluster: Cluster, page: int, pool: int = 0) -> None:
    """Make one page of STORED bad on the second rank."""
    hashes = cluster.learn(pack(STORED), None)
    cluster.ranks[1].store.discard((pool, hashes[page]))


# Landing.


def test_a_load_is_the_trees_once_it_has_landed_on_every_rank(cluster):
    seq = begin(cluster, PROMPT)
    assert ("Restored", seq, 4) in cluster.first.told
    assert cluster.count(PageState.TRANSIT) == 4
    cluster.finish_load(cluster.ranks[0], *cluster.ranks[0].loads)
    cluster.step()
    assert cluster.replica.look.match(pack(PROMPT)) == 0
    cluster.finish_load(cluster.ranks[1], *cluster.ranks[1].loads)
    cluster.step()
    assert cluster.replica.look.match(pack(PROMPT)) == 8
    assert cluster.count(PageState.TREE) == 4
    assert cluster.first.told[-1] == ("Settled", seq, 4)


def test_what_is_resident_is_not_loaded_again(cluster):
    cluster.serve(PROMPT[:5])
    seq = begin(cluster, PROMPT)
    (plan,) = cluster.first.loads.values()
    assert (plan.start, plan.end) == (2, 4)
    land(cluster)
    assert cluster.request(seq).hit == 4


def test_two_requests_with_one_cold_prefix_share_one_load(cluster):
    """Both have asked before either load began: their lookups end in one verdict."""
    seqs = [cluster.open(PROMPT), cluster.open([*PROMPT, 7])]
    for seq in seqs:
        cluster.do("restore", seq)
    assert len(cluster.first.lookups) == 2
    for rank in cluster.ranks:
        for lookup in list(rank.lookups):
            cluster.answer_lookup(rank, lookup)
    cluster.step()
    assert len(cluster.first.loads) == 1
    land(cluster)
    assert [cluster.request(seq).hit for seq in seqs] == [4, 4]


def test_a_request_that_comes_while_a_load_runs_waits_for_the_same(cluster):
    begin(cluster, PROMPT)
    seq = begin(cluster, [*PROMPT, 7])
    assert len(cluster.first.loads) == 1
    land(cluster)
    assert cluster.first.told[-1] == ("Settled", seq, 4)


@pytest.mark.parametrize("how", ["abort", "hang up", "suspend", "late"])
def test_whoever_leaves_does_not_take_the_load_of_another_along(cluster, how):
    leader = begin(cluster, PROMPT)
    other = begin(cluster, PROMPT)
    if how == "hang up":
        cluster.ranks[1].votes.sink(leader, 0)
    elif how == "late":
        cluster.give_up(cluster.ranks[0], leader)
    else:
        cluster.do(how, leader)
    cluster.step()
    assert ("Settled", leader, 0) in cluster.first.told or how != "late"
    land(cluster)
    assert cluster.first.told[-1] == ("Settled", other, 4)
    assert cluster.replica.look.match(pack(PROMPT)) == 8


def test_a_load_that_nobody_waits_for_is_stopped_and_drained(cluster):
    seq = begin(cluster, PROMPT)
    cluster.do("abort", seq)
    assert cluster.count(PageState.QUARANTINE) == 4
    assert cluster.replica.look.match(pack(PROMPT)) == 0
    cluster.step()
    assert cluster.count(PageState.QUARANTINE) == 4
    land(cluster)
    cluster.check_rest()
    assert cluster.count(PageState.FREE) == 24


def test_a_load_that_never_started_is_undone_at_once():
    """One slot is taken by a load that drains, so the second load is queued."""
    cluster = Cluster(num_pages=24, slots=2, offloads=1)
    for number in (1, 2, 3):
        cluster.fill_stores([number] * 5)
    for number in (1, 2):
        begin(cluster, [number] * 5)
    seq = begin(cluster, [3] * 5)
    assert len(cluster.first.loads) == 2
    before = cluster.replica.look.statistics()
    assert before.pools["kv"].transit == 6
    cluster.do("abort", seq)
    assert cluster.count(PageState.QUARANTINE) == 0
    assert cluster.count(PageState.TRANSIT) == 4
    assert cluster.facts(FactKind.LOAD_CUT) == [(FactKind.LOAD_CUT, 2, ())]


def test_queued_loads_start_in_sequence_order_as_places_fall_free():
    cluster = Cluster(num_pages=64, slots=2, offloads=1, requests=20)
    for number in range(20):
        cluster.fill_stores([number] * 5)
        begin(cluster, [number] * 5)
    assert len(cluster.first.loads) == 2
    order = []
    while cluster.first.loads:
        order += list(cluster.first.loads)
        land(cluster)
    assert order == sorted(order)
    assert len(order) == 20
    cluster.check()


def test_a_deeper_load_lands_after_the_load_above_it(cluster):
    """Guards landing order: below LOADING there is only LOADING."""
    begin(cluster, PROMPT[:5])
    seq = begin(cluster, PROMPT)
    above, below = cluster.first.loads
    for rank in cluster.ranks:
        cluster.finish_load(rank, below)
    cluster.step()
    assert cluster.replica.look.match(pack(PROMPT)) == 0
    assert cluster.replica.look.is_open(below)
    for rank in cluster.ranks:
        cluster.finish_load(rank, above)
    cluster.step()
    assert cluster.replica.look.match(pack(PROMPT)) == 8
    assert cluster.first.told[-1] == ("Settled", seq, 4)


def test_a_request_that_gives_up_settles_on_what_has_landed(cluster):
    begin(cluster, PROMPT[:5])
    seq = begin(cluster, PROMPT)
    above, _ = cluster.first.loads
    for rank in cluster.ranks:
        cluster.finish_load(rank, above)
    cluster.step()
    cluster.give_up(cluster.ranks[1], seq)
    cluster.step()
    assert cluster.first.told[-2:] == [("Shortened", seq, 2), ("Settled", seq, 2)]
    assert cluster.count(PageState.QUARANTINE) == 2


# Failing.


@pytest.mark.parametrize("page", [0, 1, 3])
def test_one_bad_page_costs_what_follows_it_and_nothing_else(cluster, page):
    seq = begin(cluster, PROMPT)
    lose(cluster, page)
    land(cluster)
    assert cluster.request(seq).hit == page
    assert cluster.replica.look.match(pack(PROMPT)) == 2 * page
    assert cluster.facts(FactKind.LOAD_CUT) == [(FactKind.LOAD_CUT, 4 - page, ())]
    assert [told for told in cluster.first.told if told[0] == "Shortened"] == [
        ("Shortened", seq, page)
    ]
    assert cluster.count(PageState.QUARANTINE) == 0
    assert cluster.count(PageState.TREE) == page
    assert cluster.do("extend", seq, 9) == 5 - page


def test_what_was_cut_stays_in_quarantine_until_no_rank_writes_it(cluster):
    begin(cluster, PROMPT)
    cluster.ranks[0].votes.sink(*cluster.first.loads, 1)
    cluster.step()
    assert (cluster.count(PageState.TRANSIT), cluster.count(PageState.QUARANTINE)) == (
        1,
        3,
    )
    land(cluster)
    assert cluster.count(PageState.QUARANTINE) == 0
    assert cluster.replica.look.match(pack(PROMPT)) == 2


def test_a_cut_takes_the_loads_below_it_along(cluster):
    first = begin(cluster, PROMPT[:5])
    second = begin(cluster, PROMPT)
    above, below = cluster.first.loads
    cluster.ranks[1].votes.sink(above, 1)
    cluster.step()
    assert [cluster.request(seq).hit for seq in (first, second)] == [1, 1]
    assert cluster.count(PageState.QUARANTINE) == 3
    assert cluster.request(second).needs == cluster.request(first).needs
    land(cluster)
    assert not cluster.replica.look.is_open(below)
    assert cluster.replica.look.match(pack(PROMPT)) == 2


def test_a_cut_beyond_a_hit_costs_it_nothing(cluster):
    begin(cluster, PROMPT)
    seq = begin(cluster, PROMPT[:5])
    lose(cluster, 3)
    land(cluster)
    assert cluster.first.told[-1] == ("Settled", seq, 2)
    assert ("Shortened", seq, 2) not in cluster.first.told
    assert cluster.request(seq).barred is False


def test_a_failed_restore_does_not_try_again(cluster):
    seq = begin(cluster, PROMPT)
    lose(cluster, 0)
    land(cluster)
    cluster.do("restore", seq)
    assert not cluster.first.lookups
    assert cluster.request(seq).hit == 0
    cluster.do("suspend", seq)
    cluster.do("restore", seq)
    assert cluster.first.lookups


def test_a_cut_under_an_open_lookup_is_no_shortened_hit(cluster):
    """The restore has not been answered, so there is no hit yet that could fall."""
    begin(cluster, PROMPT[:5])
    seq = cluster.open(PROMPT)
    cluster.do("restore", seq)
    assert cluster.request(seq).hit == 2
    (load,) = cluster.first.loads
    cluster.ranks[0].votes.sink(load, 1)
    cluster.step()
    assert cluster.request(seq).hit == 1
    for rank in cluster.ranks:
        cluster.answer_lookup(rank, *rank.lookups)
    cluster.step()
    told = [told for told in cluster.first.told if told[1] == seq]
    assert told == [("Restored", seq, 1)]
    land(cluster)
    assert cluster.first.told[-1] == ("Settled", seq, 1)


def test_what_was_evicted_since_the_store_was_asked_is_computed(cluster):
    small = Cluster(num_pages=10)
    small.fill_stores(STORED)
    small.serve(PROMPT[:5])
    seq = small.open(PROMPT)
    small.do("restore", seq)
    lookup = small.request(seq).lookup
    assert (small.request(seq).hit, lookup.start, lookup.covered) == (2, 2, 2)
    # Another cut its hit down: here, by hand.
    lookup.covered = 3
    small.answer_lookup(small.first, lookup.seq)
    small.step()
    assert small.first.told[-1] == ("Settled", seq, 2)


def test_a_prefix_that_came_by_itself_since_the_store_was_asked_is_used(cluster):
    seq = cluster.open(PROMPT)
    cluster.do("restore", seq)
    twin = cluster.open(PROMPT)
    cluster.do("extend", twin, 9)
    cluster.forward([twin])
    cluster.do("commit", twin, 9)
    for rank in cluster.ranks:
        cluster.work(rank)
    cluster.step()
    assert cluster.first.told[-1] == ("Settled", seq, 4)
    assert not cluster.first.loads


# Committing on an open load.


def compute(cluster: Cluster, seq: int) -> None:
    cluster.do("extend", seq, cluster.request(seq).num_tokens)
    cluster.forward([seq])
    for rank in cluster.ranks:
        cluster.finish_forward(rank)


def test_a_provisional_commit_is_published_when_its_load_lands(cluster):
    seq = begin(cluster, [*PROMPT, 9])
    compute(cluster, seq)
    assert cluster.do("commit", seq, 10) == 8
    assert cluster.replica.look.match(pack([*PROMPT, 9, 9])) == 0
    land(cluster)
    assert cluster.request(seq).shared == 5
    assert cluster.replica.look.match(pack([*PROMPT, 9, 9])) == 10


def test_a_request_that_closes_on_an_open_load_still_publishes(cluster):
    seq = begin(cluster, [*PROMPT, 9])
    compute(cluster, seq)
    cluster.do("commit", seq, 10)
    cluster.end(seq)
    cluster.step()
    assert cluster.replica.look.is_open(seq)
    land(cluster)
    assert not cluster.replica.look.is_open(seq)
    assert cluster.replica.look.match(pack([*PROMPT, 9, 9])) == 10


def test_a_provisional_commit_falls_with_its_load(cluster):
    """What was computed over bytes that never came enters neither tree nor store."""
    seq = begin(cluster, [*PROMPT, 9])
    compute(cluster, seq)
    cluster.do("commit", seq, 10)
    lose(cluster, 1)
    land(cluster)
    request = cluster.request(seq)
    assert (request.hit, request.extent, request.committed, request.shared) == (
        1,
        2,
        2,
        1,
    )
    assert cluster.count(PageState.TREE) == 1
    assert not cluster.first.state.parked
    assert len(request.spare[0]) == 1
    compute(cluster, seq)
    assert cluster.do("commit", seq, 10) == 10


def test_an_abort_takes_a_provisional_commit_along(cluster):
    seq = begin(cluster, [*PROMPT, 9])
    compute(cluster, seq)
    cluster.do("commit", seq, 10)
    cluster.ranks[0].votes.sink(seq, 0)
    cluster.step()
    land(cluster)
    assert cluster.count(PageState.FREE) == 24


def test_a_commit_stops_where_another_loads_and_goes_on_when_it_landed(cluster):
    begin(cluster, PROMPT)
    seq = cluster.open([*PROMPT, 9])
    compute(cluster, seq)
    assert cluster.do("commit", seq, 10) == 0
    land(cluster)
    assert cluster.request(seq).shared == 5
    assert cluster.count(PageState.REQUEST) == 4


def test_a_commit_takes_the_place_of_a_load_that_was_cut(cluster):
    """It is sound: the request computed the pages, it did not use the load."""
    begin(cluster, PROMPT)
    seq = cluster.open(PROMPT)
    compute(cluster, seq)
    assert cluster.do("commit", seq, 9) == 0
    lose(cluster, 0)
    land(cluster)
    assert cluster.request(seq).shared == 4
    cluster.check()


# Windows.


def test_only_the_window_of_a_boundary_is_loaded():
    cluster = Cluster(WINDOW, num_pages=24, mask_ints=256)
    cluster.fill_stores(STORED)
    seq = begin(cluster, PROMPT)
    (plan,) = cluster.first.loads.values()
    assert [(pool, start, len(pages)) for pool, start, pages, _ in plan.pieces] == [
        (0, 0, 4),
        (1, 2, 2),
    ]
    land(cluster)
    assert cluster.request(seq).hit == 4
    assert list(cluster.request(seq).tables[1][:2]) == [-1, -1]


def gap_cluster() -> Cluster:
    """A resident prefix of six pages whose window pages were evicted."""
    cluster = Cluster(WINDOW, {"kv": 48, "window": 12}, mask_ints=256)
    cluster.fill_stores([1] * 20)
    cluster.serve([1] * 13)
    other = cluster.open([2] * 24)
    cluster.do("extend", other, 24)
    cluster.do("abort", other)
    assert cluster.replica.look.match(pack([1] * 13)) == 0
    assert cluster.count(PageState.TREE) == 6
    return cluster


def test_a_window_that_is_gone_is_loaded_over_the_resident_prefix():
    cluster = gap_cluster()
    seq = begin(cluster, [1] * 13)
    (plan,) = cluster.first.loads.values()
    assert [(pool, start, len(pages)) for pool, start, pages, _ in plan.pieces] == [
        (1, 4, 2)
    ]
    land(cluster)
    assert cluster.request(seq).hit == 6
    assert cluster.replica.look.match(pack([1] * 13)) == 12


def test_a_commit_on_a_window_that_loads_waits_for_it():
    """Guards that a commit waits for all it stands on: no full page is LOADING here."""
    cluster = gap_cluster()
    seq = begin(cluster, [1] * 12 + [5] * 3)
    compute(cluster, seq)
    cluster.do("commit", seq, 15)
    assert list(cluster.first.state.parked) == [seq]
    assert cluster.count(PageState.TREE) == 6
    land(cluster)
    assert cluster.request(seq).shared == 7


def test_a_page_table_names_no_window_page_that_nothing_keeps_in_place():
    cluster = Cluster(WINDOW, num_pages=24, mask_ints=256)
    cluster.serve([1] * 13)
    seq = cluster.open([1] * 13)
    cluster.do("restore", seq, ask_store=False)
    assert cluster.request(seq).hit == 6
    table = list(cluster.request(seq).tables[1])
    assert table[:4] == [-1] * 4
    assert min(table[4:]) >= 0


@pytest.mark.parametrize("windows", [(8, 2), (2, 8)])
def test_gaps_of_two_windows_over_one_node_are_both_loaded(windows):
    """A page that only the wider one needs was left out, and served all the same."""
    layout = layout_of(FULL, *(window_pool(w, f"w{w}") for w in windows))
    sizes = {"kv": 60, "w8": 14, "w2": 14}
    cluster = Cluster(layout, sizes, requests=4, attach=False)
    cluster.fill_stores([1] * 12)
    cluster.serve([1] * 13)
    other = cluster.open([2] * 28)
    cluster.do("extend", other, 28)
    cluster.do("abort", other)
    cluster.call("attach")
    seq = cluster.open([1] * 13)
    assert cluster.restore(seq) == 12
    blanks = [table.count(-1) for table in cluster.request(seq).tables[1:]]
    assert blanks == [6 - window // 2 for window in windows]


def test_a_window_of_which_the_end_is_left_is_loaded_before_that():
    """Eviction takes the first pages of a node first: a longer prompt keeps its hit."""
    cluster = Cluster(WINDOW, {"kv": 48, "window": 8}, mask_ints=256)
    cluster.fill_stores([1] * 12)
    cluster.serve([1] * 13)
    other = cluster.open([2] * 14)
    cluster.do("extend", other, 14)
    cluster.do("abort", other)
    (node,) = cluster.first.state.tree.nodes()
    assert node.start_of(1) == 5
    seq = begin(cluster, [1] * 13)
    (plan,) = cluster.first.loads.values()
    assert [(pool, start, len(pages)) for pool, start, pages, _ in plan.pieces] == [
        (1, 4, 1)
    ]
    land(cluster)
    assert cluster.request(seq).hit == 6


@pytest.mark.parametrize("good", [0, 1])
def test_a_window_that_does_not_come_puts_absent_back_and_harms_no_prefix(good):
    cluster = gap_cluster()
    seq = begin(cluster, [1] * 13)
    (load,) = cluster.first.loads
    cluster.first.votes.sink(load, good)
    cluster.step()
    assert cluster.request(seq).hit == 0
    assert cluster.count(PageState.TREE) == 6
    assert cluster.count(PageState.QUARANTINE, pool=1) == 2
    land(cluster)
    assert cluster.count(PageState.TREE, pool=1) == 0
    assert cluster.count(PageState.FREE, pool=1) == 12


def test_a_load_goes_when_a_cut_elsewhere_leaves_it_without_use():
    """Its own pages are good, but the window before them hangs on another load."""
    cluster = gap_cluster()
    begin(cluster, [1] * 13)
    seq = begin(cluster, [1] * 15)
    gap, below = cluster.first.loads
    cluster.first.votes.sink(gap, 0)
    cluster.step()
    assert cluster.request(seq).hit == 0
    assert cluster.count(PageState.TRANSIT) == 0
    land(cluster)
    assert not cluster.replica.look.is_open(below)
    cluster.check()


def test_a_load_goes_when_who_alone_needs_it_finds_a_longer_hit():
    """Seed 5018873: behind a longer hit stand other windows."""
    cluster = gap_cluster()
    first = begin(cluster, [1] * 13)
    (gap,) = cluster.first.loads
    seq = cluster.open([1] * 17)
    cluster.do("restore", seq)
    assert cluster.request(seq).hit == 6
    cluster.do("abort", first)
    (lookup,) = cluster.first.lookups
    cluster.answer_lookup(cluster.first, lookup)
    cluster.step()
    assert cluster.request(seq).hit == 8
    cluster.check()
    land(cluster)
    assert not cluster.replica.look.is_open(gap)
    assert cluster.request(seq).hit == 8


def test_a_window_over_a_longer_load_lands_in_the_same_verdict():
    """Guards the order in which loads end: with one rank no other verdict comes."""
    cluster = Cluster(WINDOW, num_pages=48, mask_ints=256)
    cluster.fill_stores([1] * 20)
    begin(cluster, [1] * 17)
    seq = begin(cluster, [1] * 9)
    longer, gap = cluster.first.loads
    (plan,) = [plan for plan in cluster.first.loads.values() if plan.seq == gap]
    assert {pool for pool, *_ in plan.pieces} == {1}
    land(cluster)
    assert not cluster.replica.look.is_open(gap)
    assert not cluster.replica.look.is_open(longer)
    assert cluster.request(seq).hit == 4


def test_a_cut_takes_along_what_lies_before_every_window():
    """The upper half of a node that loads has none of its window pages."""
    cluster = Cluster(WINDOW, num_pages=48, mask_ints=256)
    fork = [1] * 10 + [2] * 10
    for prompt in ([1] * 20, fork):
        cluster.fill_stores(prompt)
        begin(cluster, [*prompt, 3])
    first, second = cluster.first.loads
    (upper,) = (n for n in cluster.first.state.tree.nodes() if n.end == 5)
    assert upper.pages[1] is None
    cluster.first.votes.sink(first, 0)
    cluster.step()
    assert cluster.count(PageState.QUARANTINE) == 15
    land(cluster)
    cluster.check()
    assert cluster.count(PageState.FREE) == 48
    assert not cluster.replica.look.is_open(second)


# Prefetches.


def urgencies(cluster: Cluster) -> list[bool]:
    first, *others = [
        [plan.is_prefetch for plan in rank.loads.values()] for rank in cluster.ranks
    ]
    assert others == [first] * len(others)
    return first


def hurries(cluster: Cluster) -> list[tuple[str, int]]:
    return [told for told in cluster.first.told if told[0] == "Hurry"]


def test_a_load_that_only_prefetches_want_is_one(cluster):
    begin(cluster, PROMPT, is_prefetch=True)
    begin(cluster, [*PROMPT, 3], is_prefetch=True)
    assert urgencies(cluster) == [True]
    land(cluster)
    assert hurries(cluster) == []
    cluster.fill_stores([5] * 8)
    begin(cluster, [5] * 9)
    assert urgencies(cluster) == [False]


def test_who_joins_a_prefetch_hurries_it_once(cluster):
    begin(cluster, PROMPT, is_prefetch=True)
    [load] = cluster.first.loads
    begin(cluster, [*PROMPT, 3])
    begin(cluster, [*PROMPT, 4])
    assert hurries(cluster) == [("Hurry", load)]
    land(cluster)
    cluster.check()


def test_who_joins_a_prefetch_before_it_starts_makes_it_a_load():
    cluster = Cluster(num_pages=24, num_ranks=2, launches=True)
    cluster.fill_stores(STORED)
    begin(cluster, PROMPT, is_prefetch=True)
    begin(cluster, PROMPT)
    assert cluster.first.loads == {}
    cluster.call("launch")
    cluster.step()
    assert urgencies(cluster) == [False]
    assert hurries(cluster) == []


def test_a_prefetch_that_joins_a_load_does_not_slow_it_down(cluster):
    seq = begin(cluster, PROMPT)
    begin(cluster, PROMPT, is_prefetch=True)
    # Also once nobody else is left: it has begun.
    cluster.end(seq)
    cluster.step()
    assert urgencies(cluster) == [False]
    assert hurries(cluster) == []
    cluster.check()


def test_new_nodes_of_a_load_are_not_evicted_to_make_room_for_it():
    """Guards that they are marked and pinned before pages are taken for them."""
    cluster = Cluster(num_pages=6)
    cluster.fill_stores([1] * 10)
    cluster.serve([6] * 5)
    cluster.serve([6, 6, 6, 6, 7, 7, 7, 7, 0])
    leaves = cluster.first.state.leaves
    # The next leaf that is offered rebuilds the heap from all nodes of the tree: the
    # upper node, when the lower one has gone and another page is needed.
    leaves._heap += [((10**9,), 0, next(cluster.first.state.tree.nodes()))] * 2_000
    seq = begin(cluster, [1] * 11)
    assert len(leaves._heap) < 100
    land(cluster)
    assert cluster.request(seq).hit == 5


def test_a_resident_page_below_a_loading_one_is_noticed(cluster):
    begin(cluster, PROMPT)
    (node,) = cluster.first.state.tree.nodes()
    load = node.loads[0]
    node.loads[0] = None
    from asyncache.core._loads import _hold

    with pytest.raises(InvariantError, match="below LOADING there is only LOADING"):
        _hold(cluster.first.state, node, 0)
    node.loads[0] = load
