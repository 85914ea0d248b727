"""The contract of a device, on every layout, driver and GPU."""

from __future__ import annotations

import pytest
from cuda.bindings import driver

from asyncache.testing import check_device
from tests.cuda.scene import KV, Lie, content, held, ok


@pytest.mark.parametrize("lie", Lie)
@pytest.mark.parametrize("waits", ["fences", "words"])
async def test_it_keeps_the_contract(gpu, lie, waits):
    await check_device(lambda: gpu.device(lie, waits=waits))


@pytest.mark.parametrize(
    ("version", "num_batches", "num_singles"),
    [(13000, 1, 0), (12080, 1, 0), (12040, 0, KV.num_layers)],
)
async def test_it_copies_by_what_the_driver_has(
    gpu, softcuda, version, num_batches, num_singles
):
    softcuda.set_driver_version(version)
    device = gpu.device(Lie.TENSOR_A_LAYER)
    await device.write_pages("kv", [3], memoryview(content()))
    assert held(device, [3]) == content()
    assert softcuda.count("cuMemcpyBatchAsync") == num_batches
    assert softcuda.count("cuMemcpyAsync") == num_singles
    await device.aclose()


@pytest.mark.parametrize("version", [12080, 12040])
async def test_it_keeps_the_contract_with_older_drivers(gpu, softcuda, version):
    def make():
        softcuda.set_driver_version(version)
        return gpu.device(Lie.LAYER_FIRST)

    await check_device(make)


async def test_it_works_on_a_gpu_that_is_not_current_and_leaves_the_other_current(
    gpu, softcuda
):
    softcuda.set_devices(2)
    ok(driver.cuInit(0))
    with gpu.current(0) as context:
        device = gpu.device(ordinal=1, waits="words")
        await device.write_pages("kv", [1], memoryview(content()))
        device.copy_pages("kv", [1], [2])
        word = device.new_word()
        word.hold(gpu.stream(1), 1)
        word.release()
        memory = await device.allocate_staging(10)
        await device.free_staging(memory)
        assert int(ok(driver.cuCtxGetCurrent())) == context
        await device.aclose()
        assert int(ok(driver.cuCtxGetCurrent())) == context


async def test_pages_are_copied_in_the_order_of_the_legacy_stream(gpu):
    """What torch calls its default stream: a batch is not allowed there."""
    device = gpu.device(Lie.TENSOR_A_LAYER)
    await device.write_pages("kv", [1], memoryview(content()))
    device.copy_pages("kv", [1], [2], stream=0)
    gpu.synchronize(0)
    assert held(device, [2]) == content()
    await device.aclose()


async def test_a_write_is_one_call_of_the_driver_and_no_pageable_copy(gpu, softcuda):
    device = gpu.device(Lie.TENSOR_A_LAYER)
    memory = await device.allocate_staging(4 * KV.page_bytes)
    softcuda.refuse_pageable(1)
    memory[:] = content(4)
    await device.write_pages("kv", [4, 0, 2, 1], memory)
    assert softcuda.count("copies") == softcuda.count("cuMemcpyBatchAsync") == 1
    back = await device.allocate_staging(4 * KV.page_bytes)
    await device.read_pages("kv", [4, 0, 2, 1], back)
    assert bytes(back) == bytes(memory)
    assert softcuda.count("pageable") == 0
    await device.aclose()
