"""No call that waits for the GPU is made on the event loop."""

from __future__ import annotations

import pytest
from blockbuster import BlockingError
from cuda.bindings import driver

from asyncache.devices._cuda_lane import Mark
from tests.cuda.scene import ok


async def test_to_wait_for_an_event_on_the_loop_fails_a_test(gpu):
    ok(driver.cuInit(0))
    with gpu.current():
        event = int(ok(driver.cuEventCreate(0)))
        with pytest.raises(BlockingError, match="cuEventSynchronize"):
            Mark(event, 0, print).wait()
        ok(driver.cuEventDestroy(event))


async def test_the_threads_of_a_device_may_wait_while_another_records_a_graph(
    gpu, softcuda
):
    device = gpu.device()
    await device.aclose()
    assert softcuda.count("cuThreadExchangeStreamCaptureMode") == 4


async def test_to_wait_for_a_stream_on_the_loop_fails_a_test(gpu):
    ok(driver.cuInit(0))
    with gpu.current(), pytest.raises(BlockingError, match="cuStreamSynchronize"):
        Mark(None, 0, print).wait()
