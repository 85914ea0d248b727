"""Write-back: the coldest leaves are saved while too few pages are clean."""

from __future__ import annotations

import pytest

from asyncache.core import FAILED, GOOD, PARENT_MISSING, FactKind, PageState, lru
from asyncache.core._offloads import num_clean
from tests.core.cluster import Cluster, pack

STEM = [1] * 6


def compute(cluster: Cluster, tokens: list[int], *, keep: bool = False) -> int:
    seq = cluster.open(tokens)
    cluster.do("restore", seq, ask_store=False)
    cluster.do("extend", seq, len(tokens))
    cluster.forward([seq])
    cluster.finish_forward(cluster.first)
    cluster.step()
    cluster.do("commit", seq, len(tokens))
    if not keep:
        cluster.do("abort", seq)
    return seq


def offload(cluster: Cluster, claim: int = GOOD) -> None:
    for ready in list(cluster.first.readies):
        cluster.agree_ready(cluster.first, ready)
    cluster.step()
    for seq in list(cluster.first.offloads):
        cluster.finish_offload(cluster.first, seq, claim)
    cluster.step()


def stored(cluster: Cluster) -> list[int]:
    return [fact[1] for fact in cluster.facts(FactKind.STORED)]


def clean(cluster: Cluster) -> int:
    return num_clean(cluster.first.state)


def test_what_is_saved_above_unsaved_leaves_is_not_clean():
    cluster = Cluster(num_pages=16, low_water=6)
    for token in (2, 3):
        compute(cluster, [*STEM, *[token] * 5])
    compute(cluster, [4] * 9)
    assert cluster.count(PageState.FREE) == 5
    offload(cluster)
    assert stored(cluster) == [3]
    assert clean(cluster) == 5
    offload(cluster)
    assert stored(cluster) == [3, 2]
    assert clean(cluster) == 7
    assert not cluster.first.readies


def test_a_saved_prefix_is_clean_once_what_hung_from_it_is_evicted():
    cluster = Cluster(num_pages=10, low_water=1)
    compute(cluster, [*STEM, 2, 2, 2])
    compute(cluster, [*STEM, 3, 3, 3])
    holder = cluster.open([9] * 10)
    cluster.do("extend", holder, 10)
    offload(cluster)
    assert stored(cluster) == [3]
    assert clean(cluster) == 0
    for num_tokens, left in [(12, 0), (14, 3)]:
        cluster.do("append", holder, pack([9, 9]))
        cluster.do("extend", holder, num_tokens)
        assert clean(cluster) == left
    assert len(cluster.facts(FactKind.EVICTED_UNSAVED)) == 2


def test_a_leaf_whose_attempts_are_spent_keeps_no_other_from_being_saved():
    cluster = Cluster(num_pages=12, low_water=7, offloads=1, offload_attempts=1)
    for number in range(1, 7):
        compute(cluster, [number] * 3)
    for _ in range(3):
        offload(cluster, FAILED)
    assert len(cluster.facts(FactKind.OFFLOAD_FORGOTTEN)) == 3
    offload(cluster)
    assert stored(cluster) == [1]
    saved = [node.edge for node in cluster.first.state.tree.nodes() if node.stored]
    assert saved == [pack([4, 4])]


def test_nothing_that_cannot_be_saved_is_looked_at_twice():
    looks = []

    def policy(node):
        looks.append(node)
        return lru(node)

    cluster = Cluster(
        num_pages=12, low_water=12, offload_attempts=1, offloads=2, policy=policy
    )
    for number in range(1, 7):
        compute(cluster, [number] * 3)
    for _ in range(3):
        offload(cluster, FAILED)
    assert cluster.replica.look.is_idle
    seq = cluster.open([9] * 3)
    looks.clear()
    for _ in range(20):
        cluster.do("append", seq, pack([9]))
        cluster.step()
    assert not looks


def test_a_ready_that_a_rank_dropped_waits_for_the_next_commit():
    """Guards that a rank which saves no more, for it stops, ends its steps."""
    cluster = Cluster(num_pages=12, low_water=12)
    for token in (2, 3):
        compute(cluster, [*STEM, *[token] * 3])
    (ready,) = cluster.first.readies
    cluster.first.votes.sink(ready, 0)
    cluster.step()
    assert cluster.facts(FactKind.OFFLOAD_FORGOTTEN)
    assert cluster.replica.look.is_idle
    seq = compute(cluster, [*STEM, 2, 2, 2], keep=True)
    cluster.do("abort", seq)
    assert cluster.first.readies
    cluster.settle()
    assert sum(stored(cluster)) == 5


def test_a_failed_offload_is_tried_again_until_its_attempts_are_spent():
    cluster = Cluster(num_pages=8, low_water=8, offload_attempts=3)
    compute(cluster, STEM)
    attempts = []
    for _ in range(5):
        attempts += [ready.attempts for ready in cluster.first.readies.values()]
        offload(cluster, FAILED)
    assert attempts == [0, 1, 2]
    assert cluster.replica.look.is_idle
    compute(cluster, STEM)
    cluster.settle()
    assert sum(stored(cluster)) == 3


def test_a_parent_that_the_store_lost_is_saved_before_the_leaf():
    cluster = Cluster(num_pages=12, low_water=12)
    compute(cluster, STEM)
    offload(cluster)
    compute(cluster, [*STEM, 2, 2, 2])
    offload(cluster, PARENT_MISSING)
    assert [ready.num_pages for ready in cluster.first.readies.values()] == [3]
    cluster.settle()
    assert stored(cluster) == [3, 3, 1]
    assert clean(cluster) == 12


def test_a_leaf_that_is_split_while_it_waits_is_saved_from_its_upper_half_on():
    cluster = Cluster(num_pages=12, low_water=8)
    compute(cluster, [1] * 14)
    holder = cluster.open([9] * 16)
    (ready,) = cluster.first.readies
    cluster.do("restore", holder, ask_store=False)
    cluster.agree_ready(cluster.first, ready)
    cluster.step()
    # Its 7 pages cannot be pinned: 3 of them were promised.
    assert cluster.first.state.dirty
    short = cluster.open([1] * 3)
    cluster.do("restore", short, ask_store=False)
    assert cluster.request(short).hit == 1
    assert [ready.num_pages for ready in cluster.first.readies.values()] == [1]
    cluster.do("abort", holder)
    cluster.do("abort", short)
    cluster.settle()
    assert stored(cluster) == [1, 6]


def test_a_leaf_that_is_evicted_while_it_is_set_aside_leaves_no_trace():
    cluster = Cluster(num_pages=8, low_water=8, offload_attempts=1)
    compute(cluster, STEM)
    offload(cluster, FAILED)
    assert cluster.first.state.unsaved.aside
    holder = cluster.open([9] * 16)
    cluster.do("extend", holder, 16)
    assert not cluster.first.state.unsaved.aside


def test_detach_leaves_nothing_clean_and_attach_saves_it_all_again():
    cluster = Cluster(num_pages=8, low_water=8)
    compute(cluster, [*STEM, 2, 2, 2])
    cluster.settle()
    assert clean(cluster) == 8
    cluster.call("detach")
    assert clean(cluster) == 4
    cluster.settle()
    assert len(stored(cluster)) == 1
    cluster.call("attach")
    cluster.settle()
    assert clean(cluster) == 8
    assert len(stored(cluster)) == 2


def test_what_is_saved_for_a_store_that_went_does_not_count_for_the_next():
    cluster = Cluster(num_pages=8, low_water=6)
    compute(cluster, STEM)
    for ready in list(cluster.first.readies):
        cluster.agree_ready(cluster.first, ready)
    cluster.step()
    assert cluster.first.offloads
    cluster.call("detach")
    cluster.call("attach")
    compute(cluster, [2] * 2)
    assert cluster.first.readies
    cluster.settle()
    assert stored(cluster) == [1, 3]


@pytest.mark.parametrize("call", ["reset", "detach"])
def test_many_leaves_that_come_and_go_leave_no_entries_behind(call):
    cluster = Cluster(num_pages=8, low_water=8, offload_attempts=1)
    for number in range(60):
        compute(cluster, [number] * 7)
        offload(cluster, FAILED)
    cluster.call(call)
    state = cluster.first.state
    num_nodes = state.tree.num_nodes
    for leaves in (state.leaves, state.unsaved._leaves):
        assert len(leaves._heap) <= 64 + 4 * num_nodes
    assert sum(map(len, state.unsaved.aside.values())) <= num_nodes
