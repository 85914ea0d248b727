"""A request gives back the window pages that it has passed, and no others."""

from __future__ import annotations

import pytest

from asyncache.core import PageState
from tests.core.cluster import FULL, Cluster, layout_of, pack, window_pool

LAYOUT = layout_of(FULL, window_pool(4))
LONG = list(range(20))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(LAYOUT, num_pages=24, num_ranks=2, requests=4)


def run(cluster: Cluster, seq: int, num_tokens: int) -> None:
    """Compute up to some tokens, without a commit."""
    cluster.do("extend", seq, num_tokens)
    cluster.forward([seq])
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()


def blanks(cluster: Cluster, seq: int) -> int:
    return cluster.request(seq).tables[1].count(-1)


@pytest.mark.parametrize(
    ("computed", "passed"), [(4, 0), (5, 0), (6, 1), (7, 1), (8, 2), (9, 2), (10, 3)]
)
def test_an_extend_gives_back_what_lies_wholly_behind_the_window(
    cluster, computed, passed
):
    """Token ``computed`` is next, and looks back four: pages hold two tokens."""
    seq = cluster.open(LONG)
    run(cluster, seq, computed)
    assert blanks(cluster, seq) == 0
    cluster.do("extend", seq, computed)
    assert blanks(cluster, seq) == passed
    num_pages = -(-computed // 2)
    assert cluster.count(PageState.REQUEST, pool=1) == num_pages - passed
    assert cluster.count(PageState.REQUEST) == num_pages


def test_what_no_forward_has_begun_to_compute_is_kept(cluster):
    seq = cluster.open(LONG)
    cluster.do("extend", seq, 10)
    cluster.do("extend", seq, 20)
    assert blanks(cluster, seq) == 0


def test_pages_given_back_wait_for_the_forward_that_reads_them(cluster):
    """Guards that they go through the bracket's quarantine."""
    seq = cluster.open(LONG)
    run(cluster, seq, 8)
    cluster.do("extend", seq, 10)
    assert cluster.count(PageState.QUARANTINE, pool=1) == 0
    cluster.forward([seq])
    cluster.do("extend", seq, 12)
    assert cluster.count(PageState.QUARANTINE, pool=1) == 1
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()
    assert cluster.count(PageState.QUARANTINE, pool=1) == 0


def test_a_long_decode_holds_no_more_than_its_window(cluster):
    """24 pages of the window pool would not be enough for all of it."""
    cluster = Cluster(LAYOUT, {"kv": 60, "window": 8}, requests=4)
    seq = cluster.open([1] * 4, reserve=4)
    for num_tokens in range(4, 100, 2):
        run(cluster, seq, num_tokens)
        cluster.do("append", seq, pack([1, 1]))
        assert cluster.count(PageState.REQUEST, pool=1) <= 4
    cluster.do("commit", seq, 98)
    assert cluster.replica.look.match(pack([1] * 99)) == 98
    cluster.end(seq)
    cluster.settle()
    cluster.check_rest()


def test_a_decode_that_commits_holds_no_more_than_its_window():
    cluster = Cluster(LAYOUT, {"kv": 60, "window": 8}, requests=4)
    seq = cluster.open([1] * 4, reserve=4)
    for num_tokens in range(4, 100, 2):
        run(cluster, seq, num_tokens)
        cluster.do("commit", seq, num_tokens)
        cluster.do("append", seq, pack([1, 1]))
        assert len(cluster.first.state.guarded(1)) <= 2
    cluster.do("abort", seq)
    assert cluster.replica.look.match(pack([1] * 99)) == 98


def test_a_pin_keeps_its_window_and_not_the_whole_node_that_it_ends(cluster):
    seq = cluster.open(LONG)
    run(cluster, seq, 20)
    cluster.do("commit", seq, 20)
    (node,) = cluster.first.state.tree.nodes()
    assert cluster.first.state.guarded(1) == set(node.pages[1][-2:])
    assert cluster.first.state.evictable(1) == 8


def test_eviction_takes_the_first_pages_of_a_node_and_leaves_its_end():
    cluster = Cluster(LAYOUT, {"kv": 60, "window": 24}, requests=4)
    cluster.serve(LONG)
    other = cluster.open([9] * 40)
    cluster.do("extend", other, 40)
    (node, *_) = cluster.first.state.tree.nodes()
    assert (node.start_of(1), node.end) == (6, 10)
    assert cluster.replica.look.match(pack([*LONG, 1])) == 20
    cluster.do("append", other, pack([9] * 6))
    cluster.do("extend", other, 46)
    assert cluster.replica.look.match(pack([*LONG, 1])) == 0


def test_a_parked_commit_keeps_the_window_pages_that_it_will_publish():
    """Guards the look at ``want``: they were given back before their turn had come."""
    cluster = Cluster(LAYOUT, {"kv": 24, "window": 24}, requests=4)
    seq, twin = cluster.open([1] * 12), cluster.open([1] * 12)
    for each in (seq, twin):
        cluster.do("extend", each, 12)
    cluster.forward([seq, twin])
    cluster.finish_forward(cluster.first)
    cluster.step()
    cluster.do("commit", seq, 12)
    cluster.end(seq)
    cluster.settle(6)
    other = cluster.open([2] * 36)
    cluster.do("restore", other, ask_store=False)
    assert cluster.request(other).promise == 18
    cluster.do("commit", twin, 12)
    assert list(cluster.first.state.parked) == [twin]
    cluster.do("extend", twin, 12)
    assert blanks(cluster, twin) == 0
    cluster.do("abort", other)
    assert cluster.request(twin).shared == 6
    cluster.do("extend", twin, 12)
    assert blanks(cluster, twin) == 4


def test_a_request_on_a_load_keeps_its_pages_for_a_hit_that_falls(cluster):
    cluster.fill_stores([3] * 4)
    seq = cluster.open([3] * 20)
    cluster.do("restore", seq)
    for rank in cluster.ranks:
        cluster.answer_lookup(rank, *rank.lookups)
    cluster.step()
    run(cluster, seq, 16)
    cluster.do("extend", seq, 18)
    assert blanks(cluster, seq) == 0
    cluster.first.votes.sink(*cluster.first.loads, 0)
    cluster.step()
    assert cluster.request(seq).hit == 0
    assert cluster.do("extend", seq, 20) == 10


def test_a_commit_after_a_window_has_passed_publishes_its_end_only(cluster):
    seq = cluster.open(LONG)
    run(cluster, seq, 12)
    run(cluster, seq, 20)
    cluster.do("commit", seq, 20)
    (node,) = cluster.first.state.tree.nodes()
    assert (node.start, node.start_of(1), node.end) == (0, 4, 10)
    cluster.end(seq)
    cluster.settle()
    assert cluster.replica.look.match(pack(LONG)) == 18
    assert cluster.replica.look.match(pack(LONG[:11])) == 0
    assert {pool for pool, _ in cluster.first.store} == {0, 1}


def test_a_node_that_lost_its_first_window_pages_gets_them_back(cluster):
    """What is given to a node is whole: it is split where its own begin."""
    seq = cluster.open(LONG)
    run(cluster, seq, 12)
    run(cluster, seq, 20)
    cluster.do("commit", seq, 20)
    cluster.end(seq)
    cluster.settle()
    twin = cluster.open(LONG)
    run(cluster, twin, 20)
    cluster.do("commit", twin, 20)
    spans = [
        (node.start, node.start_of(1), node.end)
        for node in cluster.first.state.tree.nodes()
    ]
    assert spans == [(0, 0, 4), (4, 4, 10)]


def test_a_truncate_keeps_to_where_its_window_is_whole(cluster):
    seq = cluster.open(LONG)
    run(cluster, seq, 12)
    cluster.do("extend", seq, 16)
    with pytest.raises(ValueError, match="between the 12 that are shared, or before"):
        cluster.do("truncate", seq, 11)
    cluster.do("truncate", seq, 12)
    run(cluster, seq, 12)
    cluster.do("append", seq, pack([5] * 4))
    run(cluster, seq, 16)


def test_tokens_that_were_rejected_take_no_window_pages_along(cluster):
    """Guards that a truncate lowers what counts as computed."""
    seq = cluster.open(LONG[:10])
    run(cluster, seq, 10)
    cluster.do("append", seq, pack([7] * 6))
    run(cluster, seq, 16)
    cluster.do("truncate", seq, 11)
    cluster.do("append", seq, pack([8] * 3))
    run(cluster, seq, 14)
    assert blanks(cluster, seq) == 3
