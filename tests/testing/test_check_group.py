"""The kit passes groups that keep the contract, and finds what is wrong with others."""

from __future__ import annotations

import math
import random
from array import array
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.lowlevel
import pytest

from asyncache.core import RankError
from asyncache.ranks import Group, SoloGroup
from asyncache.testing._check_group import check_group
from asyncache.testing.simulation import SimulatedNetwork, run


def groups(num_ranks, kind=None, *, seed=0, silence_s=5.0, **options):
    """Return a maker of simulated groups, each wrapped in one that is broken."""

    @asynccontextmanager
    async def make():
        network = SimulatedNetwork(
            num_ranks, dice=random.Random(seed), silence_s=silence_s, **options
        )
        ranks = [network.group(rank) for rank in range(num_ranks)]
        shared = {}
        yield [kind(rank, network, shared) for rank in ranks] if kind else ranks

    return make


class Broken(Group):
    """A group that keeps the contract but for what a subclass overrides."""

    def __init__(self, inner, network, shared):
        self.inner, self.network, self.shared = inner, network, shared
        self.rank, self.num_ranks = inner.rank, inner.num_ranks

    async def all_min(self, vector):
        await self.inner.all_min(vector)

    async def aclose(self):
        await self.inner.aclose()


class CountsRanksFromOne(Broken):
    def __init__(self, *args):
        super().__init__(*args)
        self.rank += 1


class TakesTheMaximum(Broken):
    async def all_min(self, vector):
        flipped = array("i", [~item for item in vector])
        await self.inner.all_min(flipped)
        vector[:] = array("i", [~item for item in flipped])


class ReplacesTheList(Broken):
    async def all_min(self, vector):
        vector = array("i", vector)
        await self.inner.all_min(vector)


class TakesNoEmptyVector(Broken):
    async def all_min(self, vector):
        if len(vector):
            await self.inner.all_min(vector)
        else:
            raise RankError("nothing to reduce")


class TruncatesToInt16(Broken):
    async def all_min(self, vector):
        await self.inner.all_min(vector)
        vector[:] = array("i", [max(item, -(2**31) + 1) for item in vector])


class MixesRounds(Broken):
    """What a rank said last is taken for what it said in this round."""

    num_calls = 0

    async def all_min(self, vector):
        self.num_calls += 1
        self.shared[self.rank] = (self.num_calls, array("i", vector))
        while not self.are_all_here():  # noqa: ASYNC110 - crude on purpose
            await anyio.sleep(0.01)
        parts = [part for _, part in self.shared.values()]
        vector[:] = array("i", map(min, *parts))

    def are_all_here(self):
        calls = [num_calls for num_calls, _ in self.shared.values()]
        return len(calls) == self.num_ranks and min(calls) >= self.num_calls


class LeavesInAHurry(Broken):
    async def aclose(self):
        self.network.kill(self.rank)


class CannotBeClosedTwice(Broken):
    async def aclose(self):
        assert not self.shared.setdefault(self.rank, False), "closed twice"
        self.shared[self.rank] = True
        await self.inner.aclose()


class HangsOnUnequalLengths(Broken):
    async def all_min(self, vector):
        try:
            await self.inner.all_min(vector)
        except RankError:
            await anyio.sleep_forever()


class SwallowsTheEnd(Broken):
    async def all_min(self, vector):
        with suppress(RankError):
            await self.inner.all_min(vector)


class IgnoresAclose(Broken):
    async def aclose(self):
        pass


class ForgetsThatItIsOver(Broken):
    is_over = False

    async def all_min(self, vector):
        if not self.is_over:
            self.is_over = True
            await self.inner.all_min(vector)
            self.is_over = False


class SendsLate(Broken):
    """A call that is cancelled at first takes no part, and the next is taken for it."""

    async def all_min(self, vector):
        await anyio.lowlevel.checkpoint()
        await self.inner.all_min(vector)


class LeavesHalfAMinimum(Broken):
    async def all_min(self, vector):
        minimum = array("i", vector)
        vector[:1] = array("i", vector[:1] and [0])
        await self.inner.all_min(minimum)
        vector[:] = minimum


class WritesOnceTheCallIsOver(Broken):
    """As a thread does whose caller was cancelled."""

    async def all_min(self, vector):
        late = self.shared.pop(self.rank, None)
        if late is not None:
            late[:] = array("i", len(late) * [0])
        self.shared[self.rank] = vector
        await self.inner.all_min(vector)
        del self.shared[self.rank]


def check(make, **options):
    async def main():
        await check_group(make, **options)

    run(main, dice=None)


async def test_a_solo_group_passes():
    @asynccontextmanager
    async def make():
        yield [SoloGroup()]

    await check_group(make)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_simulated_group_passes(num_ranks, seed):
    check(groups(num_ranks, seed=seed))


@pytest.mark.parametrize("delay_s", [(0, 0), (0, 0.001), (0.5, 2.0)])
def test_it_passes_at_any_speed(delay_s):
    check(groups(3, delay_s=delay_s))


def test_a_wrapper_that_breaks_nothing_passes():
    check(groups(2, Broken))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("broken", "match", "note"),
    [
        (CountsRanksFromOne, "rank 0 says that it is 1", "ranks are numbered"),
        (TakesTheMaximum, "the minimum is", "the minimum is put in place"),
        (ReplacesTheList, "the minimum is", "the minimum is put in place"),
        (TruncatesToInt16, "the minimum is", "items may be any int32"),
        (TakesNoEmptyVector, "nothing to reduce", "vectors may have any length"),
        (MixesRounds, "the minimum is", "rounds do not mix"),
        (LeavesInAHurry, "is dead", "leaving takes a round from nobody"),
        (CannotBeClosedTwice, "closed twice", "closing twice is harmless"),
        (HangsOnUnequalLengths, "a call waits for 60.0 s", "unequal lengths end"),
        (SwallowsTheEnd, "RankError is due", "unequal lengths end the group"),
        (ForgetsThatItIsOver, "RankError is due", "unequal lengths end the group"),
        (SendsLate, "not ", "cancelled"),
        (LeavesHalfAMinimum, "not ", "cancelled"),
        (WritesOnceTheCallIsOver, "not ", "cancelled"),
    ],
)
def test_a_broken_group_is_found(broken, match, note, num_ranks):
    # Dice by which a hurried farewell does overtake a minimum.
    make = groups(num_ranks, broken, seed=9)
    with pytest.raises(AssertionError, match=match) as caught:
        check(make)
    assert any(note in said for said in caught.value.__notes__)


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        (IgnoresAclose, "a rank that leaves ends the group, rank 0 of 2"),
        (None, "a rank that never calls ends the group, rank 0 of 2"),
    ],
)
def test_who_waits_for_ever_is_found(kind, note):
    with pytest.raises(AssertionError, match="a call waits for 7 s") as caught:
        check(groups(2, kind, silence_s=math.inf), patience_s=7)
    assert note in caught.value.__notes__


@pytest.mark.parametrize("broken", [TakesTheMaximum, LeavesInAHurry])
def test_one_rank_is_its_own_minimum_and_maximum(broken):
    check(groups(1, broken))
