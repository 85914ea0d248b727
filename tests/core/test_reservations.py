"""Promises never exceed what can be had, so what was promised is there when taken."""

from __future__ import annotations

import pytest

from asyncache.core import InvariantError, OutOfPagesError, PageState
from asyncache.core._slack import page_slack
from tests.core.cluster import FULL, Cluster, layout_of, pack, window_pool

LONG = 16


def prompt(number: int) -> list[int]:
    return [number] * LONG


def test_eight_requests_in_a_pool_of_one_and_a_half_prompts_all_end():
    """Guards the reservation: loads that took pages at once would lock this pool."""
    cluster = Cluster(num_pages=12, num_ranks=2, requests=8)
    for number in range(8):
        cluster.fill_stores(prompt(number))
    seqs = [cluster.open(prompt(number)) for number in range(8)]
    for seq in seqs:
        cluster.do("restore", seq)
    assert cluster.replica.look.statistics().num_waiting == 7
    ended = []
    for _ in range(100):
        for rank in cluster.ranks:
            cluster.work(rank)
        cluster.step()
        for seq in list(cluster.requests):
            request = cluster.request(seq)
            if request.promise and not request.lookup and not request.wait:
                assert cluster.do("extend", seq, LONG) == 1
                cluster.forward([seq])
                cluster.do("commit", seq, LONG)
                cluster.end(seq)
                ended.append(seq)
    assert list(dict.fromkeys(ended)) == seqs
    cluster.settle()
    cluster.check_rest()


def test_a_waiting_restore_holds_no_page_and_no_promise():
    cluster = Cluster(num_pages=12)
    first, second = cluster.open(prompt(1)), cluster.open(prompt(2))
    cluster.do("restore", first)
    cluster.do("restore", second)
    assert cluster.request(second).promise == 0
    assert cluster.replica.look.statistics().promised_pages == 8
    assert cluster.replica.look.statistics().num_waiting == 1


def test_reservations_are_granted_in_sequence_order_though_a_later_one_would_fit():
    cluster = Cluster(num_pages=12)
    seqs = [cluster.open(prompt(1)), cluster.open(prompt(2)), cluster.open([3])]
    for seq in seqs:
        cluster.do("restore", seq)
    assert [cluster.request(seq).promise for seq in seqs] == [8, 0, 0]
    cluster.do("abort", seqs[0])
    assert [cluster.request(seq).promise for seq in seqs[1:]] == [8, 1]


def test_extend_does_not_overtake_a_restore_that_waits():
    cluster = Cluster(num_pages=12)
    first, second, third = cluster.open(prompt(1)), cluster.open(prompt(2)), None
    cluster.do("restore", first)
    cluster.do("restore", second)
    third = cluster.open([3])
    before = cluster.replica.look.dump()
    with pytest.raises(OutOfPagesError, match="need 1 pages, 0 are neither used nor"):
        cluster.do("extend", third, 1)
    assert cluster.replica.look.dump() == before


def test_a_restore_past_its_deadline_is_a_miss_that_waits_no_more():
    cluster = Cluster(num_pages=12, num_ranks=2)
    first, second = cluster.open(prompt(1)), cluster.open(prompt(2))
    cluster.do("restore", first)
    cluster.do("restore", second)
    for rank in cluster.ranks:
        cluster.give_up(rank, second)
    cluster.step()
    assert ("Restored", second, 0) in cluster.first.told
    assert ("Settled", second, 0) in cluster.first.told
    with pytest.raises(OutOfPagesError, match="need 8 pages, 4 are neither used nor"):
        cluster.do("extend", second, 1)


def test_extend_within_a_reservation_never_fails():
    cluster = Cluster(num_pages=12)
    first = cluster.open([1], reserve=15)
    cluster.do("restore", first)
    other = cluster.open([2] * 8)
    cluster.do("extend", other, 8)
    with pytest.raises(OutOfPagesError):
        cluster.do("extend", cluster.open([3]), 1)
    for _ in range(15):
        cluster.do("append", first, pack([1]))
        cluster.do("extend", first, cluster.request(first).num_tokens)
    assert cluster.count(PageState.FREE) == 0
    cluster.do("append", first, pack([1]))
    with pytest.raises(
        OutOfPagesError, match="need 1 pages, 1 of them beyond"
    ) as caught:
        cluster.do("extend", first, 17)
    assert (caught.value.needed, caught.value.available) == (1, 0)


def test_what_is_promised_is_evicted_for_when_it_is_taken():
    cluster = Cluster(num_pages=12, num_ranks=2)
    cluster.serve(prompt(1))
    cluster.serve([2, 2, 2])
    assert cluster.count(PageState.TREE) == 9
    seq = cluster.open(prompt(3))
    assert cluster.do("extend", seq, LONG) == 8
    # No more than is needed goes, and from the end of the coldest prefix.
    assert cluster.count(PageState.FREE) == 0
    assert cluster.replica.look.match(pack(prompt(1))) == 6
    assert cluster.replica.look.match(pack([2, 2, 2])) == 2


def test_a_reservation_counts_what_it_would_pin():
    """The hit is evictable until it is pinned: it must not be counted twice."""
    cluster = Cluster(num_pages=12)
    cluster.serve(prompt(1))
    running = cluster.open([2] * 8)
    cluster.do("extend", running, 8)
    seq = cluster.open([*prompt(1), 5])
    cluster.do("restore", seq)
    assert cluster.request(seq).promise == 0
    cluster.do("abort", running)
    assert cluster.request(seq).promise == 9
    assert cluster.request(seq).hit == 8


def test_promises_of_a_load_that_was_cut_are_taken_back_from_the_youngest():
    """Its pages are in quarantine for as long as its transfer may write them."""
    cluster = Cluster(num_pages=16)
    cluster.fill_stores(prompt(1))
    seqs = [cluster.open([*prompt(1), at]) for at in (1, 2)]
    cluster.do("restore", seqs[0])
    cluster.work(cluster.first)
    cluster.step()
    cluster.do("restore", seqs[1])
    assert [cluster.request(seq).hit for seq in seqs] == [8, 8]
    (load,) = cluster.first.loads
    cluster.first.votes.sink(load, 0)
    cluster.step()
    assert cluster.count(PageState.QUARANTINE) == 8
    assert [cluster.request(seq).hit for seq in seqs] == [0, 0]
    assert [cluster.request(seq).promise for seq in seqs] == [0, 0]
    cluster.finish_load(cluster.first, load)
    cluster.step()
    assert cluster.do("extend", seqs[0], 17) == 9
    cluster.do("suspend", seqs[0])
    assert cluster.do("extend", seqs[1], 17) == 9


def test_a_lookup_whose_promise_was_taken_back_loads_nothing():
    cluster, long = Cluster(num_pages=10), [*range(11)]
    cluster.fill_stores(long)
    first = cluster.open(long[:7])
    cluster.do("restore", first)
    cluster.answer_lookup(cluster.first, *cluster.first.lookups)
    cluster.step()
    [load] = cluster.first.loads
    second = cluster.open(long)  # stands on what the first one loads
    cluster.do("restore", second)
    other = cluster.open([99] * 5)
    cluster.do("restore", other, ask_store=False)
    cluster.first.votes.sink(load, 0)  # and is not quiet: its pages wait
    cluster.step()
    assert (cluster.request(second).promise, cluster.request(other).promise) == (0, 3)
    cluster.do("extend", first, 7)  # and computes what did not come
    cluster.forward([first])
    cluster.finish_forward(cluster.first)
    cluster.step()
    cluster.do("commit", first, 7)
    cluster.answer_lookup(cluster.first, *cluster.first.lookups)
    cluster.step()  # within it, promises are checked
    assert cluster.request(second).hit == 0
    assert list(cluster.first.loads) == [load]
    assert cluster.do("extend", other, 5) == 3


def test_a_shorter_hit_that_would_pin_a_promised_window_is_given_up():
    """Guards the second round of demote: taking promises back is not enough here.

    The window pages of the shorter hit were evictable while the longer hit stood, and
    another request was promised them.
    """
    layout = layout_of(FULL, window_pool(4))
    cluster = Cluster(layout, {"kv": 40, "window": 10}, requests=4, mask_ints=8)
    base = [1] * 8
    cluster.serve([*base, 0])
    cluster.fill_stores([*base, *[2] * 8, 3])
    seq = cluster.open([*base, *[2] * 8, 3])
    cluster.do("restore", seq)
    cluster.work(cluster.first)
    cluster.step()
    (load,) = cluster.first.loads
    assert (cluster.request(seq).hit, cluster.request(seq).remainder) == (8, 1)
    state = cluster.first.state
    other = cluster.open([9] * (2 * page_slack(state)))
    cluster.do("restore", other, ask_store=False)
    assert cluster.request(other).promise
    assert state.slack(1) == 0
    cluster.first.votes.sink(load, 0)
    cluster.step()
    assert cluster.request(seq).hit == 0
    assert cluster.do("extend", other, cluster.request(other).num_tokens) >= 5


def test_a_commit_that_would_pin_promised_pages_waits_for_room():
    cluster = Cluster(num_pages=12, num_ranks=2)
    seq, twin = cluster.open([1] * 8), cluster.open([1] * 8)
    for each in (seq, twin):
        cluster.do("extend", each, 8)
    cluster.forward([seq, twin])
    cluster.do("commit", seq, 8)
    for rank in cluster.ranks:
        cluster.work(rank)
    cluster.end(seq)
    cluster.settle(6)
    other = cluster.open([2] * LONG)
    cluster.do("restore", other)
    assert cluster.request(other).promise == 8
    assert cluster.do("commit", twin, 8) == 0
    assert list(cluster.first.state.parked) == [twin]
    cluster.do("abort", other)
    assert cluster.request(twin).shared == 4
    assert not cluster.first.state.parked


def test_suspend_takes_a_waiting_restore_out_of_the_queue():
    cluster = Cluster(num_pages=12)
    first, second, third = (cluster.open(prompt(number)) for number in (1, 2, 3))
    for seq in (first, second, third):
        cluster.do("restore", seq)
    cluster.do("suspend", second)
    assert cluster.replica.look.statistics().num_waiting == 1
    cluster.do("abort", first)
    assert cluster.request(third).promise == 8


def test_pages_that_were_promised_and_are_not_there_are_a_bug():
    cluster = Cluster(num_pages=4)
    cluster.do("extend", cluster.open([1] * 6), 6)
    with pytest.raises(InvariantError, match="eviction finds what was promised 0"):
        cluster.first.state.take(0, 2, PageState.REQUEST)


def test_a_refused_request_is_asked_again_once_more_of_it_is_known():
    """No count has changed: only what of its prompt the tree is asked for."""
    cluster = Cluster(num_pages=8, attach=False)
    tokens = list(range(13))
    holder = cluster.open(tokens)
    cluster.do("extend", holder, 13)
    cluster.forward([holder])
    cluster.finish_forward(cluster.first)
    cluster.step()
    cluster.do("commit", holder, 13)
    waiting = cluster.open(tokens[:3], reserve=11)
    cluster.do("restore", waiting)
    assert cluster.request(waiting).promise == 0
    cluster.do("append", waiting, pack(tokens[3:]))
    assert cluster.request(waiting).hit == 6


def test_no_restore_is_granted_before_one_that_waits_when_some_room_comes():
    cluster = Cluster(num_pages=12)
    running = [cluster.open([number] * size) for number, size in ((8, 8), (9, LONG))]
    for seq in running:
        cluster.do("extend", seq, cluster.request(seq).num_tokens)
    waiting = [cluster.open(prompt(1)), cluster.open(prompt(2)), cluster.open([3])]
    for seq in waiting:
        cluster.do("restore", seq)
    # Half of what the first needs, and more than the last one does.
    cluster.do("abort", running[0])
    assert cluster.count(PageState.FREE) == 4
    assert [cluster.request(seq).promise for seq in waiting] == [0, 0, 0]
    cluster.do("abort", running[1])
    assert [cluster.request(seq).promise for seq in waiting] == [8, 0, 0]
    cluster.do("abort", waiting[0])
    assert [cluster.request(seq).promise for seq in waiting[1:]] == [8, 1]
