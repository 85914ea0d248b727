"""Attach, detach and reset, policies, low water and launches."""

from __future__ import annotations

import pytest

from asyncache.core import GOOD, FactKind, PageState, content_tokens
from tests.core.cluster import FULL, Cluster, layout_of, pack, window_pool

PROMPT = [1, 2, 3, 4, 5, 6, 7]


def compute(cluster: Cluster, tokens: list[int], **kwargs) -> int:
    seq = cluster.open(tokens, **kwargs)
    cluster.do("restore", seq, ask_store=False)
    cluster.do("extend", seq, len(tokens))
    cluster.forward([seq])
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()
    cluster.do("commit", seq, len(tokens))
    return seq


@pytest.fixture(params=["full", "window"])
def cluster(request) -> Cluster:
    pools = (FULL,) if request.param == "full" else (FULL, window_pool(4))
    return Cluster(layout_of(*pools), num_pages=24, num_ranks=2)


def test_a_reset_frees_what_no_pin_holds_and_the_rest_when_its_last_pin_goes(cluster):
    seq = compute(cluster, PROMPT)
    cluster.do("abort", compute(cluster, [9] * 7))
    cluster.settle()
    cluster.call("reset")
    assert cluster.replica.look.match(pack(PROMPT)) == 0
    assert cluster.count(PageState.TREE) == 3
    cluster.end(seq)
    cluster.settle()
    assert cluster.count(PageState.TREE) == 0
    assert cluster.count(PageState.FREE) == 24


def test_an_open_request_shares_nothing_across_a_reset_until_it_starts_over(cluster):
    seq = compute(cluster, PROMPT)
    cluster.call("reset")
    cluster.do("append", seq, pack([8, 9, 10]))
    cluster.do("extend", seq, 10)
    cluster.do("commit", seq, 10)
    assert cluster.replica.look.match(pack([*PROMPT, 8, 9, 10])) == 0
    cluster.do("suspend", seq)
    cluster.do("restore", seq, ask_store=False)
    assert cluster.request(seq).hit == 0
    cluster.do("extend", seq, 10)
    cluster.forward([seq])
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()
    cluster.do("commit", seq, 10)
    assert cluster.replica.look.match(pack([*PROMPT, 8, 9, 10])) == 8


def test_a_reset_cuts_loads_and_gives_their_pages_back_when_they_are_quiet(cluster):
    cluster.fill_stores(PROMPT)
    seq = cluster.open(PROMPT)
    cluster.do("restore", seq)
    for rank in cluster.ranks:
        cluster.answer_lookup(rank, *rank.lookups)
    cluster.step()
    assert cluster.request(seq).hit == 3
    cluster.call("reset")
    assert cluster.request(seq).hit == 0
    assert cluster.count(PageState.QUARANTINE) >= 3
    cluster.settle()
    assert cluster.count(PageState.QUARANTINE) == 0


def test_pages_under_an_open_forward_outlive_a_reset(cluster):
    seq = compute(cluster, PROMPT)
    cluster.forward([seq])
    cluster.call("reset")
    cluster.do("abort", seq)
    assert cluster.count(PageState.TREE) == 3
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()
    assert cluster.count(PageState.TREE) == 0


def test_an_offload_across_a_reset_stores_nothing_for_the_new_generation(cluster):
    compute(cluster, PROMPT)
    for rank in cluster.ranks:
        for ready in list(rank.readies):
            cluster.agree_ready(rank, ready)
    cluster.step()
    assert cluster.first.offloads
    cluster.call("reset")
    for rank in cluster.ranks:
        for offload in list(rank.offloads):
            cluster.finish_offload(rank, offload, GOOD)
    cluster.step()
    assert not cluster.facts(FactKind.STORED)
    assert cluster.replica.look.num_moving == 0


def test_a_new_revision_asks_the_store_for_other_pages():
    cluster = Cluster(num_pages=24)
    cluster.fill_stores(PROMPT)
    cluster.call("reset", None, "v2")
    seq = cluster.open(PROMPT)
    cluster.do("restore", seq)
    cluster.answer_lookup(cluster.first, *cluster.first.lookups)
    cluster.step()
    assert cluster.request(seq).hit == 0


def test_detach_leaves_no_trace_of_the_store_and_keeps_what_is_resident(cluster):
    seq = compute(cluster, PROMPT)
    cluster.settle()
    assert cluster.facts(FactKind.STORED)
    cluster.call("detach")
    assert cluster.replica.look.match(pack(PROMPT)) == 6
    assert not any(node.stored for node in cluster.first.state.tree.nodes())
    cluster.do("suspend", seq)
    cluster.do("restore", seq)
    assert not cluster.first.lookups
    cluster.call("attach")
    assert cluster.first.readies


def test_a_detach_ends_open_lookups_as_misses_and_cuts_loads(cluster):
    cluster.fill_stores(PROMPT)
    cluster.fill_stores([8] * 7)
    loading, asking = cluster.open(PROMPT), cluster.open([8] * 7)
    cluster.do("restore", loading)
    for rank in cluster.ranks:
        cluster.answer_lookup(rank, *rank.lookups)
    cluster.step()
    cluster.do("restore", asking)
    cluster.call("detach")
    assert cluster.request(asking).lookup is None
    assert cluster.request(loading).hit == 0
    cluster.settle()
    assert cluster.replica.look.num_moving == 0


def test_loads_wait_for_a_launch_where_they_are_launched_in_batches():
    cluster = Cluster(num_pages=24, launches=True)
    for number in (1, 2):
        cluster.fill_stores([number] * 7)
        cluster.do("restore", cluster.open([number] * 7))
    for lookup in list(cluster.first.lookups):
        cluster.answer_lookup(cluster.first, lookup)
    cluster.step()
    assert not cluster.first.loads
    (loads,) = cluster.call("launch")
    assert sorted(load.seq for load in loads) == sorted(cluster.first.loads)
    assert len(loads) == 2
    assert cluster.call("launch") == [[]]


def test_a_load_that_was_never_launched_is_rolled_back_exactly():
    cluster = Cluster(num_pages=24, launches=True)
    cluster.fill_stores(PROMPT)
    seq = cluster.open(PROMPT)
    cluster.do("restore", seq)
    cluster.answer_lookup(cluster.first, *cluster.first.lookups)
    cluster.step()
    assert cluster.count(PageState.TRANSIT) == 3
    cluster.do("abort", seq)
    assert cluster.count(PageState.FREE) == 24
    assert cluster.replica.look.is_idle


def test_a_read_only_cache_offloads_nothing():
    cluster = Cluster(write_threshold=0)
    compute(cluster, PROMPT)
    assert not cluster.first.readies


def test_write_back_saves_the_coldest_while_too_few_pages_are_clean():
    cluster = Cluster(num_pages=16, low_water=6)
    for number in range(1, 4):
        cluster.do("abort", compute(cluster, [number] * 7))
        cluster.settle()
    # 9 pages are resident and 7 are free: enough.
    assert not cluster.facts(FactKind.STORED)
    cluster.do("abort", compute(cluster, [4] * 7))
    cluster.settle()
    stored = cluster.facts(FactKind.STORED)
    assert sum(fact[1] for fact in stored) == 3
    (saved,) = [node for node in cluster.first.state.tree.nodes() if node.stored]
    assert saved.edge == pack([1] * 6)


def test_write_back_evicts_what_is_saved_first():
    cluster = Cluster(num_pages=16, low_water=6)
    for number in range(1, 5):
        cluster.do("abort", compute(cluster, [number] * 7))
        cluster.settle()
    cluster.do("restore", cluster.open([1] * 7), ask_store=False)
    cluster.settle()
    seq = cluster.open([9] * 14)
    cluster.do("extend", seq, 14)
    assert not cluster.facts(FactKind.EVICTED_UNSAVED)
    assert cluster.facts(FactKind.EVICTED)


@pytest.mark.parametrize(
    ("policy", "gone"),
    [("lru", 2), ("mru", 3), ("fifo", 1), ("filo", 3), ("lfu", 3), ("slru", 3)],
)
def test_a_policy_says_which_prefix_goes_first(policy, gone):
    from asyncache import core

    cluster = Cluster(num_pages=12, policy=getattr(core, policy), attach=False)
    for number in (1, 2, 3):
        cluster.do("abort", compute(cluster, [number] * 7))
    for number in (2, 1):
        seq = cluster.open([number] * 7)
        cluster.do("restore", seq, ask_store=False)
        cluster.do("abort", seq)
    if policy in {"lru", "mru"}:
        seq = cluster.open([3] * 7)
        cluster.do("restore", seq, ask_store=False)
        cluster.do("abort", seq)
    cluster.do("extend", cluster.open([9] * 8), 8)
    held = [cluster.replica.look.match(pack([n] * 7)) for n in (1, 2, 3)]
    assert [n for n, match in zip((1, 2, 3), held, strict=True) if match < 6] == [gone]


def test_what_a_request_of_high_priority_used_goes_last():
    from asyncache.core import priority

    cluster = Cluster(num_pages=12, policy=priority, attach=False)
    for number in (1, 2, 3):
        seq = compute(cluster, [number] * 7, priority=int(number == 1))
        cluster.do("abort", seq)
    cluster.do("extend", cluster.open([9] * 8), 8)
    assert cluster.replica.look.match(pack([1] * 7)) == 6
    assert cluster.replica.look.match(pack([2] * 7)) < 6


def test_content_tokens_are_a_function_of_the_digest_and_no_vocabulary():
    one, other = (content_tokens(bytes([n]) * 32, 20) for n in (1, 2))
    assert list(one) == list(content_tokens(bytes([1]) * 32, 20))
    assert not set(one) & set(other)
    assert all(2**30 <= token < 2**31 for token in one)
    assert list(content_tokens(bytes([1]) * 32, 3)) == list(one[:3])
    with pytest.raises(ValueError, match="at least 16 bytes, not 8"):
        content_tokens(b"12345678", 1)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        content_tokens(bytes(32), 0)


# What is under way when the store goes, or all is forgotten.


def agree(cluster: Cluster) -> None:
    for rank in cluster.ranks:
        for ready in list(rank.readies):
            cluster.agree_ready(rank, ready)
    cluster.step()


def finish(cluster: Cluster, claim: int = GOOD) -> None:
    for rank in cluster.ranks:
        for offload in list(rank.offloads):
            cluster.finish_offload(rank, offload, claim)
    cluster.step()


def ask(cluster: Cluster, tokens: list[int], **kwargs) -> int:
    seq = cluster.open(tokens, **kwargs)
    cluster.do("restore", seq)
    return seq


def answer(cluster: Cluster) -> None:
    for rank in cluster.ranks:
        for lookup in list(rank.lookups):
            cluster.answer_lookup(rank, lookup)
    cluster.step()


@pytest.mark.parametrize("call", ["detach", "reset"])
def test_a_ready_is_gone_at_once_and_votes_on_it_count_no_more(cluster, call):
    compute(cluster, PROMPT)
    (ready,) = cluster.first.readies
    for rank in cluster.ranks:
        rank.votes.quiet(ready)
    cluster.cast()
    cluster.call(call)
    assert not cluster.first.readies
    assert not cluster.replica.look.is_open(ready)
    cluster.apply()
    assert not cluster.first.offloads
    assert cluster.replica.look.num_moving == 0


def test_a_store_attached_while_an_offload_runs_for_the_last_gets_it_afterwards(
    cluster,
):
    cluster.do("abort", compute(cluster, PROMPT))
    agree(cluster)
    cluster.call("detach")
    cluster.call("attach")
    assert not cluster.first.readies
    finish(cluster)
    assert not cluster.facts(FactKind.STORED)
    agree(cluster)
    finish(cluster)
    assert [fact[1] for fact in cluster.facts(FactKind.STORED)] == [3]


def queued_offload() -> Cluster:
    """An offload that found no place among the loads."""
    cluster = Cluster(num_pages=24, slots=2, offloads=1)
    cluster.do("abort", compute(cluster, PROMPT))
    for number in (8, 9):
        cluster.fill_stores([number] * 5)
        ask(cluster, [number] * 5)
    answer(cluster)
    # The ready and one load hold both places, and the other load is next.
    assert len(cluster.first.loads) == 1
    agree(cluster)
    assert len(cluster.first.loads) == 2
    assert not cluster.first.offloads
    assert cluster.first.state.num_offloading == 1
    return cluster


def test_what_a_reset_forgets_is_not_queued_for_the_store_again():
    """Seed 5093940: nodes that had left the tree were offloaded, their pages free."""
    cluster = queued_offload()
    cluster.call("reset")
    assert cluster.first.state.num_offloading == 0
    assert not cluster.first.state.dirty
    cluster.settle()
    assert cluster.count(PageState.FREE) == 24
    assert not cluster.facts(FactKind.STORED)


def test_an_offload_that_never_started_is_gone_at_once():
    cluster = queued_offload()
    cluster.call("detach")
    assert cluster.first.state.num_offloading == 0
    cluster.settle()
    assert cluster.count(PageState.FREE) == 21


def test_a_reset_makes_misses_of_questions_and_lets_those_that_wait_ask_anew(cluster):
    stem = [7] * 9
    holder = cluster.open([5] * 30)
    cluster.do("extend", holder, 30)
    cluster.fill_stores(stem)
    asking, waiting = ask(cluster, stem), ask(cluster, stem, reserve=8)
    (old,) = cluster.first.lookups
    cluster.call("reset", None, "2")
    assert cluster.request(asking).lookup is None
    assert cluster.request(waiting).lookup is not None
    assert not cluster.first.lookups
    for rank in cluster.ranks:
        rank.votes.answer(old, range(1, 5))
    cluster.step()
    cluster.do("abort", holder)
    (plan,) = cluster.first.lookups.values()
    assert cluster.contents[plan.asks[0].hashes[0]].root == cluster.now(None).root
    answer(cluster)
    assert cluster.request(waiting).hit == 0
    # Neither held a page at the reset: what they compute is of the new weights.
    for seq in (asking, waiting):
        cluster.do("extend", seq, 9)
        cluster.forward([seq])
        for rank in cluster.ranks:
            cluster.finish_forward(rank)
        cluster.step()
        cluster.do("commit", seq, 9)
    assert cluster.request(asking).shared == 4
    assert cluster.replica.look.match(pack(stem)) == 8


def test_what_a_reset_cut_is_asked_for_again(cluster):
    cluster.fill_stores(PROMPT)
    seq = ask(cluster, PROMPT)
    answer(cluster)
    assert cluster.request(seq).needs
    cluster.call("reset")
    cluster.do("restore", seq)
    answer(cluster)
    cluster.settle()
    assert cluster.request(seq).hit == 3
    assert cluster.request(seq).generation == 1


def test_a_parked_commit_of_before_a_reset_is_dropped(cluster):
    cluster.fill_stores(PROMPT)
    twin = cluster.open(PROMPT)
    cluster.do("restore", twin, ask_store=False)
    ask(cluster, PROMPT)
    answer(cluster)
    cluster.do("extend", twin, 7)
    cluster.forward([twin])
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.step()
    assert cluster.do("commit", twin, 7) == 0
    assert cluster.first.state.parked
    cluster.call("reset")
    assert not cluster.first.state.parked
    cluster.settle()
    assert cluster.replica.look.match(pack(PROMPT)) == 0


def test_a_second_reset_leaves_pinned_pages_of_both_generations_to_their_pins(cluster):
    first = compute(cluster, PROMPT)
    cluster.call("reset")
    second = compute(cluster, PROMPT)
    cluster.call("reset")
    assert cluster.count(PageState.TREE) == 6
    assert cluster.first.state.tree.num_nodes == 0
    for left, seq in [(3, first), (0, second)]:
        cluster.do("abort", seq)
        assert cluster.count(PageState.TREE) == left
    cluster.settle()
    cluster.check_rest()


def test_window_pages_that_left_the_tree_are_free_once_no_pin_needs_them():
    """Guards eviction: it counts on what no pin needs, and looks in the tree."""
    cluster = Cluster(layout_of(FULL, window_pool(4)), num_pages=24)
    long = compute(cluster, PROMPT)
    short = cluster.open(PROMPT[:3])
    cluster.do("restore", short, ask_store=False)
    assert cluster.request(short).hit == 1
    cluster.call("reset")
    assert [cluster.count(PageState.TREE, pool) for pool in (0, 1)] == [3, 3]
    cluster.do("abort", short)
    assert [cluster.count(PageState.TREE, pool) for pool in (0, 1)] == [3, 2]
    cluster.do("abort", long)
    assert [cluster.count(PageState.TREE, pool) for pool in (0, 1)] == [0, 0]


def test_a_load_that_was_cut_under_a_forward_and_then_reset_leaves_nothing(cluster):
    cluster.fill_stores([*PROMPT, 8, 9])
    cluster.do("abort", compute(cluster, PROMPT))
    seq = ask(cluster, [*PROMPT, 8, 9])
    answer(cluster)
    assert cluster.request(seq).needs
    cluster.forward([seq])
    for rank in cluster.ranks:
        rank.votes.sink(next(iter(rank.loads)), 0)
    cluster.step()
    cluster.call("reset")
    assert cluster.count(PageState.TREE) == 3
    cluster.do("abort", seq)
    cluster.settle()
    cluster.check_rest()
    assert cluster.count(PageState.FREE) == 24


@pytest.mark.parametrize(
    ("revision", "error"), [(5, TypeError), ("\ud800", ValueError)]
)
def test_a_revision_that_is_no_text_is_refused_and_nothing_changes(revision, error):
    cluster = Cluster(num_pages=24)
    compute(cluster, PROMPT)
    before = cluster.replica.look.dump()
    with pytest.raises(error):
        cluster.replica.calls.reset(revision)
    assert cluster.replica.look.dump() == before
    assert not cluster.replica.take_effects()


def test_ranks_that_reset_to_different_revisions_differ_in_their_digests():
    cluster = Cluster(num_ranks=3)
    for rank, revision in zip(cluster.ranks, (None, "", "2"), strict=True):
        rank.replica.calls.reset(revision)
    digests = {rank.replica.ballot().digest for rank in cluster.ranks}
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("priority", "error"),
    [(1.5, TypeError), (True, TypeError), (2**31, ValueError), (-(2**31), ValueError)],
)
def test_a_priority_that_does_not_fit_is_refused_and_nothing_changes(priority, error):
    cluster = Cluster()
    before = cluster.replica.look.dump()
    with pytest.raises(error, match="priority must be"):
        cluster.replica.calls.open(pack(PROMPT), priority=priority)
    assert cluster.replica.look.dump() == before


def test_a_request_that_waits_only_to_commit_ends_with_the_load_that_a_call_cuts(
    cluster,
):
    """No verdict may follow for long."""
    cluster.fill_stores(PROMPT)
    seq = cluster.open([*PROMPT, 8, 9, 10])
    cluster.do("restore", seq)
    for rank in cluster.ranks:
        [lookup] = rank.lookups
        cluster.answer_lookup(rank, lookup)
    cluster.step()
    cluster.do("extend", seq, 10)
    cluster.do("commit", seq, 10)
    cluster.do("close", seq)
    assert cluster.replica.look.is_open(seq)
    cluster.call("detach")
    assert not cluster.replica.look.is_open(seq)
    cluster.settle()
    cluster.check_rest()
