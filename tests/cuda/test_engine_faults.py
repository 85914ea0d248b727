"""Whatever the driver does to a copy: nothing is left, and no page is wrong."""

from __future__ import annotations

import itertools

import anyio
import pytest

from asyncache.core import DeviceError
from asyncache.testing._nth import noting
from tests.cuda.rig import Injection, Shelf, on_gpu
from tests.engine.scenarios import SCENARIOS
from tests.engine.stage import (
    PLAIN,
    Scenario,
    Stage,
    check_left,
    check_shared,
    check_stored,
)

MAX_RUNS = 200
# Scenarios look at all timers that are left, which uvloop does not show.
asyncio_only = pytest.mark.asyncio(loop_factories=["asyncio"])


def by_turns(*functions: str) -> pytest.MarkDecorator:
    """Have a test run once a scenario, with each of several functions now and then."""
    pairs = list(zip(SCENARIOS, itertools.cycle(functions), strict=False))
    return pytest.mark.parametrize(("scenario", "function"), pairs, ids=str)


@pytest.fixture
async def shelf(tmp_path) -> Shelf:
    shelf = Shelf(tmp_path)
    await shelf.fill()
    return shelf


@asyncio_only
@by_turns("cuMemcpyBatchAsync", "cuEventRecord", "cuEventCreate")
async def test_each_call_of_the_driver_may_be_refused(
    scenario, function, softcuda, shelf
):
    for nth in range(1, MAX_RUNS):
        async with on_gpu(softcuda, shelf, scenario) as stage:
            call = Injection(softcuda, function, nth)
            with noting(f"call {nth} refused"):
                call.refuse()
                await scenario.play(stage)
                call.remove()
                await check_stored(stage)
                assert stage.view.device.failure is None
        if not call.has_come:
            break
    else:
        raise AssertionError(f"still makes more calls after {MAX_RUNS} runs")


@asyncio_only
@by_turns("cuEventRecord", "cuMemcpyBatchAsync")
async def test_whatever_kills_the_gpu_ends_all_and_leaves_nothing(
    scenario, function, softcuda, shelf
):
    for nth in range(1, MAX_RUNS):
        softcuda.reset()  # what is dead stays so
        async with on_gpu(softcuda, shelf, scenario) as stage:
            call = Injection(softcuda, function, nth)
            with noting(f"killed by call {nth}"):
                call.poison()
                with anyio.fail_after(20):
                    await play_to_the_end_of_the_gpu(scenario, stage)
                call.remove()
                await check_lost(stage)
        if not call.has_come:
            break
    else:
        raise AssertionError(f"still makes more calls after {MAX_RUNS} runs")


async def play_to_the_end_of_the_gpu(scenario: Scenario, stage: Stage) -> None:
    """Play; only the embedder's own calls may fail, and only for one reason."""
    try:
        await scenario.play(stage)
    except* DeviceError:
        assert stage.view.device.failure is not None


async def check_lost(stage: Stage) -> None:
    """Raise unless all is over, nothing is left or wrong, and requests are told."""
    await check_left(stage)
    check_shared(stage)
    if stage.view.device.failure is not None and not stage.cache._is_closed:
        with pytest.raises(DeviceError, match="is lost to this process"):
            await stage.serve(PLAIN)
        await check_left(stage)
        await stage.cache.aclose()
    check_shared(stage)
