"""An asynchronous error ends the device, and every wait with it."""

from __future__ import annotations

import pytest

from asyncache.core import DeviceError
from tests.cuda.scene import ILLEGAL_ADDRESS, Told, content
from tests.softcuda import Direction


@pytest.fixture
async def lost(gpu, softcuda):
    """A device whose GPU was lost by a copy."""
    device = gpu.device(waits="words")
    softcuda.poison("cuMemcpyBatchAsync", ILLEGAL_ADDRESS)
    with pytest.raises(DeviceError, match=r"GPU 0 is lost .*ILLEGAL_ADDRESS"):
        await device.write_pages("kv", [1], memoryview(content()))
    return device


async def test_every_copy_in_flight_fails_and_every_forward_is_over(gpu, softcuda):
    device, stream, told = gpu.device(), gpu.stream(), Told()
    source, target = memoryview(content()), memoryview(content())
    softcuda.poison("cuMemcpyBatchAsync", ILLEGAL_ADDRESS)
    forwards = softcuda.gate(Direction.OTHER | Direction.DEVICE_TO_HOST)
    with forwards, softcuda.gate(Direction.HOST_TO_DEVICE) as loads:
        copies = [device.start_write("kv", [page], source) for page in (1, 2, 3)]
        copies.append(device.start_read("kv", [4], target))
        device.copy_pages("kv", [0], [4], stream=stream)
        device.when_done(stream, told)
        loads.open()
        for copy in copies:
            with pytest.raises(DeviceError, match="GPU 0 is lost to this process"):
                await copy.wait()
        await told.wait()
    assert told.count == 1
    assert "ILLEGAL_ADDRESS" in str(device.failure)
    assert "lost" in repr(device)
    await device.aclose()


async def test_nothing_can_be_begun_any_more(lost):
    told = Told()
    for begin in (
        lambda: lost.start_write("kv", [1], memoryview(content())),
        lambda: lost.start_read("kv", [1], memoryview(content())),
        lambda: lost.copy_pages("kv", [1], [2]),
    ):
        with pytest.raises(DeviceError, match="lost"):
            begin()
    with pytest.raises(DeviceError, match="lost"):
        await lost.allocate_staging(10)
    assert lost.new_word() is None
    lost.when_done(None, told)
    assert told.count == 1
    await lost.aclose()


async def test_a_gpu_that_was_lost_unseen_is_found_out(gpu, softcuda):
    device, told, stream = gpu.device(), Told(), gpu.stream()
    softcuda.poison("cuMemcpyBatchAsync", ILLEGAL_ADDRESS)
    device.copy_pages("kv", [1], [2], stream=stream)
    with pytest.raises(AssertionError, match="ILLEGAL_ADDRESS"):
        gpu.synchronize(stream)
    assert device.failure is None
    copy = device.start_write("kv", [1], memoryview(content()))
    with pytest.raises(DeviceError, match="lost"):
        await copy.wait()
    device.when_done(stream, told)
    await told.wait()
    await device.aclose()


async def test_a_forward_over_a_lost_gpu_is_over(gpu, softcuda):
    device, told, stream = gpu.device(), Told(), gpu.stream()
    softcuda.poison("cuMemcpyBatchAsync", ILLEGAL_ADDRESS)
    with softcuda.gate(Direction.OTHER) as gate:
        device.copy_pages("kv", [1], [2], stream=stream)
        device.when_done(stream, told)
        gate.wait_held()
        assert not told.count
    await told.wait()
    assert told.count == 1
    assert device.failure is not None
    await device.aclose()


async def test_words_let_go_and_are_given_back(gpu, softcuda):
    device, stream = gpu.device(waits="words"), gpu.stream()
    word = device.new_word()
    word.hold(stream, 1)
    softcuda.poison("cuMemcpyBatchAsync", ILLEGAL_ADDRESS)
    with pytest.raises(DeviceError):
        await device.write_pages("kv", [1], memoryview(content()))
    with pytest.raises(DeviceError, match="lost"):
        word.hold(stream, 2)
    word.set(1)
    word.release()
    await device.aclose()


async def test_pinned_memory_is_given_back(gpu, softcuda):
    device = gpu.device()
    memory = await device.allocate_staging(10)
    await device.allocate_staging(10)
    softcuda.poison("cuMemcpyBatchAsync", ILLEGAL_ADDRESS)
    with pytest.raises(DeviceError):
        await device.write_pages("kv", [1], memoryview(content()))
    await device.free_staging(memory)
    assert softcuda.count("registered_ranges") == 1
    await device.aclose()
    assert softcuda.count("registered_ranges") == 0
