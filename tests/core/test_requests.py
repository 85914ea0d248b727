"""What a request may do when; what it may not do is refused and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from asyncache.core import (
    AsyncacheError,
    Bounds,
    ClosedError,
    InvariantError,
    OrderError,
    OutOfPagesError,
    PageState,
    Replica,
    TooManyRequestsError,
)
from tests.core.cluster import FULL, Cluster, layout_of, pack, window_pool

PROMPT = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(num_ranks=2, requests=3)


@pytest.fixture
def computed(cluster) -> int:
    """A request that has computed and committed its prompt."""
    seq = cluster.open(PROMPT)
    cluster.run(seq)
    return seq


# A life.


def test_a_request_is_restored_computed_committed_and_closed(cluster):
    cluster.fill_stores(PROMPT)
    seq = cluster.open(PROMPT)
    assert cluster.run(seq) == 6
    request = cluster.request(seq)
    assert (request.hit, request.extent, request.shared) == (3, 7, 3)
    assert len(request.tables[0]) == 4
    cluster.end(seq)
    cluster.settle()
    cluster.check_rest()
    assert cluster.first.told[-1] == ("Ended", seq, False)
    assert cluster.replica.look.match(pack([*PROMPT, 8])) == 6


def test_the_last_token_of_a_prompt_is_never_served(cluster, computed):
    assert cluster.replica.look.match(pack([1, 2, 3, 4, 5, 6])) == 4
    assert cluster.replica.look.match(pack([1, 2, 3, 4, 5, 6, 7])) == 6
    assert cluster.replica.look.match(pack([1])) == 0
    assert cluster.replica.look.match(pack(PROMPT), namespace="a") == 0


def test_extend_counts_whole_pages(cluster):
    seq = cluster.open(PROMPT)
    assert [cluster.do("extend", seq, tokens) for tokens in (1, 2, 3, 3, 7)] == [
        1,
        0,
        1,
        0,
        2,
    ]


def test_commit_says_how_many_tokens_are_shared(cluster):
    seq = cluster.open(PROMPT)
    cluster.do("extend", seq, 7)
    cluster.forward([seq])
    assert cluster.do("commit", seq, 1) == 0
    assert cluster.do("commit", seq, 5) == 4
    assert cluster.do("commit", seq, 7) == 6


def test_decoded_tokens_are_appended_extended_and_committed(cluster, computed):
    cluster.do("append", computed, pack([8, 9]))
    assert cluster.do("extend", computed, 9) == 1
    cluster.forward([computed])
    assert cluster.do("commit", computed, 9) == 8
    assert cluster.replica.look.match(pack([*PROMPT, 8, 9])) == 8


def test_truncate_gives_pages_back_to_the_request_that_was_promised_them(cluster):
    seq = cluster.open(PROMPT)
    cluster.do("extend", seq, 7)
    free = cluster.count(PageState.FREE)
    cluster.do("truncate", seq, 3)
    request = cluster.request(seq)
    assert (request.extent, len(request.tables[0]), len(request.spare[0])) == (3, 2, 2)
    assert cluster.count(PageState.FREE) == free
    cluster.do("append", seq, pack([9, 9, 9, 9, 9, 9, 9]))
    assert cluster.do("extend", seq, 10) == 3
    assert not request.spare[0]


def test_truncate_gives_back_what_was_beyond_the_promise(cluster):
    seq = cluster.open([1])
    cluster.do("extend", seq, 1)
    free = cluster.count(PageState.FREE)
    cluster.do("append", seq, pack([1] * 6))
    cluster.do("extend", seq, 7)
    assert cluster.count(PageState.FREE) == free - 3
    cluster.do("truncate", seq, 1)
    assert cluster.count(PageState.FREE) == free


def test_a_duplicate_stays_the_requests_own_until_it_ends(cluster, computed):
    seq = cluster.open(PROMPT)
    cluster.do("extend", seq, 7)
    before = list(cluster.request(seq).tables[0])
    cluster.forward([seq])
    for rank in cluster.ranks:
        cluster.work(rank)
    assert cluster.do("commit", seq, 7) == 6
    assert list(cluster.request(seq).tables[0]) == before
    assert cluster.count(PageState.REQUEST) == 5
    cluster.end(seq)
    cluster.step()
    assert cluster.count(PageState.REQUEST) == 1


def test_suspend_keeps_nothing_but_the_tokens(cluster, computed):
    cluster.settle()
    cluster.do("suspend", computed)
    request = cluster.request(computed)
    assert (request.hit, request.extent, request.shared, request.promise) == (0,) * 4
    assert cluster.count(PageState.REQUEST) == 0
    assert not cluster.first.state.pins
    assert cluster.run(computed) == 6


@pytest.mark.parametrize("while_asked", [True, False])
def test_suspend_ends_a_restore_that_is_open(cluster, while_asked):
    cluster.fill_stores(PROMPT)
    seq = cluster.open(PROMPT)
    cluster.do("restore", seq)
    if not while_asked:
        for rank in cluster.ranks:
            cluster.work(rank)
        cluster.step()
        assert cluster.request(seq).wait is not None
    cluster.do("suspend", seq)
    assert not cluster.first.lookups
    assert cluster.request(seq).lookup is cluster.request(seq).wait is None
    assert cluster.run(seq) == 6


def test_a_restore_after_a_short_one_starts_over(cluster, computed):
    """Guards that a restore forgets the commit of a hit that it gives back."""
    cluster.end(computed)
    cluster.settle()
    seq = cluster.open(PROMPT)
    cluster.do("restore", seq)
    cluster.settle(2)
    assert cluster.do("commit", seq, 6) == 6
    cluster.do("restore", seq)
    assert cluster.request(seq).committed == 0
    cluster.settle(2)
    assert cluster.request(seq).hit == 3
    assert cluster.do("commit", seq, 4) == 6


@pytest.mark.parametrize("what", ["abort", "vote"])
def test_an_abort_gives_everything_back_but_what_was_committed(cluster, computed, what):
    cluster.do("append", computed, pack([8, 9, 10]))
    cluster.do("extend", computed, 10)
    if what == "abort":
        cluster.do("abort", computed)
    else:
        cluster.ranks[1].votes.sink(computed, 0)
        cluster.step()
    assert ("Ended", computed, True) in cluster.first.told
    assert cluster.count(PageState.REQUEST) == 0
    assert cluster.count(PageState.TREE) == 3


def test_a_request_ends_once_its_scope_has_ended_on_every_rank(cluster, computed):
    cluster.ranks[0].votes.quiet(computed)
    cluster.step()
    assert cluster.replica.look.is_open(computed)
    cluster.ranks[1].votes.quiet(computed)
    cluster.step()
    assert not cluster.replica.look.is_open(computed)


def test_only_the_newer_of_two_equal_namespaces_is_asked(cluster, computed):
    statistics = cluster.replica.look.statistics()
    assert statistics.num_requests == 1
    assert statistics.pools["kv"].tree == 3
    assert statistics.pools["kv"].request == 1
    assert sum(getattr(statistics.pools["kv"], s.name.lower()) for s in PageState) == 16


def test_what_is_open_shows_its_number_and_its_claim(cluster):
    assert repr(cluster.request(cluster.open([1]))) == "<Request 1 claim=1>"


# Bad input: refused with value and bound, and nothing changes.


@dataclass
class Case:
    """A state to reach, a call that must fail there, and what it must say."""

    call: str
    args: tuple
    error: type[Exception]
    says: str
    before: tuple[tuple, ...] = ()
    store: bool = False
    kwargs: dict = field(default_factory=dict)


EXTENDED = (("extend", 5),)
SHARED = (*EXTENDED, ("commit", 5))
RESTORING = (("restore",),)
CASES = {
    "extend falls": Case(
        "extend", (4,), ValueError, "extend to 4 .* pages for 5: use truncate", EXTENDED
    ),
    "extend below nothing": Case("extend", (-1,), ValueError, "extend to -1 tokens"),
    "extend beyond what is known": Case(
        "extend", (8,), ValueError, "extend to 8 tokens, but only 7 are known"
    ),
    "extend while a restore is open": Case(
        "extend", (7,), OrderError, "extend while a restore is open", RESTORING, True
    ),
    "commit falls": Case(
        "commit", (4,), ValueError, "commit of 4 tokens falls below the 5", SHARED
    ),
    "commit below nothing": Case("commit", (-1,), ValueError, "commit of -1 tokens"),
    "commit beyond the pages": Case(
        "commit",
        (6,),
        ValueError,
        "commit of 6 tokens, but only 5 have pages",
        EXTENDED,
    ),
    "commit before extend": Case(
        "commit", (1,), ValueError, "commit of 1 tokens, but only 0 have pages"
    ),
    "truncate below what is shared": Case(
        "truncate",
        (3,),
        ValueError,
        "truncate to 3 .* between the 4 .* and the 7",
        SHARED,
    ),
    "truncate to nothing": Case(
        "truncate", (0,), ValueError, "truncate to 0 tokens: .* between the 1"
    ),
    "truncate beyond what is known": Case(
        "truncate", (8,), ValueError, "truncate to 8 .* the 7 that are known"
    ),
    "truncate while a restore is open": Case(
        "truncate", (5,), OrderError, "truncate while a restore", RESTORING, True
    ),
    "restore after extend": Case(
        "restore", (), OrderError, "restore comes before extend.*5 tokens", EXTENDED
    ),
    "restore twice at once": Case(
        "restore", (), OrderError, "restore of this request is open", RESTORING, True
    ),
    "restore of more than the pool": Case(
        "restore",
        (),
        OutOfPagesError,
        "a prompt of 20 pages cannot fit a pool of 16",
        (("append", pack([1] * 33)),),
    ),
    "extend of more than the pool": Case(
        "extend",
        (39,),
        OutOfPagesError,
        "a prompt of 20 pages cannot fit a pool of 16",
        (("append", pack([1] * 32)),),
    ),
    "extend beyond reservation and pool": Case(
        "extend",
        (39,),
        OutOfPagesError,
        "need 17 pages, 16 of them beyond the reservation, 12 are neither",
        (*EXTENDED, ("append", pack([1] * 32))),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_bad_call_is_refused_and_changes_nothing(cluster, case):
    if case.store:
        cluster.fill_stores(PROMPT)
    seq = cluster.open(PROMPT)
    for name, *args in case.before:
        cluster.do(name, seq, *args)
        if name == "extend":
            cluster.forward([seq])
    before = cluster.replica.look.dump()
    with pytest.raises(case.error, match=case.says):
        cluster.do(case.call, seq, *case.args, **case.kwargs)
    assert cluster.replica.look.dump() == before


def test_a_restore_that_waits_for_its_load_cannot_be_restored_again(cluster):
    cluster.fill_stores(PROMPT)
    seq = cluster.open(PROMPT)
    cluster.do("restore", seq)
    for rank in cluster.ranks:
        cluster.work(rank)
    cluster.step()
    before = cluster.replica.look.dump()
    with pytest.raises(OrderError, match="a restore of this request is open already"):
        cluster.do("restore", seq)
    assert cluster.replica.look.dump() == before


@pytest.mark.parametrize(
    ("tokens", "kwargs", "error", "says"),
    [
        ([1] * 33, {}, OutOfPagesError, "of 17 pages cannot fit a pool of 16"),
        ([1], {"num_reserve_tokens": 32}, OutOfPagesError, "of 17 pages cannot fit"),
        ([1], {"num_reserve_tokens": -1}, ValueError, "must be at least 0, not -1"),
        ([1], {"namespace": 7}, TypeError, "a namespace is None, str, bytes"),
        ([1], {"namespace": "\ud800"}, ValueError, "cannot be encoded"),
    ],
)
def test_a_bad_open_is_refused_and_changes_nothing(
    cluster, computed, *, tokens, kwargs, error, says
):
    """Guards that even the clock stands still."""
    before = cluster.replica.look.dump()
    with pytest.raises(error, match=says):
        cluster.replica.calls.open(pack(tokens), **kwargs)
    assert cluster.replica.look.dump() == before


def test_a_refused_open_says_what_it_needed(cluster):
    with pytest.raises(OutOfPagesError) as caught:
        cluster.replica.calls.open(pack([1] * 33))
    assert (caught.value.needed, caught.value.available) == (17, 16)


def test_one_request_too_many_is_refused_and_changes_nothing(cluster):
    for _ in range(3):
        cluster.open([1])
    before = cluster.replica.look.dump()
    with pytest.raises(TooManyRequestsError, match="3 requests are open, as many as"):
        cluster.replica.calls.open(pack([1]))
    assert cluster.replica.look.dump() == before


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("restore", ()),
        ("extend", (7,)),
        ("append", (pack([1]),)),
        ("truncate", (1,)),
        ("commit", (0,)),
        ("suspend", ()),
        ("abort", ()),
    ],
)
def test_a_request_that_has_ended_takes_no_call(cluster, computed, name, args):
    request = cluster.request(computed)
    cluster.do("abort", computed)
    before = cluster.replica.look.dump()
    with pytest.raises(ClosedError, match=f"request {computed} has ended"):
        getattr(cluster.replica.calls, name)(request, *args)
    with pytest.raises(ClosedError, match=f"request {computed} has ended"):
        cluster.replica.calls.forward([request])
    assert cluster.replica.look.dump() == before


@pytest.mark.parametrize(
    ("bounds", "error", "says"),
    [
        ({"requests": 0}, ValueError, "requests must be at least 1, not 0"),
        ({"slots": -2}, ValueError, "slots must be at least 1, not -2"),
        ({"offload_attempts": True}, TypeError, "must be an int, not bool"),
        ({"write_threshold": 1.0}, TypeError, "must be an int, not float"),
        ({"slots": 8, "offloads": 8}, ValueError, "fewer than the 8 slots, not 8"),
    ],
)
def test_bounds_that_cannot_be_are_refused(bounds, error, says):
    with pytest.raises(error, match=says):
        Bounds(**bounds)


def test_a_mask_that_not_every_lookup_gets_a_share_of_is_refused():
    layout = layout_of(FULL, window_pool(2))
    with pytest.raises(ValueError, match=r"at least the 9 requests .* not 8"):
        Replica(layout, {"kv": 8, "window": 8}, Bounds(requests=9, mask_ints=8))


@pytest.mark.parametrize(
    ("num_pages", "error", "says"),
    [
        ({"kv": 0}, ValueError, "num_pages of kv must be at least 1, not 0"),
        ({"kv": 2.5}, TypeError, "num_pages of kv must be an int, not float"),
        ({}, ValueError, "must name the pools .'kv'., not .."),
        ({"kv": 1, "w": 1}, ValueError, "must name the pools .'kv'., not .'kv', 'w'."),
    ],
)
def test_pools_that_cannot_be_are_refused(num_pages, error, says):
    with pytest.raises(error, match=says):
        Replica(layout_of(), num_pages, Bounds())


def test_a_broken_law_is_told_by_the_checks():
    cluster = Cluster()
    seq = cluster.open(PROMPT)
    cluster.request(seq).remainder = 1
    with pytest.raises(InvariantError, match="promises are summed 1 0"):
        cluster.replica.look.check_invariants()
    assert issubclass(InvariantError, AsyncacheError)


def test_a_page_that_two_hold_is_noticed():
    cluster = Cluster(num_pages=8)
    holders = [cluster.open([number] * 3) for number in (1, 2)]
    for seq in holders:
        cluster.do("extend", seq, 3)
    one, two = map(cluster.request, holders)
    two.tables[0][0] = one.tables[0][0]
    with pytest.raises(InvariantError, match="a page is in one place"):
        cluster.replica.look.check_invariants()
