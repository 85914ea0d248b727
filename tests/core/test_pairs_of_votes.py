"""For every pair of votes the verdict is right, in any order of completion.

Each kind of transaction is played with every pair of histories of two ranks: what each
says of it, and before which ballot. The end is compared with what the agenda's table
says of claims and quiet, in a few lines that know nothing of the core. While a rank's
transfer runs it writes into its pages, so that whoever got them too soon would show. In
pipelined mode a ballot is under way while calls are made, and the place of what has
ended goes to another one at once.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from asyncache.core import FAILED, GOOD, PARENT_MISSING, FactKind, PageState
from tests.core.cluster import GARBAGE, Cluster, Rank

NUM_TIMES = 3
PROMPT, OTHER, THIRD = [1] * 9, [2] * 9, [3] * 9
"""Four whole pages each, of two tokens."""


class Vote(NamedTuple):
    """What a rank says at once: a claim or none, and whether it is quiet then."""

    claim: int | None
    quiet: bool


def quietly(claim: int | None = None) -> Vote:
    return Vote(claim, quiet=True)


def still(claim: int) -> Vote:
    return Vote(claim, quiet=False)


History = tuple[Vote, ...]
TRANSFER: list[History] = [
    (quietly(4),),
    (quietly(2),),
    (quietly(0),),
    (still(2), quietly(4)),
    (still(0), quietly()),
    (still(3), quietly(1)),
]
HISTORIES: dict[str, list[History]] = {
    "request": [(), (quietly(),), (still(0),), (still(0), quietly()), (quietly(0),)],
    "lookup": [(quietly(4),), (quietly(2),), (quietly(0),), (quietly(0), quietly(3))],
    "wait": [(), (still(0),), (still(0), still(0))],
    "load": TRANSFER,
    "ready": [(quietly(),), (still(0),), (still(0), quietly()), (quietly(0),)],
    "offload": [
        (quietly(GOOD),),
        (quietly(FAILED),),
        (quietly(PARENT_MISSING),),
        (still(FAILED), quietly(GOOD)),
        (still(FAILED), quietly(PARENT_MISSING)),
    ],
}


class Timed(NamedTuple):
    """A history, and before which ballot each of its votes is cast."""

    votes: History
    times: tuple[int, ...]


def timed(history: History) -> Iterator[Timed]:
    times = itertools.combinations_with_replacement(range(NUM_TIMES), len(history))
    for when in times:
        yield Timed(history, when)


@dataclass
class Play:
    """One transaction on some ranks, and what each of them says of it when."""

    kind: str
    says: list[Timed]
    depth: int
    cluster: Cluster
    seq: int = 0
    request: int = 0
    pages: set[int] = field(default_factory=set)
    expected: int = 4
    cast_at: list[int] = field(default_factory=list)
    queued: int = 0
    """A load that waits for the place of this one."""

    # What the table says.

    def claim(self, until: int) -> int:
        """Return the least that was said before a ballot."""
        claims = [
            vote.claim
            for says in self.says
            for vote, time in zip(says.votes, says.times, strict=True)
            if time <= until and vote.claim is not None
        ]
        return min(claims, default=self.expected)

    def is_quiet(self, until: int, rank: int) -> bool:
        says = self.says[rank]
        return any(
            vote.quiet and time <= until
            for vote, time in zip(says.votes, says.times, strict=True)
        )

    def are_quiet(self, until: int) -> bool:
        return all(self.is_quiet(until, rank) for rank in range(len(self.says)))

    # What is done.

    def vote(self, time: int) -> None:
        """Let each rank say what it says before this ballot; torn copies go on."""
        for number, (rank, says) in enumerate(
            zip(self.cluster.ranks, self.says, strict=True)
        ):
            for vote, when in zip(says.votes, says.times, strict=True):
                if when == time:
                    self.say(rank, vote)
            if self.kind == "load" and not self.is_quiet(time, number):
                for page in self.pages:
                    rank.pages[0][page] = GARBAGE

    def say(self, rank: Rank, vote: Vote) -> None:
        if self.kind == "lookup":
            rank.lookups.pop(self.seq, None)
            rank.votes.answer(self.seq, range(1, (vote.claim or 0) + 1))
        elif self.kind == "load" and vote.quiet:
            self.land(rank, vote)
        else:
            self.vote_plainly(rank, vote)

    def vote_plainly(self, rank: Rank, vote: Vote) -> None:
        if vote.claim is not None:
            rank.votes.sink(self.seq, vote.claim)
        if vote.quiet:
            rank.offloads.pop(self.seq, None)
            rank.readies.pop(self.seq, None)
            rank.votes.quiet(self.seq)

    def land(self, rank: Rank, vote: Vote) -> None:
        """Write what is stored, up to what this rank vouches for."""
        plan = rank.loads.pop(self.seq)
        for _, start, pages, hashes in plan.pieces:
            for index, (page, name) in enumerate(zip(pages, hashes, strict=True)):
                is_good = start + index < plan.start + (vote.claim or 0)
                rank.pages[0][page] = (
                    self.cluster.contents[name] if is_good else GARBAGE
                )
        self.vote_plainly(rank, vote)

    @property
    def is_open(self) -> bool:
        return self.cluster.replica.look.is_open(self.seq)

    def states(self) -> Counter[PageState]:
        """Return how many of its pages are in which state."""
        ledger = self.cluster.first.state.ledgers[0]
        return Counter(ledger.state(page) for page in self.pages)


def begin(kind: str, says: list[Timed], depth: int) -> Play:
    """Bring one transaction of a kind to where ranks vote on it."""
    cluster = Cluster(
        num_ranks=len(says), requests=3, slots=2, offloads=1, offload_attempts=1
    )
    play = Play(kind, says, depth, cluster)
    if kind in {"ready", "offload"}:
        begin_offload(play)
        return play
    for tokens in (PROMPT, OTHER, THIRD):
        cluster.fill_stores(tokens)
    play.request = play.seq = cluster.open(PROMPT)
    if kind != "request":
        cluster.do("restore", play.request)
        play.seq = cluster.request(play.request).lookup.seq
    if kind in {"wait", "load"}:
        begin_load(play)
    return play


def begin_load(play: Play) -> None:
    cluster = play.cluster
    answer_all(cluster)
    request = cluster.request(play.request)
    [load] = request.needs
    play.pages = set(request.tables[0])
    play.seq = request.wait.seq
    if play.kind == "load":
        play.seq = load.seq
        # One more takes the other slot, and the last one has to wait.
        for tokens in (OTHER, THIRD):
            cluster.do("restore", cluster.open(tokens))
        answer_all(cluster)
        [play.queued] = cluster.first.state.agenda.queued


def answer_all(cluster: Cluster) -> None:
    for rank in cluster.ranks:
        for lookup in list(rank.lookups):
            cluster.answer_lookup(rank, lookup)
    cluster.step()


def begin_offload(play: Play) -> None:
    cluster = play.cluster
    seq = cluster.open(PROMPT)
    cluster.do("extend", seq, len(PROMPT))
    cluster.forward([seq])
    for rank in cluster.ranks:
        cluster.finish_forward(rank)
    cluster.do("commit", seq, len(PROMPT))
    play.pages = set(cluster.request(seq).tables[0][:4])
    cluster.do("abort", seq)
    while not cluster.first.readies:
        cluster.step()
    [play.seq] = cluster.first.readies
    if play.kind == "offload":
        for rank in cluster.ranks:
            cluster.agree_ready(rank, play.seq)
        cluster.step()
        [play.seq] = cluster.first.offloads


def check_step(play: Play, until: int) -> None:
    """Compare what is there after a verdict with what was said before its ballot."""
    claim, is_over = play.claim(until), play.are_quiet(until)
    match play.kind:
        case "request":
            assert play.is_open == (claim != 0 and not is_over)
        case "lookup":
            assert play.is_open == (not is_over)
            if is_over:
                request = play.cluster.request(play.request)
                assert request.hit == claim
        case "wait":
            assert play.is_open == (claim != 0)
        case "load":
            check_load(play, claim, is_over=is_over)
        case "ready":
            assert play.is_open == (not is_over and claim != 0)
            assert bool(play.cluster.first.offloads) == (is_over and claim != 0)
        case "offload":
            check_offload(play, claim, is_over=is_over)


def check_load(play: Play, claim: int, *, is_over: bool) -> None:
    request = play.cluster.request(play.request)
    assert request.hit == claim
    assert play.is_open == (not is_over)
    if is_over:
        assert not request.needs
        assert not play.states()[PageState.TRANSIT]
        assert not play.states()[PageState.QUARANTINE]
        assert play.states()[PageState.TREE] == claim
    else:
        # Nobody has a page that some rank's copy may still write.
        assert play.states()[PageState.TRANSIT] == claim
        assert play.states()[PageState.QUARANTINE] == 4 - claim


def check_offload(play: Play, claim: int, *, is_over: bool) -> None:
    assert play.is_open == (not is_over)
    assert set(play.states()) == {PageState.TREE}
    stored = play.cluster.facts(FactKind.STORED)
    assert bool(stored) == (is_over and claim == GOOD)
    # Pinned for as long as any rank reads, whatever has failed by now.
    evictable = play.cluster.first.state.evictable(0)
    assert evictable == (4 if is_over else 0)


def run(play: Play) -> None:
    """Play it to its end, one ballot after the other, ``depth`` of them under way."""
    cluster, successor = play.cluster, None
    for time in range(NUM_TIMES + play.depth):
        play.vote(time)
        cluster.cast()
        play.cast_at.append(time)
        if len(cluster.flight) > play.depth:
            was_open = play.is_open
            cluster.apply()
            check_step(
                play, play.cast_at.pop(0)
            ) if was_open or successor is None else 0
            if was_open and not play.is_open:
                successor = succeed(play)
        if successor is not None:
            check_successor(play, successor)
    while cluster.flight:
        cluster.apply()
        if successor is not None:
            check_successor(play, successor)
    come_to_rest(play)


class Successor(NamedTuple):
    """Who got the place of what has ended, and what it was then."""

    seq: int
    claim: int


def succeed(play: Play) -> Successor | None:
    """Open another of the same kind: it takes the place, with ballots under way."""
    cluster, before = play.cluster, set(play.cluster.first.state.agenda.open)
    if play.kind in {"ready", "offload"}:
        return None
    if play.kind == "load":
        load = cluster.first.state.agenda.open[play.queued]
        assert load.started
        return Successor(load.seq, 4)
    seq = cluster.open(OTHER)
    assert seq is not None
    if play.kind != "request":
        cluster.do("restore", seq)
    opened = cluster.first.state.agenda.open
    [newest] = [opened[s] for s in opened if s not in before][-1:]
    return Successor(newest.seq, newest.claim)


def check_successor(play: Play, successor: Successor) -> None:
    """Nothing that was said of the one before counts for it."""
    found = play.cluster.first.state.agenda.open[successor.seq]
    assert found.claim == successor.claim


def come_to_rest(play: Play) -> None:
    """End all that is open: nothing is left, and replicas are equal at each step."""
    cluster = play.cluster
    for _ in range(12):
        for rank in cluster.ranks:
            cluster.work(rank)
        for seq in cluster.requests:
            cluster.end(seq)
        for rank in cluster.ranks:
            # What gave up and never said so is over by now.
            if play.is_open:
                rank.votes.quiet(play.seq)
        cluster.step()
        if cluster.replica.look.is_idle:
            break
    cluster.check_rest()


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "pipelined"])
@pytest.mark.parametrize("kind", HISTORIES)
def test_for_every_pair_of_votes_the_verdict_is_right(kind, depth):
    histories = [t for history in HISTORIES[kind] for t in timed(history)]
    pairs = list(itertools.product(histories, repeat=2))
    for pair in pairs:
        try:
            run(begin(kind, list(pair), depth))
        except AssertionError as error:
            error.add_note(f"{kind}: {pair}")
            raise


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "pipelined"])
@pytest.mark.parametrize("kind", HISTORIES)
def test_three_ranks_are_no_more_than_pairs(kind, depth):
    histories = [t for history in HISTORIES[kind] for t in timed(history)]
    draw = random.Random(f"{kind} {depth}")
    for _ in range(150):
        says = [draw.choice(histories) for _ in range(3)]
        try:
            run(begin(kind, says, depth))
        except AssertionError as error:
            error.add_note(f"{kind}: {says}")
            raise


def test_a_vote_is_read_in_the_ballot_that_it_was_cast_in_and_no_other():
    """The table itself: a claim that sinks between two ballots sinks in the second."""
    play = begin("load", [Timed((), ())] * 2, 1)
    cluster = play.cluster
    cluster.cast()
    cluster.ranks[1].votes.sink(play.seq, 1)
    cluster.cast()
    cluster.apply()
    assert cluster.request(play.request).hit == 4
    cluster.apply()
    assert cluster.request(play.request).hit == 1
