"""Recurrent states: a slot of a request's own, checkpoints, and what begins with them.

``Cluster.forward`` reads and writes slots as a model does, and checks at its end that
the state it went on from was that of its prefix; ``check`` looks at all that is shared.
"""

from __future__ import annotations

import pytest

from asyncache.core import (
    GOOD,
    Bounds,
    OrderError,
    OutOfPagesError,
    PageState,
    Replica,
    SlotCopy,
)
from tests.core.cluster import FULL, Cluster, layout_of, pack, state_pool, window_pool

LAYOUT = layout_of(FULL, state_pool())
PROMPT = [1] * 8


def make(num_slots: int = 8, **kwargs) -> Cluster:
    layout = kwargs.pop("layout", LAYOUT)
    sizes = {pool.name: num_slots if pool is not FULL else 40 for pool in layout.pools}
    return Cluster(layout, sizes, requests=4, **kwargs)


@pytest.fixture
def cluster() -> Cluster:
    return make(num_ranks=2)


def run(cluster: Cluster, seq: int, num_tokens: int, *, keep: bool = True) -> None:
    """Compute up to some tokens, and keep the state there."""
    cluster.do("extend", seq, num_tokens)
    cluster.forward([seq])
    if keep:
        assert cluster.checkpoint(seq)
    finish(cluster)


def finish(cluster: Cluster) -> None:
    for rank in cluster.ranks:
        while rank.forwards:
            cluster.finish_forward(rank)
    cluster.step()


def publish(cluster: Cluster, tokens, *boundaries: int) -> None:
    """Put a prompt in the tree, with states at some boundaries."""
    seq = cluster.open(tokens)
    for num_tokens in boundaries:
        run(cluster, seq, num_tokens)
    run(cluster, seq, len(tokens), keep=False)
    cluster.do("commit", seq, len(tokens))
    cluster.end(seq)
    cluster.settle(6)


def slots(cluster: Cluster) -> dict[int, bool]:
    """Return where nodes end, and whether there is a state."""
    return {
        node.end: node.pages[1] is not None for node in cluster.first.state.tree.nodes()
    }


def match(cluster: Cluster, tokens) -> int:
    return cluster.replica.look.match(pack(tokens))


# What is kept.


def test_a_prefix_is_found_where_a_state_was_kept_and_nowhere_else(cluster):
    publish(cluster, [1] * 12, 4, 8)
    assert slots(cluster) == {2: True, 4: True, 6: False}
    found = [match(cluster, [1] * num_tokens) for num_tokens in range(2, 15)]
    assert found == [0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8]


def test_a_state_stays_at_the_end_of_a_node_that_is_split(cluster):
    publish(cluster, PROMPT, 8)
    publish(cluster, [1, 1, 1, 1, 2, 2], 6)
    assert slots(cluster) == {2: False, 4: True, 3: True}
    assert match(cluster, [*PROMPT, 1]) == 8
    assert match(cluster, [1, 1, 1, 1, 3]) == 0


def test_a_checkpoint_within_a_node_splits_it_there(cluster):
    publish(cluster, PROMPT)
    seq = cluster.open(PROMPT)
    run(cluster, seq, 4)
    run(cluster, seq, 8)
    assert cluster.do("commit", seq, 8) == 8
    assert slots(cluster) == {2: True, 4: True}
    assert not cluster.request(seq).slots.checkpoints


def test_a_state_that_the_tree_has_already_is_given_back(cluster):
    publish(cluster, PROMPT, 8)
    seq = cluster.open(PROMPT)
    run(cluster, seq, 8)
    assert cluster.count(PageState.REQUEST, pool=1) == 2
    cluster.forward([seq])
    cluster.do("commit", seq, 8)
    assert cluster.count(PageState.QUARANTINE, pool=1) == 1
    finish(cluster)
    assert cluster.count(PageState.REQUEST, pool=1) == 1
    assert cluster.count(PageState.TREE, pool=1) == 1


def test_a_node_that_gains_a_state_is_stored_anew(cluster):
    publish(cluster, PROMPT)
    assert {pool for pool, _ in cluster.first.store} == {0}
    publish(cluster, PROMPT, 4)
    assert sum(pool for pool, _ in cluster.first.store) == 1
    assert all(node.stored for node in cluster.first.state.tree.nodes())


def test_a_node_on_its_way_to_the_store_takes_no_state():
    cluster = make()
    seq = cluster.open(PROMPT)
    run(cluster, seq, 8, keep=False)
    cluster.do("commit", seq, 8)
    cluster.agree_ready(cluster.first, *cluster.first.readies)
    cluster.step()
    (offload,) = cluster.first.offloads
    twin = cluster.open(PROMPT)
    run(cluster, twin, 4)
    run(cluster, twin, 8)
    cluster.do("commit", twin, 8)
    assert slots(cluster) == {4: False}
    assert cluster.count(PageState.REQUEST, pool=1) == 2
    cluster.finish_offload(cluster.first, offload, GOOD)
    cluster.step()


def test_what_is_not_committed_yet_keeps_its_checkpoint(cluster):
    seq = cluster.open(PROMPT)
    run(cluster, seq, 4)
    run(cluster, seq, 8)
    cluster.do("commit", seq, 7)
    assert slots(cluster) == {2: True, 3: False}
    assert [*cluster.request(seq).slots.checkpoints] == [4]
    cluster.do("commit", seq, 8)
    assert slots(cluster) == {2: True, 3: False, 4: True}


def test_a_checkpoint_taken_twice_has_one_slot(cluster):
    seq = cluster.open(PROMPT)
    run(cluster, seq, 8)
    run(cluster, seq, 8)
    assert cluster.count(PageState.REQUEST, pool=1) == 2


def test_a_truncate_drops_the_checkpoints_above_it(cluster):
    seq = cluster.open(PROMPT)
    run(cluster, seq, 4)
    run(cluster, seq, 8)
    cluster.do("truncate", seq, 7)
    assert [*cluster.request(seq).slots.checkpoints] == [2]
    assert cluster.count(PageState.REQUEST, pool=1) == 2
    cluster.do("truncate", seq, 4)
    assert [*cluster.request(seq).slots.checkpoints] == [2]


@pytest.mark.parametrize("how", ["abort", "suspend"])
def test_slots_given_back_wait_for_the_forward_that_writes_them(cluster, how):
    seq = cluster.open(PROMPT)
    cluster.do("extend", seq, 8)
    cluster.forward([seq])
    cluster.checkpoint(seq)
    cluster.do(how, seq)
    assert cluster.count(PageState.QUARANTINE, pool=1) == 2
    finish(cluster)
    assert cluster.count(PageState.FREE, pool=1) == 8


def test_a_checkpoint_under_a_forward_is_neither_evicted_nor_read():
    """Guards that the bracket keeps what is published while it is written."""
    cluster = make(3)
    seq = cluster.open(PROMPT)
    run(cluster, seq, 4, keep=False)
    cluster.do("extend", seq, 8)
    cluster.forward([seq])
    cluster.checkpoint(seq)
    cluster.do("commit", seq, 8)
    cluster.do("abort", seq)
    assert not cluster.first.readies
    assert cluster.first.state.evictable(1) == 0
    other = cluster.open([2] * 4)
    cluster.do("extend", other, 4)
    finish(cluster)
    assert cluster.first.state.evictable(1) == 1
    assert cluster.first.readies


def test_after_a_reset_no_state_is_kept(cluster):
    seq = cluster.open(PROMPT)
    run(cluster, seq, 4)
    cluster.do("extend", seq, 8)
    cluster.forward([seq])
    cluster.call("reset")
    assert not cluster.checkpoint(seq)
    finish(cluster)
    cluster.do("commit", seq, 8)
    assert not cluster.request(seq).slots.checkpoints
    assert cluster.count(PageState.TREE, pool=1) == 0


# What begins with them.


def test_a_forward_over_a_hit_begins_with_a_copy_of_its_state(cluster):
    publish(cluster, PROMPT, 8)
    seq = cluster.open([*PROMPT, 2, 2])
    assert cluster.restore(seq) == 8
    (own,) = cluster.request(seq).slots.own
    (leaf,) = (n for n in cluster.first.state.tree.nodes() if n.end == 4)
    cluster.do("extend", seq, 9)
    for expected in ([SlotCopy(1, leaf.pages[1][0], own)], []):
        cluster.forward([seq, seq])
        assert cluster.first.forwards[-1].copies == expected
    cluster.do("abort", seq)
    assert cluster.first.state.evictable(1) == 0
    finish(cluster)


def test_a_state_is_copied_again_after_a_suspend(cluster):
    publish(cluster, PROMPT, 8)
    seq = cluster.open([*PROMPT, 2, 2])
    cluster.restore(seq)
    run(cluster, seq, 10)
    cluster.do("suspend", seq)
    cluster.restore(seq)
    cluster.do("extend", seq, 10)
    cluster.forward([seq])
    assert len(cluster.first.forwards[-1].copies) == 1
    finish(cluster)


def test_a_commit_before_the_state_was_copied_waits_for_the_forward(cluster):
    """Its anchor would move on, and leave the state that it needs to eviction."""
    publish(cluster, PROMPT, 8)
    seq = cluster.open([*PROMPT, 2, 2])
    cluster.restore(seq)
    cluster.do("extend", seq, 10)
    assert cluster.do("commit", seq, 10) == 8
    assert list(cluster.first.state.parked) == [seq]
    cluster.forward([seq])
    assert cluster.request(seq).shared == 5
    finish(cluster)


def test_a_stored_state_is_loaded_with_its_pages(cluster):
    cluster.fill_stores([1] * 8)
    seq = cluster.open([1] * 9)
    cluster.do("restore", seq)
    assert cluster.first.state.promised_slots == 1
    for rank in cluster.ranks:
        cluster.answer_lookup(rank, *rank.lookups)
    cluster.step()
    (plan,) = cluster.first.loads.values()
    assert [(pool, start, len(pages)) for pool, start, pages, _ in plan.pieces] == [
        (0, 0, 4),
        (1, 3, 1),
    ]
    assert cluster.first.state.promised_slots == 0
    with pytest.raises(OrderError, match="state of request 1 is on its way"):
        cluster.forward([seq])
    assert not cluster.first.state.brackets
    cluster.run_restored(seq)
    cluster.do("extend", seq, 9)
    cluster.forward([seq])
    finish(cluster)


def test_a_state_is_loaded_over_resident_pages(cluster):
    publish(cluster, PROMPT)
    cluster.fill_stores(PROMPT[:6])
    seq = cluster.open([*PROMPT, 2])
    cluster.do("restore", seq)
    (asked,) = (a for a in cluster.first.lookups[seq + 1].asks if a.pool == 1)
    assert (asked.start, len(asked.hashes)) == (0, 4)
    for rank in cluster.ranks:
        cluster.answer_lookup(rank, *rank.lookups)
    cluster.step()
    (plan,) = cluster.first.loads.values()
    assert [(pool, start, len(pages)) for pool, start, pages, _ in plan.pieces] == [
        (1, 2, 1)
    ]
    cluster.run_restored(seq)
    assert cluster.request(seq).hit == 3


def test_a_state_that_does_not_come_harms_no_prefix(cluster):
    publish(cluster, PROMPT, 4)
    cluster.fill_stores(PROMPT)
    seq = cluster.open([*PROMPT, 2])
    cluster.do("restore", seq)
    for rank in cluster.ranks:
        cluster.answer_lookup(rank, *rank.lookups)
    cluster.step()
    assert cluster.request(seq).hit == 4
    cluster.first.votes.sink(*cluster.first.loads, 0)
    cluster.step()
    assert cluster.request(seq).hit == 2
    assert slots(cluster) == {2: True, 4: False}
    run(cluster, seq, 9, keep=False)


# Room.


def test_a_request_has_its_slot_from_its_reservation_until_it_ends(cluster):
    seq = cluster.open(PROMPT)
    assert not cluster.request(seq).slots.own
    cluster.do("restore", seq, ask_store=False)
    assert len(cluster.request(seq).slots.own) == 1
    cluster.end(seq)
    cluster.settle()
    cluster.check_rest()


def test_a_restore_waits_for_a_slot_of_its_own_and_one_to_load():
    cluster = make(3)
    cluster.fill_stores(PROMPT)
    first, second = cluster.open([2, 2]), cluster.open(PROMPT)
    cluster.do("extend", first, 2)
    third = cluster.open([3, 3])
    cluster.do("extend", third, 2)
    cluster.do("restore", second)
    assert cluster.request(second).promise == 0
    assert cluster.replica.look.statistics().num_waiting == 1
    cluster.do("abort", first)
    assert cluster.request(second).promise == 4
    assert cluster.replica.look.statistics().promised_slots == 1
    assert cluster.run_restored(second) == 6


def test_a_slot_that_is_promised_is_given_to_nobody():
    """Guards slack: the checkpoint would leave the load without its slot."""
    cluster = make(3)
    cluster.fill_stores(PROMPT)
    seq, other = cluster.open([2] * 4), cluster.open(PROMPT)
    cluster.do("extend", seq, 4)
    cluster.forward([seq])
    cluster.do("restore", other)
    assert not cluster.checkpoint(seq)
    third = cluster.open([3])
    with pytest.raises(OutOfPagesError, match="need a state slot"):
        cluster.do("extend", third, 1)
    finish(cluster)
    assert cluster.run_restored(other) == 6


def test_a_lookup_that_ends_without_a_load_keeps_no_slot():
    cluster = make(2)
    for how in ("answer", "abort", "late"):
        seq = cluster.open(PROMPT)
        cluster.do("restore", seq)
        assert cluster.first.state.promised_slots == 1
        if how == "answer":
            cluster.run_restored(seq)
        elif how == "late":
            cluster.give_up(cluster.first, seq)
            cluster.step()
        if how != "abort":
            assert cluster.first.state.promised_slots == 0
        cluster.do("abort", seq)
        assert cluster.first.state.promised_slots == 0


def test_in_a_pool_of_two_slots_a_hit_is_all_that_is_asked_for():
    """With a third slot it would look further; to wait for one would be for ever."""
    cluster = make(2)
    publish(cluster, PROMPT, 4)
    cluster.fill_stores(PROMPT)
    seq = cluster.open([*PROMPT, 2])
    assert cluster.restore(seq) == 4
    assert not cluster.first.loads
    run(cluster, seq, 9, keep=False)


def test_a_load_may_take_the_slot_of_the_state_that_it_goes_beyond():
    """Guards that only the new end is pinned when slots are taken for it.

    The hit ends where the window does, at two pages, and its state is another's too.
    What is resident ends at four, and its state must go for the one at six.
    """
    layout = layout_of(FULL, state_pool(), window_pool(4))
    sizes = {"kv": 40, "state": 4, "window": 14}
    cluster = Cluster(layout, sizes, requests=4, attach=False)
    first = cluster.open(PROMPT)
    for num_tokens in (4, 8):
        run(cluster, first, num_tokens)
        cluster.do("commit", first, num_tokens)
    cluster.do("abort", first)
    assert slots(cluster) == {2: True, 4: True}
    cluster.do("abort", cluster.open([*PROMPT[:4], 5]))
    evicting = cluster.open([9] * 24)
    cluster.do("extend", evicting, 24)
    cluster.do("abort", evicting)
    cluster.call("attach")
    cluster.fill_stores([1] * 12)
    other = cluster.open([*PROMPT[:4], 5])
    assert cluster.restore(other) == 4
    seq = cluster.open([1] * 13)
    cluster.do("restore", seq)
    assert cluster.request(seq).hit == 2
    assert cluster.first.state.slack(1) == 0
    assert cluster.run_restored(seq) == 12
    assert slots(cluster) == {2: True, 4: False, 6: True}


def test_the_coldest_state_goes_for_a_checkpoint():
    cluster = make(3)
    publish(cluster, [2] * 4, 2)
    publish(cluster, [3] * 4, 2)
    publish(cluster, PROMPT, 8)
    found = [match(cluster, [token] * 9) for token in (1, 2, 3)]
    assert found == [8, 0, 2]


def test_a_shorter_hit_that_would_pin_a_promised_state_is_given_up():
    """Guards the second round of demote, and that pages are not taken for slots."""
    cluster = make(5)
    publish(cluster, PROMPT, 4)
    cluster.fill_stores(PROMPT)
    seq = cluster.open([*PROMPT, 2])
    cluster.do("restore", seq)
    cluster.answer_lookup(cluster.first, *cluster.first.lookups)
    cluster.step()
    (load,) = cluster.first.loads
    assert cluster.request(seq).hit == 4
    others = [cluster.open([number] * 3) for number in (7, 8)]
    cluster.do("extend", others[0], 3)
    cluster.do("restore", others[1])
    assert cluster.first.state.slack(1) == 0
    cluster.first.votes.sink(load, 0)
    cluster.step()
    assert cluster.request(seq).hit == 0
    cluster.settle()


def test_a_state_pool_has_room_for_a_slot_and_what_it_begins_with():
    with pytest.raises(ValueError, match="num_pages of state must be at least 2"):
        Replica(LAYOUT, {"kv": 8, "state": 1}, Bounds())


def test_a_prompt_may_have_more_pages_than_there_are_slots():
    cluster = make(2)
    assert cluster.open([1] * 80) is not None


# Refusals.


def test_a_checkpoint_is_refused_where_it_means_nothing(cluster):
    seq = cluster.open(PROMPT)
    cluster.do("extend", seq, 7)
    with pytest.raises(OrderError, match="outside of a forward"):
        cluster.do("checkpoint", seq, 4)
    cluster.forward([cluster.open([2])])
    with pytest.raises(OrderError, match="outside of a forward"):
        cluster.do("checkpoint", seq, 4)
    cluster.forward([seq])
    cluster.do("extend", seq, 8)
    for bad in (0, -2, 3, 8):
        says = f"checkpoint of {bad} tokens: .* multiple of 2 above the 0 .* to the 7"
        with pytest.raises(ValueError, match=says):
            cluster.do("checkpoint", seq, bad)
    finish(cluster)
    cluster.forward([seq])
    cluster.do("commit", seq, 8)
    with pytest.raises(ValueError, match="above the 8 that are shared"):
        cluster.do("checkpoint", seq, 8)
    assert cluster.count(PageState.REQUEST, pool=1) == 1


def test_a_layout_without_states_has_no_checkpoints():
    cluster = Cluster()
    seq = cluster.open(PROMPT)
    cluster.do("extend", seq, 8)
    cluster.forward([seq])
    with pytest.raises(ValueError, match="the layout has no StatePool"):
        cluster.do("checkpoint", seq, 4)


def test_a_checkpoint_is_folded_into_the_digest(cluster):
    digests = set()
    for num_tokens in (None, 2, 4):
        cluster = make()
        seq = cluster.open(PROMPT)
        cluster.do("extend", seq, 4)
        cluster.forward([seq])
        if num_tokens is not None:
            cluster.call("checkpoint", seq, num_tokens)
        digests.add(cluster.replica.ballot().digest)
    assert len(digests) == 3


# Votes.


@pytest.mark.parametrize(
    ("end", "mask_ints", "offered"),
    [(7, 8, [7, 6, 5, 4, 3, 2, 1]), (23, 8, [20, 16, 12, 8, 4]), (3, 8, [3, 2, 1])],
)
def test_boundaries_on_offer_are_those_where_states_are_kept(end, mask_ints, offered):
    """With a stride from the end on, a model's regular checkpoints would be missed."""
    cluster = make(mask_ints=mask_ints)
    seq = cluster.open([1] * (2 * end + 1))
    cluster.do("restore", seq)
    (share,) = cluster.replica.ballot().shares.values()
    assert list(share.boundaries) == offered


def test_windows_and_states_agree_on_one_boundary(cluster):
    layout = layout_of(state_pool("slow"), window_pool(4), FULL, state_pool("fast"))
    cluster = make(layout=layout, num_ranks=2)
    cluster.fill_stores([1] * 12)
    pages = cluster.learn(pack([1] * 12), None)
    cluster.ranks[0].store -= {(0, pages[5]), (1, pages[4])}
    cluster.ranks[1].store.discard((3, pages[3]))
    seq = cluster.open([1] * 13)
    assert cluster.restore(seq) == 6
    run(cluster, seq, 12)
    cluster.do("commit", seq, 12)
    cluster.end(seq)
    cluster.settle()
    cluster.check_rest()
