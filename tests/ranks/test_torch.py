"""Gloo between ranks of one process: one reduce a round, and an end that comes."""

from __future__ import annotations

import asyncio
import math
import threading
from array import array
from contextlib import asynccontextmanager
from datetime import timedelta

import anyio
import anyio.lowlevel
import pytest
import torch.distributed as dist

from asyncache.core import ClosedError, OrderError, RankError
from asyncache.ranks import TorchGroup
from asyncache.testing import check_group
from tests.ranks.rounds import minimum, play
from tests.test_house import run_alone

# A group that waits this long is not what is tested; a test takes less unless it hangs.
LONG_S, PATIENCE_S, SHORT_S = 60.0, 20.0, 0.5


async def process_groups(num_ranks, timeout_s=LONG_S):
    """Return the ends of one gloo group, which are usually in as many processes."""
    store, limit = dist.HashStore(), timedelta(seconds=timeout_s)

    def meet(rank):
        return dist.ProcessGroupGloo(store, rank, num_ranks, limit)

    meeting = [asyncio.to_thread(meet, rank) for rank in range(num_ranks)]
    return await asyncio.gather(*meeting)


@asynccontextmanager
async def groups(num_ranks, *, timeout_s=LONG_S, kind=lambda end: end):
    ends = await process_groups(num_ranks, timeout_s)
    made = [TorchGroup.adopt(kind(end), timeout_s=timeout_s) for end in ends]
    del ends
    async with asyncio.timeout(PATIENCE_S if timeout_s == LONG_S else None):
        try:
            yield made
        finally:
            await asyncio.gather(*(group.aclose() for group in made))


def kinds(outcomes):
    return [type(outcome) for outcome in outcomes]


class Counted:
    """Counts its reduces."""

    def __init__(self, inner):
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.num_reduces = 0

    def allreduce(self, tensors, options):
        self.num_reduces += 1
        return self.inner.allreduce(tensors, options)


class Held:
    """Two ranks' end whose reduces wait for a gate that no timeout opens."""

    def __init__(self, error=None):
        self.begun, self.go, self.error = threading.Event(), threading.Event(), error

    def rank(self):
        return 0

    def size(self):
        return 2

    def allreduce(self, tensors, options):
        return self

    def wait(self):
        self.begun.set()
        self.go.wait()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    "num_ranks",
    [
        1,
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.slow),
    ],
)
async def test_the_kit_passes(num_ranks):
    await check_group(
        lambda: groups(num_ranks, timeout_s=SHORT_S), patience_s=PATIENCE_S
    )


async def test_a_round_is_one_reduce_and_another_length_costs_one_more():
    async with groups(2, kind=Counted) as made:
        counted = [group._collective._process_group for group in made]
        for num_items, num_reduces in ((3, 2), (3, 1), (0, 2), (0, 1), (5, 2), (5, 1)):
            before = [end.num_reduces for end in counted]
            outcomes = await play(made, [1] * num_items, [2] * num_items)
            assert outcomes == [[1] * num_items] * 2
            after = [end.num_reduces for end in counted]
            assert after == [count + num_reduces for count in before]


async def test_ranks_in_different_rounds_are_refused():
    async with groups(2) as made:
        made[1]._collective._num_rounds = 7
        outcomes = await play(made, [1], [2])
        assert kinds(outcomes) == [RankError] * 2
        assert str(outcomes[0]) == "ranks are in rounds 0 to 7, this one in 0"
        assert str(outcomes[1]) == "ranks are in rounds 0 to 7, this one in 7"


async def test_rounds_are_numbered_beyond_int32():
    async with groups(2) as made:
        for group in made:
            group._collective._num_rounds = 2**31 - 1
        assert await play(made, [1], [2]) == [[1], [1]]
        assert await play(made, [1], [2]) == [[1], [1]]


async def test_who_waits_for_a_rank_that_waits_for_the_lost_one_hears_of_it():
    # In gloo's ring only its neighbours miss the one that leaves.
    async with groups(5) as made:
        waiting = asyncio.create_task(play(made[:4], *[[1]] * 4))
        await anyio.lowlevel.checkpoint()
        await made[4].aclose()
        assert kinds(await waiting) == [RankError] * 4


@pytest.mark.parametrize("num_ranks", [2, 3])
async def test_leaving_after_the_last_minimum_takes_it_from_nobody(num_ranks):
    async def run_and_leave(group):
        outcome = await minimum(group, group.rank)
        await group.aclose()
        return outcome

    for _ in range(10):
        async with groups(num_ranks) as made:
            outcomes = await asyncio.gather(*map(run_and_leave, made))
            assert outcomes == [[0]] * num_ranks


async def test_a_part_is_what_the_vector_held_as_the_call_began():
    async with groups(2) as (victim, other):
        vector = array("i", [5])
        with anyio.CancelScope() as scope:
            scope.cancel()
            await victim.all_min(vector)
        vector[0] = 7
        assert await minimum(other, 9) == [5]
        # Once the thread has done with the round.
        assert await play([victim, other], [1], [2]) == [[1], [1]]
        assert vector.tolist() == [7]


async def test_a_reduce_ends_in_time_whatever_the_process_group_was_made_with():
    ends = await process_groups(2, LONG_S)
    group = TorchGroup.adopt(ends.pop(), timeout_s=SHORT_S)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RankError):
            await minimum(group, 1)
        await group.aclose()


async def test_a_reduce_that_gloo_does_not_end_in_time_is_waited_for_no_longer():
    group, end = held_group(timeout_s=0.001)
    with pytest.raises(RankError, match=r"no minimum within 0\.001 s"):
        await minimum(group, 1)
    with pytest.raises(RankError, match=r"no minimum within 0\.001 s"):
        await minimum(group, 1)
    # It comes late: the others have it, and are to learn that this rank has not.
    end.go.set()
    await asyncio.to_thread(group._workers.executor.submit(int).result)
    assert group._collective._process_group is None
    await group.aclose()


def held_group(*, timeout_s=LONG_S, error=None):
    end = Held(error)
    return TorchGroup.adopt(end, timeout_s=timeout_s), end


async def begin(group, end, *items):
    call = asyncio.create_task(minimum(group, *items))
    await asyncio.to_thread(end.begun.wait)
    return call


async def test_who_leaves_waits_for_its_thread_and_a_call_does_not():
    group, end = held_group()
    call = await begin(group, end, 1)
    leaving = asyncio.create_task(group.aclose())
    with pytest.raises(ClosedError, match="rank 0 has left its group"):
        await call
    with pytest.raises(ClosedError, match="rank 0 has left its group"):
        await minimum(group, 1)
    assert not leaving.done()
    end.go.set()
    await leaving
    await group.aclose()


async def test_leaving_may_be_cancelled_and_comes_about():
    group, end = held_group()
    call = await begin(group, end, 1)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await group.aclose()
    assert scope.cancelled_caught
    with pytest.raises(ClosedError):
        await call
    end.go.set()
    await asyncio.to_thread(group._leaving.result)
    assert group._collective._process_group is None
    await group.aclose()


async def test_parts_of_cancelled_calls_are_sent_before_a_rank_leaves():
    async with groups(2) as (leaver, other):
        for item in range(3):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await leaver.all_min(array("i", [item]))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leaver.aclose)
            await anyio.lowlevel.checkpoint()
            for item in range(3):
                assert await minimum(other, 9) == [item]
            with pytest.raises(RankError):
                await minimum(other, 9)


async def test_a_rank_whose_thread_fails_is_missed_at_once():
    def fail(num_items):
        raise LookupError("a bug")

    async with groups(3) as made:
        made[1]._collective._set_width = fail
        outcomes = await play(made, [1], [2], [3])
        assert kinds(outcomes) == [RankError, LookupError, RankError]


async def test_a_bug_on_the_thread_is_raised_as_it_is_and_ends_the_group():
    group, end = held_group(error=LookupError("a bug"))
    end.go.set()
    with pytest.raises(LookupError, match="a bug"):
        await minimum(group, 1)
    with pytest.raises(RankError, match="a bug"):
        await minimum(group, 1)
    await group.aclose()


async def test_an_error_of_gloo_is_a_rank_error_and_its_cause():
    group, end = held_group(error=RuntimeError("Connection closed. Good luck."))
    end.go.set()
    with pytest.raises(
        RankError, match=r"gone or silent: Connection closed$"
    ) as caught:
        await minimum(group, 1)
    assert caught.value.__cause__ is end.error
    await group.aclose()


async def test_a_call_behind_one_that_fails_fails_with_it():
    group, end = held_group(error=RuntimeError("reset"))
    cancelled = await begin(group, end, 1)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    behind = asyncio.create_task(minimum(group, 2))
    await anyio.lowlevel.checkpoint()
    end.go.set()
    with pytest.raises(RankError, match="gone or silent: reset"):
        await behind
    await group.aclose()


async def test_a_second_call_at_a_time_is_refused_and_the_first_goes_on():
    group, end = held_group()
    call = await begin(group, end, 1)
    with pytest.raises(OrderError, match="rank 0 is still in another call"):
        await minimum(group, 0)
    leaving = asyncio.create_task(group.aclose())
    with pytest.raises(ClosedError):
        await call
    end.go.set()
    await leaving


async def test_a_group_shows_its_state():
    group, end = held_group(error=RuntimeError("reset"))
    assert repr(group) == "<TorchGroup 0 of 2, 0 calls, idle>"
    call = await begin(group, end, 1)
    assert repr(group) == "<TorchGroup 0 of 2, 1 calls, waits>"
    end.go.set()
    with pytest.raises(RankError):
        await call
    assert repr(group).startswith("<TorchGroup 0 of 2, 1 calls, over: a rank is gone")
    await group.aclose()
    assert repr(group) == "<TorchGroup 0 of 2, 1 calls, left>"


async def test_items_must_be_int32():
    async with groups(1) as (group,):
        with pytest.raises(ValueError, match="items must be int32, 'i', not 'q'"):
            await group.all_min(array("q", [1]))


@pytest.mark.parametrize("timeout_s", [0, -1, 0.0009, 86_401, math.inf, math.nan])
@pytest.mark.parametrize(
    "make", [TorchGroup, lambda **kw: TorchGroup.adopt(None, **kw)]
)
def test_a_timeout_has_bounds(make, timeout_s):
    bounds = rf"timeout_s must be in \[0.001, 86400\], not {timeout_s}"
    with pytest.raises(ValueError, match=bounds):
        make(timeout_s=timeout_s)


def test_it_needs_an_initialised_default_group():
    with pytest.raises(OrderError, match=r"call init_process_group\(\) first"):
        TorchGroup()


@pytest.fixture
def default_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize(
    ("ranks", "match"),
    [
        ([0, 0], r"ranks must differ, not \[0, 0\]"),
        ([0, 1], r"ranks must be in \[0, 1\), not \[0, 1\]"),
        ([-1, 0], r"ranks must be in \[0, 1\), not \[-1, 0\]"),
        ([], r"ranks must include this process's own, 0, not \[\]"),
    ],
)
def test_ranks_are_those_of_the_default_group(ranks, match):
    with pytest.raises(ValueError, match=match):
        TorchGroup(ranks)


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("ranks", [None, [0]])
async def test_one_process_is_a_group_as_well(ranks):
    group = TorchGroup(ranks)
    assert (group.rank, group.num_ranks) == (0, 1)
    assert await minimum(group, 7, -7) == [7, -7]
    await group.aclose()


@pytest.mark.usefixtures("default_group")
async def test_a_process_group_of_torchs_that_was_handed_over_is_destroyed():
    theirs = dist.new_group(backend="gloo")
    group = TorchGroup.adopt(theirs)
    assert await minimum(group, 7, -7) == [7, -7]
    await group.aclose()
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(theirs)


@pytest.mark.usefixtures("default_group")
async def test_a_process_group_may_be_destroyed_by_who_made_it_before_we_leave():
    theirs = dist.new_group(backend="gloo")
    group = TorchGroup.adopt(theirs)
    dist.destroy_process_group(theirs)
    await group.aclose()


@pytest.mark.usefixtures("default_group")
def test_the_default_process_group_is_not_taken():
    with pytest.raises(ValueError, match="the default process group cannot be handed"):
        TorchGroup.adopt(dist.group.WORLD)


def test_the_room_can_be_entered_where_there_is_no_torch():
    run_alone("""
import sys
sys.modules["torch"] = None
from asyncache import LocalGroup, TorchGroup
LocalGroup.of(2)
try:
    TorchGroup()
except ImportError:
    pass
else:
    raise SystemExit("where does it have torch from?")
""")
