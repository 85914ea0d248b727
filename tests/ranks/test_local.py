"""Ranks in one event loop: exact minima, in step, and an end that all see at once."""

from __future__ import annotations

import asyncio
import math
from array import array
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from asyncache.core import AsyncacheError, ClosedError, OrderError, RankError
from asyncache.ranks import LocalGroup
from asyncache.testing import check_group
from asyncache.testing.simulation import run


async def outcome(group, *items):
    vector = array("i", items)
    try:
        await group.all_min(vector)
    except AsyncacheError as error:
        return type(error), str(error)
    return vector.tolist()


async def play(*calls):
    return await asyncio.gather(*(outcome(group, *items) for group, items in calls))


def simulate(scenario):
    """Run in virtual time."""
    run(scenario, dice=None)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_the_kit_passes(num_ranks):
    @asynccontextmanager
    async def make():
        yield LocalGroup.of(num_ranks)

    async def main():
        await check_group(make)

    simulate(main)


def test_a_silent_rank_is_named_once_the_time_is_over():
    async def main():
        groups = LocalGroup.of(3, timeout_s=5.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outcome, groups[0], 1)
            await anyio.sleep(3)
            silent = (RankError, "nothing of ranks [1] within 5.0 s")
            # The first to lose patience speaks for all.
            assert await outcome(groups[2], 2) == silent
        assert anyio.current_time() == 5
        assert await outcome(groups[1], 3) == silent
        assert anyio.current_time() == 5

    simulate(main)


def test_a_loop_that_is_busy_takes_no_minimum_from_anybody():
    async def main():
        first, second = LocalGroup.of(2, timeout_s=5.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take, first)
            await anyio.sleep(1)
            asyncio.get_running_loop().spend(100.0)
            assert await outcome(second, 2) == [1]
        assert taken == [[1]]

    async def take(group):
        taken.append(await outcome(group, 1))

    taken = []
    simulate(main)


async def test_another_length_is_named():
    groups = LocalGroup.of(3)
    uneven = (RankError, "rank 1 sent 2 items, others 1")
    outcomes = await play((groups[0], [1]), (groups[1], [1, 2]))
    assert outcomes == [uneven, uneven]
    assert await outcome(groups[2], 1) == uneven


async def test_who_leaves_ends_its_own_wait_and_the_others():
    groups = LocalGroup.of(3)
    waiting = asyncio.gather(outcome(groups[0], 1), outcome(groups[1], 1))
    await anyio.lowlevel.checkpoint()
    await groups[0].aclose()
    await groups[0].aclose()
    closed = (ClosedError, "rank 0 has left its group")
    over = (RankError, "rank 0 has left")
    assert await waiting == [closed, over]
    assert await play(*((group, [1]) for group in groups)) == [closed, over, over]


async def test_a_rank_that_leaves_after_its_last_minimum_takes_it_from_nobody():
    slow, fast = LocalGroup.of(2)
    waiting = asyncio.create_task(outcome(slow, 3))
    await anyio.lowlevel.checkpoint()
    assert await outcome(fast, 2) == [2]
    await fast.aclose()  # before the slow one has come to its turn
    assert await waiting == [2]


async def test_a_part_is_what_the_vector_held_as_the_call_began():
    victim, other = LocalGroup.of(2)
    vector = array("i", [5])
    with anyio.CancelScope() as scope:
        scope.cancel()
        await victim.all_min(vector)
    vector[0] = 7
    assert await outcome(other, 9) == [5]
    assert vector.tolist() == [7]


async def test_a_rank_may_be_ahead_by_the_calls_that_were_cancelled():
    ahead, behind = LocalGroup.of(2)
    for item in range(3):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await ahead.all_min(array("i", [item]))
    for item in range(3):
        assert await outcome(behind, 9) == [item]
    assert not ahead._table._open


async def test_a_second_call_at_a_time_is_refused_and_the_first_goes_on():
    first, second = LocalGroup.of(2)
    waiting = asyncio.create_task(outcome(first, 1))
    await anyio.lowlevel.checkpoint()
    refused = (OrderError, "rank 0 is still in another call of all_min()")
    assert await outcome(first, 0) == refused
    assert await outcome(second, 2) == await waiting == [1]


async def test_a_rank_in_another_event_loop_is_refused_and_the_first_goes_on():
    first, second = LocalGroup.of(2)
    waiting = asyncio.create_task(outcome(first, 1))
    await anyio.lowlevel.checkpoint()
    refused = (OrderError, "rank 1 calls from another event loop")
    assert await asyncio.to_thread(asyncio.run, outcome(second, 0)) == refused
    assert await outcome(second, 2) == await waiting == [1]


async def test_items_must_be_int32():
    (group,) = LocalGroup.of(1)
    with pytest.raises(ValueError, match="items must be int32, 'i', not 'q'"):
        await group.all_min(array("q", [1]))


@pytest.mark.parametrize("timeout_s", [0, -1, 0.0009, 86_401, math.inf, math.nan])
def test_a_timeout_has_bounds(timeout_s):
    bounds = rf"timeout_s must be in \[0.001, 86400\], not {timeout_s}"
    with pytest.raises(ValueError, match=bounds):
        LocalGroup.of(2, timeout_s=timeout_s)


@pytest.mark.parametrize("num_ranks", [0, -1])
def test_there_is_at_least_one_rank(num_ranks):
    with pytest.raises(ValueError, match=f"at least 1, not {num_ranks}"):
        LocalGroup.of(num_ranks)


async def test_a_group_shows_its_state():
    first, second = LocalGroup.of(2)
    waiting = asyncio.create_task(outcome(first, 1))
    await anyio.lowlevel.checkpoint()
    assert repr(first) == "<LocalGroup 0 of 2, 1 calls, waits>"
    assert repr(second) == "<LocalGroup 1 of 2, 0 calls, idle>"
    await second.aclose()
    await waiting
    assert repr(first) == "<LocalGroup 0 of 2, 1 calls, over: rank 1 has left>"
