"""The harnesses break a scenario at each of its steps, and say where."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from asyncache.testing import (
    CancelStyle,
    FailPoint,
    InjectedError,
    cancel_nth,
    fail_nth,
)


@asynccontextmanager
async def fresh_list():
    yield []


async def accept(state):
    pass


async def three_steps(state):
    for step in range(3):
        state.append(step)
        await anyio.lowlevel.checkpoint()
    state.append("done")


@pytest.mark.parametrize("style", CancelStyle)
async def test_each_suspension_is_cancelled_once_and_the_last_run_gets_through(style):
    left = []

    async def check(state):
        left.append(list(state))

    async def scenario(state):
        for step in range(3):
            state.append(step)
            await asyncio.sleep(0)
        state.append("done")

    num = await cancel_nth(scenario, fresh=fresh_list, check=check, styles=[style])
    assert num == 3
    assert left == [[0], [0, 1], [0, 1, 2], [0, 1, 2, "done"]]


async def test_a_scenario_that_never_suspends_runs_once_a_style():
    runs = []

    async def scenario(state):
        runs.append(state)

    assert await cancel_nth(scenario, fresh=fresh_list, check=accept) == 0
    assert len(runs) == len(CancelStyle)


async def test_level_cancellation_stops_each_later_await_and_edge_only_one():
    async def scenario(state):
        try:
            await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            state.append("cleaned up")

    cleaned = {}
    for style in (CancelStyle.LEVEL, CancelStyle.EDGE):
        left = []

        async def check(state, left=left):
            left.append(list(state))

        await cancel_nth(scenario, fresh=fresh_list, check=check, styles=[style])
        cleaned[style] = bool(left[0])
    assert cleaned == {CancelStyle.LEVEL: False, CancelStyle.EDGE: True}


async def test_a_shield_holds_level_cancellation_and_not_the_edge():
    async def scenario(state):
        with anyio.CancelScope(shield=True):
            await asyncio.sleep(0)
            state.append("past the shield")
        await asyncio.sleep(0)

    async def first_run(style):
        left = []

        async def check(state):
            left.append(list(state))

        await cancel_nth(scenario, fresh=fresh_list, check=check, styles=[style])
        return left[0]

    assert await first_run(CancelStyle.LEVEL) == ["past the shield"]
    assert await first_run(CancelStyle.EDGE) == []


async def test_a_late_edge_comes_when_the_answer_is_there():
    """The naive taker loses what was handed over; a plain edge does not show it."""

    async def scenario(state):
        answer = asyncio.get_running_loop().create_future()

        def hand_over():
            if not answer.done():
                answer.set_result(None)
                state.append("handed over")

        asyncio.get_running_loop().call_soon(hand_over)
        await answer
        state.append("taken")

    async def check(state):
        assert state in ([], ["handed over", "taken"]), "the answer is lost"

    edge = [CancelStyle.LEVEL, CancelStyle.EDGE]
    await cancel_nth(scenario, fresh=fresh_list, check=check, styles=edge)
    with pytest.raises(AssertionError, match="the answer is lost") as caught:
        await cancel_nth(scenario, fresh=fresh_list, check=check)
    assert caught.value.__notes__ == ["cancelled at suspension 1, LATE_EDGE"]


async def test_what_a_scenario_awaits_comes_back_to_it():
    async def scenario(state):
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.lowlevel.checkpoint)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anyio.sleep_forever()
        state.append(await anyio.to_thread.run_sync(lambda: 7))

    async def check(state):
        assert state in ([], [7])

    assert await cancel_nth(scenario, fresh=fresh_list, check=check) >= 3


async def test_a_swallowed_edge_is_an_error():
    async def scenario(state):
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            state.append("what cancellation?")

    with pytest.raises(AssertionError, match="swallowed"):
        await cancel_nth(
            scenario, fresh=fresh_list, check=accept, styles=[CancelStyle.EDGE]
        )
    assert asyncio.current_task().cancelling() == 0


async def test_another_error_in_a_cancelled_run_leaves_no_cancellation_behind():
    async def scenario(state):
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise ValueError("made worse") from None

    with pytest.raises(ValueError, match="made worse") as caught:
        await cancel_nth(
            scenario, fresh=fresh_list, check=accept, styles=[CancelStyle.EDGE]
        )
    assert caught.value.__notes__ == ["cancelled at suspension 1, EDGE"]
    assert asyncio.current_task().cancelling() == 0


async def test_a_scenario_that_is_never_done_is_an_error():
    async def scenario(state):
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(AssertionError, match="still suspends after 5 runs, LEVEL"):
        await cancel_nth(scenario, fresh=fresh_list, check=accept, max_runs=5)


async def test_a_cancellation_from_outside_goes_through():
    async def scenario(state):
        await asyncio.sleep(0)
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    task = asyncio.current_task()
    with pytest.raises(asyncio.CancelledError):
        await cancel_nth(scenario, fresh=fresh_list, check=accept)
    assert task.uncancel() == 0


async def test_the_state_is_taken_down_after_the_check():
    order = []

    @asynccontextmanager
    async def fresh():
        order.append("made")
        yield []
        order.append("taken down")

    async def check(state):
        order.append("checked")

    await cancel_nth(three_steps, fresh=fresh, check=check, styles=[CancelStyle.EDGE])
    assert order == ["made", "checked", "taken down"] * 4


@asynccontextmanager
async def fresh_point(point):
    yield point


async def test_each_call_fails_once_and_the_last_run_gets_through():
    calls = []

    async def scenario(point):
        for call in range(3):
            calls.append(call)
            point.hit()

    assert await fail_nth(scenario, fresh=fresh_point, check=accept) == 3
    assert calls == [0, 0, 1, 0, 1, 2, 0, 1, 2]


async def test_a_fake_may_fail_by_its_answer():
    answers = []

    async def scenario(point):
        answers.append(point.trips())

    assert await fail_nth(scenario, fresh=fresh_point, check=accept) == 1
    assert answers == [True, False]


async def test_an_error_of_the_scenarios_own_says_which_call_had_failed():
    async def scenario(point):
        try:
            point.hit()
        except KeyError:
            raise ValueError("made worse") from None

    with pytest.raises(ValueError, match="made worse") as caught:
        await fail_nth(scenario, fresh=fresh_point, check=accept, error=KeyError)
    assert caught.value.__notes__ == ["call 1 failed"]


async def test_an_error_without_a_failure_goes_through():
    async def scenario(point):
        raise InjectedError

    with pytest.raises(InjectedError):
        await fail_nth(scenario, fresh=fresh_point, check=accept)


async def test_a_scenario_that_retries_for_ever_is_an_error():
    async def scenario(point):
        while not point.has_failed:
            point.trips()

    with pytest.raises(AssertionError, match="more calls after 4 runs"):
        await fail_nth(scenario, fresh=fresh_point, check=accept, max_runs=4)


def test_calls_are_counted_from_one():
    with pytest.raises(ValueError, match="nth must be at least 1, not 0"):
        FailPoint(0)
