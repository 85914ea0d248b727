"""One vector a step: its shape never changes, and a vote counts for its holder only."""

from __future__ import annotations

from array import array

import pytest

from asyncache.core import RankError, Votes
from asyncache.core._votes import HEADER_INTS, NOTHING, PROTOCOL
from tests.core.cluster import FULL, Cluster, layout_of, pack, window_pool

WINDOW = layout_of(FULL, window_pool(2))


def test_an_idle_ballot_is_a_header_and_empty_places():
    cluster = Cluster(requests=3, slots=2, offloads=1)
    ballot = cluster.replica.ballot()
    vector = Votes().fill(ballot)
    assert list(vector[:HEADER_INTS]) == [PROTOCOL, ballot.digest, -ballot.digest, 0, 1]
    assert list(vector[HEADER_INTS:]) == [NOTHING, 0] * 8
    assert 0 <= ballot.digest <= 2**31 - 1


@pytest.mark.parametrize("mask_ints", [7, 8])
def test_the_shape_is_the_same_whatever_is_open(mask_ints):
    cluster = Cluster(
        WINDOW, requests=3, slots=2, offloads=1, mask_ints=mask_ints, num_ranks=2
    )
    shapes = {cluster.replica.ballot().num_ints}
    for tokens in ([1] * 9, [2] * 9, [3] * 9):
        cluster.do("restore", cluster.open(tokens))
        shapes.add(cluster.replica.ballot().num_ints)
        shapes.add(len(Votes().fill(cluster.replica.ballot())))
    assert shapes == {HEADER_INTS + 2 * 8 + mask_ints}


def test_a_layout_without_windows_needs_no_mask():
    cluster = Cluster(requests=3, slots=2, offloads=1, mask_ints=1)
    cluster.do("restore", cluster.open([1] * 9))
    assert cluster.replica.ballot().num_ints == HEADER_INTS + 2 * 8
    assert not cluster.replica.ballot().shares


def test_a_request_its_restore_and_transfers_have_places_of_their_own():
    cluster = Cluster(requests=3, slots=2, offloads=1)
    cluster.fill_stores([1] * 9)
    seq = cluster.open([1] * 9)
    cluster.do("restore", seq)
    cluster.answer_lookup(cluster.first, cluster.request(seq).lookup.seq)
    cluster.step()
    table = cluster.replica.ballot().table
    assert [(type(t).__name__, t.place) for _, t in sorted(table.items())] == [
        ("Request", 0),
        ("Load", 6),
        ("Wait", 3),
    ]


def test_claims_sink_and_quiet_rises_whatever_is_said_later():
    cluster = Cluster(requests=2)
    seq = cluster.open([1, 2])
    votes = Votes()
    at = HEADER_INTS + 2 * cluster.request(seq).place
    ballot = cluster.replica.ballot()
    # What was never said lowers no minimum.
    assert list(votes.fill(ballot)[at : at + 2]) == [NOTHING, 0]
    votes.sink(seq, 0)
    votes.sink(seq, 1)
    votes.quiet(seq)
    assert list(votes.fill(ballot)[at : at + 2]) == [0, 1]
    assert votes.said() == {seq}
    votes.forget(seq)
    assert votes.said() == set()
    assert list(votes.fill(ballot)[at : at + 2]) == [NOTHING, 0]


def test_an_answer_after_the_deadline_raises_no_vote():
    cluster = Cluster(WINDOW, requests=2, mask_ints=8)
    seq = cluster.open([1] * 9)
    cluster.do("restore", seq)
    lookup = cluster.request(seq).lookup
    votes = Votes()
    votes.answer(lookup.seq, ())
    votes.answer(lookup.seq, [1, 2, 3])
    ballot = cluster.replica.ballot()
    share = ballot.shares[lookup.seq]
    vector = votes.fill(ballot)
    assert not any(vector[share.offset : share.offset + len(share.boundaries)])
    assert vector[HEADER_INTS + 2 * lookup.place] == 0


def test_lookups_share_the_mask_at_the_smallest_stride_that_fits():
    cluster = Cluster(WINDOW, num_pages=64, requests=2, mask_ints=9)
    seqs = [cluster.open([token] * 31) for token in (1, 2)]
    cluster.do("restore", seqs[0])
    shares = list(cluster.replica.ballot().shares.values())
    assert [list(share.boundaries) for share in shares] == [[15, 13, 11, 9, 7, 5, 3, 1]]
    cluster.do("restore", seqs[1])
    shares = list(cluster.replica.ballot().shares.values())
    assert [list(share.boundaries) for share in shares] == [
        [15, 11, 7, 3],
        [15, 12, 9, 6, 3],
    ]
    offsets = [share.offset for share in shares]
    assert offsets[1] == offsets[0] + 4
    assert offsets[1] + 5 <= cluster.replica.ballot().num_ints


def test_ranks_agree_on_the_longest_boundary_that_is_legal_on_all_of_them():
    """The minimum of their longest, 4 here, is legal on one of them only."""
    cluster = Cluster(WINDOW, num_ranks=2, requests=2, mask_ints=8)
    seq = cluster.open([1] * 9)
    cluster.do("restore", seq)
    lookup = cluster.request(seq).lookup.seq
    for rank, boundaries in zip(cluster.ranks, ([1, 2, 4], [2, 3]), strict=True):
        del rank.lookups[lookup]
        rank.votes.answer(lookup, boundaries)
    cluster.step()
    assert cluster.request(seq).hit == 2


def test_ranks_that_share_no_boundary_restore_nothing():
    cluster = Cluster(WINDOW, num_ranks=2, requests=2, mask_ints=8)
    seq = cluster.open([1] * 9)
    cluster.do("restore", seq)
    lookup = cluster.request(seq).lookup.seq
    for rank, boundaries in zip(cluster.ranks, ([1, 4], [2, 3]), strict=True):
        rank.votes.answer(lookup, boundaries)
    cluster.step()
    assert cluster.request(seq).hit == 0
    assert ("Settled", seq, 0) in cluster.first.told


def test_a_vote_counts_for_who_held_the_place_when_it_was_cast():
    """Two ballots are under way, and the request that they would abort is gone.

    Guards that a verdict is read through its own ballot's table: by place, the second
    verdict would abort a stranger.
    """
    cluster = Cluster(num_ranks=2, requests=1)
    old = cluster.open([1, 2])
    cluster.ranks[1].votes.sink(old, 0)
    cluster.cast()
    cluster.cast()
    cluster.apply()
    assert not cluster.replica.look.is_open(old)
    new = cluster.open([3, 4])
    assert cluster.request(new).place == 0
    cluster.apply()
    assert cluster.replica.look.is_open(new)
    cluster.step()
    assert cluster.replica.look.is_open(new)


def test_a_load_that_takes_a_place_under_way_is_not_landed_by_an_old_vote():
    cluster = Cluster(requests=2, slots=2, offloads=1, num_ranks=2)
    for token in (1, 2):
        cluster.fill_stores([token] * 5)
    seqs = [cluster.open([token] * 5) for token in (1, 2)]
    cluster.do("restore", seqs[0])
    for rank in cluster.ranks:
        cluster.work(rank)
    cluster.step()
    load = next(iter(cluster.first.loads))
    place = cluster.request(seqs[0]).needs
    place = next(iter(place)).place
    for rank in cluster.ranks:
        cluster.finish_load(rank, load)
    cluster.cast()
    cluster.cast()
    cluster.apply()
    cluster.do("restore", seqs[1])
    for rank in cluster.ranks:
        cluster.work(rank)
    cluster.cast()
    cluster.apply()
    cluster.apply()
    (second,) = cluster.request(seqs[1]).needs
    assert second.place == place
    assert cluster.replica.look.is_open(second.seq)
    cluster.step()
    assert cluster.replica.look.is_open(second.seq)


def vote(cluster: Cluster, at: int, value: int) -> array[int]:
    ballot = cluster.replica.ballot()
    vector = cluster.first.votes.fill(ballot)
    vector[at] = value
    return vector


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, 0, "a rank speaks protocol 0, this one 1"),
        (1, 0, "ranks differ: digests from 0 to"),
    ],
)
def test_a_verdict_of_ranks_that_differ_changes_nothing(at, value, says):
    cluster = Cluster()
    cluster.open([1, 2])
    before = cluster.replica.look.dump()
    with pytest.raises(RankError, match=says):
        cluster.replica.apply(cluster.replica.ballot(), vote(cluster, at, value))
    assert cluster.replica.look.dump() == before


def test_a_rank_that_gives_up_what_all_are_at_is_told_of_and_changes_nothing():
    cluster = Cluster()
    cluster.open([1, 2])
    replica = cluster.replica
    assert replica.apply(replica.ballot(), vote(cluster, 4, 1))
    assert not replica.apply(replica.ballot(), vote(cluster, 4, 0))
    assert replica.apply(replica.ballot(), vote(cluster, 4, 1))


CALLS = {
    "open other tokens": lambda c, s: c.open([1, 2, 9]),
    "open in a namespace": lambda c, s: c.open([1, 2, 3], "a"),
    "open with a reserve": lambda c, s: c.open([1, 2, 3], reserve=1),
    "restore": lambda c, s: c.do("restore", s),
    "restore without the store": lambda c, s: c.do("restore", s, ask_store=False),
    "extend": lambda c, s: c.do("extend", s, 2),
    "extend further": lambda c, s: c.do("extend", s, 3),
    "append": lambda c, s: c.do("append", s, pack([1])),
    "append another token": lambda c, s: c.do("append", s, pack([2])),
    "truncate": lambda c, s: c.do("truncate", s, 2),
    "truncate further": lambda c, s: c.do("truncate", s, 1),
    "commit": lambda c, s: c.do("commit", s, 0),
    "suspend": lambda c, s: c.do("suspend", s),
    "abort": lambda c, s: c.do("abort", s),
    "forward": lambda c, s: c.forward([s]),
    "forward of nothing": lambda c, s: c.forward([]),
    "attach": lambda c, s: c.call("attach"),
    "no call": lambda c, s: None,
}


def test_every_call_and_every_argument_is_folded_into_the_digest():
    digests = {}
    for name, call in CALLS.items():
        cluster = Cluster()
        seq = cluster.open([1, 2, 3])
        call(cluster, seq)
        digests.setdefault(cluster.replica.ballot().digest, []).append(name)
    assert [names for names in digests.values() if len(names) > 1] == []


def test_every_verdict_is_folded_into_the_digest():
    digests = set()
    for num_steps in range(3):
        cluster = Cluster()
        cluster.open([1, 2, 3])
        for _ in range(num_steps):
            cluster.step()
        digests.add(cluster.replica.ballot().digest)
    assert len(digests) == 3


def test_replicas_whose_pages_differ_have_other_digests():
    """Guards the fold of page counts: the calls and verdicts here are the same."""
    one, other = Cluster(num_pages=8), Cluster(num_pages=9)
    for cluster in (one, other):
        cluster.open([1, 2, 3])
    assert one.replica.ballot().digest != other.replica.ballot().digest


def test_a_claim_that_sinks_ends_nothing_before_all_are_quiet():
    cluster = Cluster(num_ranks=2)
    seq = cluster.open([1] * 9)
    cluster.do("restore", seq)
    lookup = cluster.request(seq).lookup.seq
    cluster.ranks[0].votes.sink(lookup, 2)
    cluster.step()
    assert cluster.request(seq).lookup is not None
    cluster.ranks[0].votes.quiet(seq)
    cluster.step()
    assert cluster.replica.look.is_open(seq)


def test_what_is_said_of_a_transaction_that_is_not_in_the_ballot_is_kept():
    cluster = Cluster(requests=2)
    votes, ballot = Votes(), cluster.replica.ballot()
    seq = cluster.open([1, 2])
    votes.sink(seq, 0)
    votes.quiet(seq)
    assert list(votes.fill(ballot)[HEADER_INTS:]) == [NOTHING, 0] * (
        (ballot.num_ints - HEADER_INTS) // 2
    )
    at = HEADER_INTS + 2 * cluster.request(seq).place
    assert list(votes.fill(cluster.replica.ballot())[at : at + 2]) == [0, 1]


def test_forwards_alone_can_wait_for_a_verdict_but_not_for_ever():
    """Guards decodes that cost no minimum, and that their brackets do not pile up."""
    cluster = Cluster(num_pages=8, aborts_by_call=True)
    seq, look = cluster.open([1] * 9), cluster.replica.look
    cluster.do("extend", seq, 9)
    for _ in range(63):
        cluster.forward([seq])
        assert not look.needs_verdict
    cluster.forward([seq])
    assert look.needs_verdict
    while cluster.first.forwards:
        cluster.finish_forward(cluster.first)
    cluster.step()
    assert not look.needs_verdict
