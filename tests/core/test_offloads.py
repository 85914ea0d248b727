"""Offloads: pages reach the store parents first, whole, and written."""

from __future__ import annotations

import pytest

from asyncache.core import FAILED, GOOD, PARENT_MISSING, FactKind
from tests.core.cluster import FULL, Cluster, layout_of, pack, window_pool

PROMPT = [1, 2, 3, 4, 5, 6, 7]
WINDOW = layout_of(FULL, window_pool(2))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(num_pages=24, num_ranks=2, offload_attempts=3)


def compute(cluster: Cluster, tokens: list[int], name: str | None = None) -> int:
    """Open, compute and commit a request, and leave it open."""
    seq = cluster.open(tokens, name)
    cluster.do("restore", seq, ask_store=False)
    cluster.do("extend", seq, len(tokens))
    cluster.forward([seq])
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()
    cluster.do("commit", seq, len(tokens))
    return seq


def agree(cluster: Cluster) -> None:
    for rank in cluster.ranks:
        for ready in list(rank.readies):
            cluster.agree_ready(rank, ready)
    cluster.step()


def finish(cluster: Cluster, *claims: int) -> None:
    """End the offloads that run, with one claim of all ranks or one a rank."""
    for rank, claim in zip(cluster.ranks, claims * 2, strict=False):
        for offload in list(rank.offloads):
            cluster.finish_offload(rank, offload, claim)
    cluster.step()


def offload(cluster: Cluster, *claims: int) -> None:
    agree(cluster)
    finish(cluster, *claims)


def spans(cluster: Cluster) -> list[tuple[int, int]]:
    return [(plan.start, plan.end) for plan in cluster.first.offloads.values()]


def test_what_is_committed_is_offloaded_once_every_rank_is_ready(cluster):
    compute(cluster, PROMPT)
    (ready,) = cluster.first.readies.values()
    assert (ready.num_pages, ready.attempts) == (3, 0)
    cluster.agree_ready(cluster.ranks[0], ready.seq)
    cluster.step()
    assert not cluster.first.offloads
    cluster.agree_ready(cluster.ranks[1], ready.seq)
    cluster.step()
    assert spans(cluster) == [(0, 3)]
    assert cluster.first.offloads[next(iter(cluster.first.offloads))].parent is None
    finish(cluster, GOOD)
    ((_, num_pages, hashes),) = cluster.facts(FactKind.STORED)
    assert num_pages == 3
    assert {(0, page) for page in hashes} == cluster.first.store
    assert cluster.replica.look.num_moving == 0


def test_what_is_stored_is_not_offloaded_again(cluster):
    cluster.serve(PROMPT)
    cluster.serve(PROMPT)
    assert len(cluster.facts(FactKind.STORED)) == 1


def test_without_a_store_nothing_is_offloaded_until_one_is_attached():
    cluster = Cluster(attach=False)
    compute(cluster, PROMPT)
    assert not cluster.first.readies
    cluster.call("attach")
    (ready,) = cluster.first.readies.values()
    assert ready.num_pages == 3


def test_nothing_is_offloaded_before_enough_commits_have_walked_it():
    cluster = Cluster(write_threshold=2)
    compute(cluster, PROMPT)
    assert not cluster.first.readies
    compute(cluster, PROMPT)
    assert cluster.first.readies


def test_a_parent_is_stored_before_its_children(cluster):
    seq = compute(cluster, PROMPT)
    cluster.do("append", seq, pack([8, 9, 10]))
    cluster.do("extend", seq, 10)
    cluster.forward([seq])
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.do("commit", seq, 10)
    cluster.step()
    agree(cluster)
    assert spans(cluster) == [(0, 3)]
    finish(cluster, GOOD)
    agree(cluster)
    assert spans(cluster) == [(3, 5)]
    (plan,) = cluster.first.offloads.values()
    assert plan.parent == cluster.facts(FactKind.STORED)[0][2][-1]


def grow(cluster: Cluster) -> None:
    """Leave a stored node and its child, which is ready to be offloaded."""
    compute(cluster, PROMPT)
    offload(cluster, GOOD)
    compute(cluster, [*PROMPT, 8, 9])
    agree(cluster)
    assert spans(cluster) == [(3, 4)]


def test_a_parent_that_one_store_has_lost_is_offloaded_first(cluster):
    grow(cluster)
    finish(cluster, GOOD, PARENT_MISSING)
    agree(cluster)
    assert spans(cluster) == [(0, 3)]
    finish(cluster, GOOD)
    agree(cluster)
    assert spans(cluster) == [(3, 4)]
    finish(cluster, GOOD)
    assert len(cluster.facts(FactKind.STORED)) == 3


def test_a_childs_failed_offload_leaves_its_parent_stored(cluster):
    grow(cluster)
    (child,) = cluster.first.state.reading
    finish(cluster, GOOD, FAILED)
    assert child.parent.stored
    agree(cluster)
    assert spans(cluster) == [(3, 4)]
    cluster.settle()
    # The parent was neither written nor told again.
    assert [fact[1] for fact in cluster.facts(FactKind.STORED)] == [3, 1]


def test_a_store_that_keeps_nothing_ends_the_attempts(cluster):
    """Guards that failures count until a commit: parent and child would take turns."""
    grow(cluster)
    for _ in range(20):
        finish(cluster, PARENT_MISSING if spans(cluster) == [(3, 4)] else GOOD)
        agree(cluster)
    assert not cluster.first.offloads
    assert cluster.replica.look.num_moving == 0
    assert len(cluster.facts(FactKind.OFFLOAD_FORGOTTEN)) == 1
    assert len(cluster.facts(FactKind.OFFLOAD_FAILED)) == 3


def test_a_failed_offload_is_tried_again_and_says_how_often(cluster):
    compute(cluster, PROMPT)
    offload(cluster, GOOD, FAILED)
    (ready,) = cluster.first.readies.values()
    assert ready.attempts == 1
    offload(cluster, GOOD)
    assert len(cluster.facts(FactKind.STORED)) == 1


def test_a_root_that_misses_its_parent_has_simply_failed(cluster):
    compute(cluster, PROMPT)
    offload(cluster, PARENT_MISSING)
    assert [ready.attempts for ready in cluster.first.readies.values()] == [1]


def test_a_node_is_forgotten_after_too_many_failures_until_a_commit_walks_it(cluster):
    seq = compute(cluster, PROMPT)
    for _ in range(3):
        offload(cluster, FAILED)
    assert not cluster.first.readies
    assert cluster.facts(FactKind.OFFLOAD_FORGOTTEN) == [
        (FactKind.OFFLOAD_FORGOTTEN, 3, ())
    ]
    cluster.do("append", seq, pack([8, 9]))
    cluster.do("extend", seq, 9)
    cluster.forward([seq])
    cluster.do("commit", seq, 9)
    (ready,) = cluster.first.readies.values()
    assert (ready.num_pages, ready.attempts) == (3, 0)
    agree(cluster)
    assert spans(cluster) == [(0, 3)]


def test_one_rank_may_drop_a_ready_for_all(cluster):
    compute(cluster, PROMPT)
    (seq,) = cluster.first.readies
    cluster.ranks[1].votes.sink(seq, 0)
    cluster.step()
    assert not cluster.first.readies, "the others stop their clocks"
    assert cluster.facts(FactKind.OFFLOAD_FORGOTTEN) == [
        (FactKind.OFFLOAD_FORGOTTEN, 3, ())
    ]
    assert cluster.replica.look.num_moving == 0
    compute(cluster, PROMPT)
    assert set(cluster.first.readies) != {seq}


def test_no_more_than_so_many_are_offered_at_once():
    cluster = Cluster(num_pages=64, offloads=2)
    for number in range(6):
        compute(cluster, [number] * 5)
    assert len(cluster.first.readies) == 2
    assert cluster.replica.look.num_moving == 6
    offload(cluster, GOOD)
    assert len(cluster.first.readies) == 2
    assert cluster.replica.look.num_moving == 4


def test_pages_are_not_evicted_while_they_are_offloaded(cluster):
    """Guards the pin of an offload."""
    cluster.do("abort", compute(cluster, PROMPT))
    agree(cluster)
    other = cluster.open([9] * 46)
    cluster.do("restore", other, ask_store=False)
    assert cluster.request(other).promise == 0
    finish(cluster, GOOD)
    assert cluster.request(other).promise == 23


def test_a_node_that_waits_to_be_offloaded_may_be_evicted(cluster):
    cluster.do("abort", compute(cluster, PROMPT))
    (seq,) = cluster.first.readies
    other = cluster.open([9] * 48)
    assert cluster.do("extend", other, 48) == 24
    assert cluster.facts(FactKind.EVICTED_UNSAVED)[0][1] == 3
    agree(cluster)
    assert not cluster.replica.look.is_open(seq)
    assert not cluster.first.offloads
    assert cluster.replica.look.num_moving == 0


def test_a_ready_that_gets_a_place_when_its_node_is_gone_offers_nothing():
    cluster = Cluster(num_pages=16, slots=2, offloads=1)
    loading = []
    for number in (1, 2):
        cluster.fill_stores([number] * 5)
        loading.append(cluster.open([number] * 5))
        cluster.do("restore", loading[-1])
    for lookup in list(cluster.first.lookups):
        cluster.answer_lookup(cluster.first, lookup)
    cluster.step()
    assert len(cluster.first.loads) == 2
    cluster.do("abort", compute(cluster, PROMPT))
    assert not cluster.first.readies
    other = cluster.open([9] * 20)
    cluster.do("extend", other, 20)
    for seq in loading:
        cluster.do("extend", seq, 5)
    assert sum(fact[1] for fact in cluster.facts(FactKind.EVICTED_UNSAVED)) == 3
    for load in list(cluster.first.loads):
        cluster.finish_load(cluster.first, load)
    cluster.step()
    (ready,) = cluster.first.readies.values()
    assert (ready.num_pages, ready.attempts) == (0, 0)
    agree(cluster)
    assert cluster.replica.look.num_moving == 0


def test_half_of_a_split_node_may_be_evicted_from_its_ready(cluster):
    cluster.do("abort", compute(cluster, PROMPT))
    short = cluster.open(PROMPT[:3])
    cluster.do("restore", short, ask_store=False)
    assert cluster.request(short).hit == 1
    other = cluster.open([9] * 44)
    assert cluster.do("extend", other, 44) == 22
    cluster.do("abort", other)
    agree(cluster)
    assert spans(cluster) == [(0, 2)]


def test_a_split_changes_nothing_for_an_offload_that_runs(cluster):
    cluster.do("abort", compute(cluster, PROMPT))
    agree(cluster)
    short = cluster.open(PROMPT[:3])
    cluster.do("restore", short, ask_store=False)
    assert cluster.first.state.tree.num_nodes == 2
    finish(cluster, GOOD)
    assert cluster.facts(FactKind.STORED)[0][1] == 3
    assert all(node.stored for node in cluster.first.state.tree.nodes())


def test_a_split_while_a_node_is_queued_does_not_lose_it():
    """Guards the look for the topmost unsaved node: its upper half is not queued."""
    cluster = Cluster(num_pages=24, offloads=1)
    compute(cluster, [9, 9, 9])
    cluster.do("abort", compute(cluster, PROMPT))
    short = cluster.open(PROMPT[:3])
    cluster.do("restore", short, ask_store=False)
    cluster.settle()
    assert [fact[1] for fact in cluster.facts(FactKind.STORED)] == [1, 1, 2]


def test_a_node_whose_upper_half_is_being_offloaded_waits_for_it():
    cluster = Cluster(num_pages=24, offloads=2)
    grow_one = compute(cluster, PROMPT)
    cluster.do("append", grow_one, pack([8, 9]))
    cluster.do("extend", grow_one, 9)
    cluster.forward([grow_one])
    cluster.finish_forward(cluster.first)
    cluster.step()
    cluster.do("commit", grow_one, 9)
    lower = cluster.request(grow_one).anchor
    cluster.first.state.dirty[lower] = None
    cluster.call("attach")
    assert lower not in cluster.first.state.dirty
    cluster.settle()
    assert [fact[1] for fact in cluster.facts(FactKind.STORED)] == [3, 1]


def test_an_offload_waits_while_pinning_its_node_would_break_a_promise():
    cluster = Cluster(num_pages=8)
    cluster.do("abort", compute(cluster, PROMPT))
    (ready,) = cluster.first.readies
    other = cluster.open([9] * 16)
    cluster.do("restore", other, ask_store=False)
    assert cluster.request(other).promise == 8
    agree(cluster)
    assert not cluster.replica.look.is_open(ready)
    assert not cluster.first.offloads
    assert cluster.replica.look.num_moving == 1
    cluster.do("abort", other)
    assert cluster.first.readies
    offload(cluster, GOOD)
    assert cluster.facts(FactKind.STORED)


def test_a_sibling_that_waits_follows_the_parent_that_was_missing():
    cluster = Cluster(num_pages=24, offloads=1)
    compute(cluster, PROMPT)
    offload(cluster, GOOD)
    for token in (8, 9):
        compute(cluster, [*PROMPT, token, 0])
    agree(cluster)
    assert spans(cluster) == [(3, 4)]
    finish(cluster, PARENT_MISSING)
    agree(cluster)
    assert spans(cluster) == [(0, 3)]
    cluster.settle()
    assert [fact[1] for fact in cluster.facts(FactKind.STORED)] == [3, 3, 1, 1]


# Windows.


def test_all_pools_of_a_node_are_offloaded_together():
    cluster = Cluster(WINDOW, num_pages=24, mask_ints=256)
    compute(cluster, PROMPT)
    agree(cluster)
    (plan,) = cluster.first.offloads.values()
    assert [(pool, start, len(pages)) for pool, start, pages, _ in plan.pieces] == [
        (0, 0, 3),
        (1, 0, 3),
    ]


def test_window_pages_are_kept_while_they_are_offloaded():
    """Guards ``reading``: the pin at the end keeps the last window only."""
    cluster = Cluster(WINDOW, {"kv": 48, "window": 8}, mask_ints=256)
    cluster.do("abort", compute(cluster, PROMPT))
    agree(cluster)
    short = cluster.open(PROMPT[:3])
    cluster.do("restore", short, ask_store=False)
    cluster.do("abort", short)
    other = cluster.open([9] * 12)
    cluster.do("restore", other, ask_store=False)
    assert cluster.request(other).promise == 0
    finish(cluster, GOOD)
    assert cluster.request(other).promise == 6


def test_a_running_offload_adopts_no_window_pages_that_it_would_not_store():
    cluster = Cluster(WINDOW, {"kv": 48, "window": 8}, mask_ints=256)
    cluster.do("abort", compute(cluster, PROMPT))
    other = cluster.open([9] * 16)
    cluster.do("extend", other, 16)
    cluster.do("abort", other)
    agree(cluster)
    (plan,) = cluster.first.offloads.values()
    assert {pool for pool, *_ in plan.pieces} == {0}
    twin = compute(cluster, PROMPT)
    (node,) = cluster.first.state.tree.nodes()
    assert node.pages[1] is None
    finish(cluster, GOOD)
    assert node.stored
    cluster.do("abort", twin)
    cluster.do("abort", compute(cluster, PROMPT))
    assert list(node.pages[1])
    assert not node.stored
    cluster.settle()
    assert node.stored
    assert len(cluster.first.store) == 6


def test_a_node_stays_queued_while_its_pin_would_break_a_promise():
    cluster = Cluster(num_pages=8, offloads=1)
    compute(cluster, [8, 8, 8])
    second = compute(cluster, PROMPT[:5])
    assert len(cluster.first.readies) == 1
    cluster.do("abort", second)
    other = cluster.open([9] * 12)
    cluster.do("restore", other, ask_store=False)
    assert cluster.request(other).promise == 6
    offload(cluster, GOOD)
    assert (cluster.replica.look.num_moving, len(cluster.first.readies)) == (1, 0)
    cluster.do("abort", other)
    assert len(cluster.first.readies) == 1


def test_a_leaf_without_window_pages_is_evicted_like_any_other():
    cluster = Cluster(WINDOW, {"kv": 10, "window": 8}, attach=False, mask_ints=256)
    cluster.serve(PROMPT)
    for num_tokens in (12, 16):
        other = cluster.open([9] * num_tokens)
        cluster.do("extend", other, num_tokens)
        cluster.do("abort", other)
    assert cluster.first.state.tree.num_nodes == 1
    assert cluster.facts(FactKind.EVICTED) == [(FactKind.EVICTED, 1, ())]


def test_window_pages_that_are_still_loading_are_not_offloaded():
    cluster = Cluster(WINDOW, {"kv": 48, "window": 8}, mask_ints=256)
    cluster.do("abort", compute(cluster, PROMPT))
    other = cluster.open([9] * 16)
    cluster.do("extend", other, 16)
    cluster.do("abort", other)
    cluster.fill_stores(PROMPT)
    twin = cluster.open(PROMPT)
    cluster.do("restore", twin)
    cluster.answer_lookup(cluster.first, *cluster.first.lookups)
    cluster.step()
    assert cluster.first.loads
    agree(cluster)
    (plan,) = cluster.first.offloads.values()
    assert {pool for pool, *_ in plan.pieces} == {0}
    cluster.settle()
    assert cluster.facts(FactKind.STORED)


def test_a_queued_node_that_loses_its_tail_keeps_its_turn():
    cluster = Cluster(num_pages=10, offloads=1, slots=2)
    first, second = compute(cluster, [9, 9, 9]), compute(cluster, PROMPT)
    (ready,) = cluster.first.readies
    cluster.end(first)
    cluster.end(second)
    cluster.step()
    # 4 of 10 pages are resident; 8 are taken, so one of the queued node's 3 goes.
    seq = cluster.open([5] * 16)
    cluster.do("extend", seq, 16)
    assert cluster.replica.look.match(pack(PROMPT)) == 4
    cluster.agree_ready(cluster.first, ready)
    cluster.step()
    (other,) = cluster.first.readies.values()
    assert other.num_pages == 2


def test_an_offload_that_fails_on_one_rank_runs_on_until_it_is_quiet(cluster):
    compute(cluster, PROMPT)
    agree(cluster)
    (offload_seq,) = cluster.first.offloads
    cluster.ranks[0].votes.sink(offload_seq, FAILED)
    cluster.step()
    assert not cluster.facts(FactKind.OFFLOAD_FAILED)
    finish(cluster, GOOD)
    assert cluster.facts(FactKind.OFFLOAD_FAILED)


def test_a_queued_node_that_goes_leaves_its_turn_to_the_half_above_it():
    cluster = Cluster(num_pages=9, offloads=1, offload_attempts=3)
    cluster.end(compute(cluster, [8] * 5))
    agree(cluster)  # pinned, and the only place is taken
    cluster.end(compute(cluster, PROMPT))
    cluster.step()
    half = cluster.open(PROMPT[:5])  # splits the queued node
    cluster.do("restore", half, ask_store=False)
    cluster.end(half)
    cluster.step()
    state = cluster.first.state
    assert [(node.start, node.end) for node in state.dirty] == [(2, 3)]
    other = cluster.open([5] * 10)  # evicts what is below the split
    cluster.do("extend", other, 10)
    assert [(node.start, node.end) for node in state.dirty] == [(0, 2)]
    cluster.end(other)
    cluster.settle()
    assert all(node.stored for node in state.tree.nodes())
