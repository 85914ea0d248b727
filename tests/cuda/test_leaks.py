"""Nothing grows, however long a process serves."""

from __future__ import annotations

import pytest

from asyncache.core import DeviceError
from asyncache.devices import CudaDevice
from tests.cuda.scene import KV, LAYOUT, OUT_OF_MEMORY, STATE, Lie, content

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_factories=["uvloop"])]


async def test_a_thousand_devices_leave_nothing(gpu, softcuda):
    tensors = {"kv": gpu.pool(Lie.GAPS, KV, 3), "state": gpu.pool(Lie.GAPS, STATE, 3)}
    for _ in range(1000):
        device = CudaDevice.adopt(LAYOUT, tensors, waits="words")
        memory = await device.allocate_staging(KV.page_bytes)
        word = device.new_word()
        copy = device.start_write("kv", [1], memory)
        copy.fence.raise_word(word, 1)
        word.release()
        await device.aclose()
        assert copy.is_over
        assert set(softcuda.leftovers()) == {"declared_ranges"}


async def test_ten_thousand_copies_that_fail_leave_nothing(gpu, softcuda):
    device = gpu.device()
    softcuda.refuse_pageable(OUT_OF_MEMORY)
    source = memoryview(content())
    for nth in range(1, 101):
        softcuda.refuse("cuEventRecord", OUT_OF_MEMORY, nth=nth)
        copies = [device.start_write("kv", [n % 5], source) for n in range(100)]
        for copy in copies:
            with pytest.raises(DeviceError):
                await copy.wait()
    assert softcuda.count("live_events") <= 100
    await device.aclose()
