"""No page changes hands under a running forward.

In each of these a forward is open that still writes, or reads, pages that were given
back. ``Cluster.check_contents`` would show what it overwrites later; the states of the
pages show it at once.
"""

from __future__ import annotations

import pytest

from asyncache.core import PageState
from asyncache.core._slack import page_slack
from tests.core.cluster import FULL, Cluster, layout_of, pack, window_pool

PROMPT = [1, 2, 3, 4, 5, 6, 7]
WINDOW = layout_of(FULL, window_pool(2))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(num_pages=8, num_ranks=2)


def start(cluster: Cluster, tokens: list[int]) -> int:
    """Open a request and begin a forward over all of it."""
    seq = cluster.open(tokens)
    cluster.do("extend", seq, len(tokens))
    cluster.forward([seq])
    return seq


@pytest.mark.parametrize("how", ["abort", "suspend", "hang up", "close"])
def test_pages_given_back_under_a_forward_are_not_given_out(cluster, how):
    """Guards State.release: given straight back, the second request would get them.

    The forward of the first would then write into the second's load.
    """
    cluster.fill_stores([9] * 9)
    seq = start(cluster, PROMPT)
    if how in {"abort", "suspend"}:
        cluster.do(how, seq)
    elif how == "hang up":
        cluster.ranks[1].votes.sink(seq, 0)
    else:
        cluster.end(seq)
    cluster.step()
    assert cluster.count(PageState.QUARANTINE) == 4
    other = cluster.open([9] * 9)
    cluster.do("restore", other)
    assert cluster.request(other).promise == 0
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()
    assert cluster.count(PageState.QUARANTINE) == 0
    assert cluster.run_restored(other) == 8


def test_a_leaf_that_was_cut_under_a_forward_leaves_its_parent_evictable(cluster):
    """Guards State.unpin: only the node that was cut is unpinned, and it is gone."""
    cluster.fill_stores(PROMPT)
    cluster.serve(PROMPT[:5])
    seq = cluster.open(PROMPT)
    cluster.do("restore", seq)
    for rank in cluster.ranks:
        cluster.answer_lookup(rank, *rank.lookups)
    cluster.step()
    cluster.forward([seq])
    cluster.ranks[0].votes.sink(*cluster.first.loads, 0)
    cluster.step()
    cluster.do("abort", seq)
    for rank in cluster.ranks:
        cluster.work(rank)
    cluster.step()
    assert cluster.do("extend", cluster.open([9] * 16), 16) == 8


def test_quarantine_ends_when_the_last_rank_has_finished_the_forward(cluster):
    seq = start(cluster, PROMPT)
    cluster.do("abort", seq)
    cluster.finish_forward(cluster.ranks[0])
    cluster.step()
    assert cluster.count(PageState.QUARANTINE) == 4
    cluster.finish_forward(cluster.ranks[1])
    cluster.step()
    assert cluster.count(PageState.FREE) == 8
    assert cluster.replica.look.is_idle


def test_pages_wait_for_the_newest_forward_that_was_open(cluster):
    seq = start(cluster, PROMPT)
    start(cluster, [5, 5])
    cluster.do("abort", seq)
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()
    assert cluster.count(PageState.QUARANTINE) == 4
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()
    assert cluster.count(PageState.QUARANTINE) == 0


def test_truncated_pages_that_no_promise_covers_wait_for_the_forward(cluster):
    seq = cluster.open([1])
    cluster.do("extend", seq, 1)
    cluster.do("append", seq, pack([1] * 6))
    cluster.do("extend", seq, 7)
    cluster.forward([seq])
    cluster.do("truncate", seq, 1)
    assert cluster.count(PageState.QUARANTINE) == 3


def test_a_prefix_that_a_forward_reads_is_not_evicted(cluster):
    """Guards the pins of a bracket: the request that held the prefix is gone."""
    cluster.serve(PROMPT)
    seq = cluster.open(PROMPT)
    cluster.do("restore", seq)
    cluster.do("extend", seq, 7)
    cluster.forward([seq])
    cluster.do("abort", seq)
    other = cluster.open([9] * 11)
    cluster.do("restore", other)
    assert cluster.request(other).promise == 0
    assert cluster.replica.look.match(pack(PROMPT)) == 6
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()
    assert cluster.request(other).promise == 6


def test_pages_committed_under_their_forward_stay_until_it_ends(cluster):
    """Guards the pin in commit: in the tree, quarantine does not cover them."""
    seq = start(cluster, PROMPT)
    cluster.do("commit", seq, 7)
    cluster.do("abort", seq)
    other = cluster.open([9] * 11)
    cluster.do("restore", other)
    assert cluster.request(other).promise == 0
    assert cluster.count(PageState.TREE) == 3
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()
    assert cluster.request(other).promise == 6


def test_a_commit_under_someone_elses_forward_is_not_held(cluster):
    seq = cluster.open(PROMPT)
    cluster.do("extend", seq, 7)
    cluster.forward([seq])
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()
    start(cluster, [5, 5])
    cluster.do("commit", seq, 7)
    (bracket,) = cluster.first.state.brackets.values()
    assert (bracket.pins, bracket.writes) == ([], [])


def test_pages_are_not_offloaded_before_their_forward_has_written_them(cluster):
    """Guards ``written``: the offload would take what the pages held before."""
    seq = start(cluster, PROMPT)
    cluster.do("commit", seq, 7)
    cluster.step()
    assert not cluster.first.readies
    assert cluster.replica.look.num_moving == 1
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()
    assert cluster.first.readies


def test_window_pages_under_a_forward_are_kept_though_a_split_leaves_them_behind():
    """Guards Bracket.writes: the pin at the node's end keeps its last window only."""
    cluster = Cluster(WINDOW, {"kv": 24, "window": 8}, num_ranks=2, mask_ints=256)
    seq = start(cluster, PROMPT)
    cluster.do("commit", seq, 7)
    cluster.do("abort", seq)
    other = cluster.open([1, 2, 3, 4, 9])
    cluster.do("restore", other, ask_store=False)
    assert cluster.request(other).hit == 2
    cluster.do("abort", other)
    big = cluster.open([9] * 12)
    cluster.do("restore", big, ask_store=False)
    assert cluster.request(big).promise == 0
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()
    assert cluster.do("extend", big, 12) == 6


def test_window_pages_adopted_under_a_forward_are_not_offloaded_before_it_ends():
    """Guards the second look at ``written``, when all ranks are ready to offload."""
    cluster = Cluster(WINDOW, {"kv": 24, "window": 8}, num_ranks=2, mask_ints=256)
    seq = start(cluster, PROMPT)
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.do("commit", seq, 7)
    cluster.end(seq)
    cluster.step()
    (node,) = cluster.first.state.tree.nodes()
    assert cluster.first.readies
    # A ready pins nothing: the window goes when another request wants its pages.
    other = cluster.open([9] * 16)
    cluster.do("extend", other, 16)
    cluster.do("abort", other)
    assert node.pages[1] is None
    twin = start(cluster, PROMPT)
    cluster.do("commit", twin, 7)
    assert list(node.pages[1])
    for rank in cluster.ranks:
        for ready in list(rank.readies):
            cluster.agree_ready(rank, ready)
    cluster.step()
    assert not cluster.first.offloads
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.end(twin)
    cluster.settle()
    cluster.check_rest()
    assert node.stored


def test_what_a_bracket_keeps_of_adopted_windows_breaks_no_promise():
    """Only the pages that were adopted are written, not those of other windows."""
    layout = layout_of(FULL, window_pool(4), window_pool(6, "wide"))
    cluster = Cluster(layout, {"kv": 20, "window": 13, "wide": 20}, attach=False)
    tokens = list(range(13))
    cluster.serve(tokens)
    half = cluster.open(tokens[:9])
    cluster.do("restore", half)
    cluster.end(half)
    cluster.settle()
    state = cluster.first.state
    top = next(node for node in state.tree.nodes() if node.start == 0)
    state._trim(top, 2, set(), 8)  # evicted
    request = cluster.open(tokens)
    cluster.do("extend", request, 13)
    cluster.forward([request])
    other = cluster.open([99] * 8)
    cluster.do("restore", other)
    assert cluster.request(other).promise == 4
    cluster.do("commit", request, 13)  # within it, promises are checked
    assert top.pages[2] is not None
    assert page_slack(state) == 0
    assert cluster.do("extend", other, 8) == 4
