"""What the driver refuses fails alone, and once nothing of it runs any more."""

from __future__ import annotations

import asyncio

import pytest

from asyncache.core import DeviceError
from tests.cuda.scene import OUT_OF_MEMORY, Lie, Told, content, held
from tests.softcuda import Direction


async def turns():
    """Let the event loop hear what threads have told it."""
    for _ in range(8):
        await asyncio.sleep(0)


async def works(device):
    """Check that a device goes on."""
    assert device.failure is None
    await device.write_pages("kv", [0], memoryview(content()))
    assert held(device, [0]) == content()


@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_a_refused_batch_fails_alone(gpu, softcuda, nth):
    device = gpu.device(Lie.LAYER_FIRST)
    source = memoryview(content())
    softcuda.refuse("cuMemcpyBatchAsync", OUT_OF_MEMORY, nth=nth)
    copies = [device.start_write("kv", [page], source) for page in range(1, 4)]
    for number, copy in enumerate(copies, 1):
        if number == nth:
            with pytest.raises(
                DeviceError, match=r"a copy of 3 pieces was refused: .*OUT_OF_MEMORY"
            ):
                await copy.wait()
        else:
            await copy.wait()
            assert held(device, [number]) == content()
    await works(device)
    await device.aclose()


@pytest.mark.parametrize("nth", range(1, 7))
async def test_what_was_begun_of_a_refused_copy_is_waited_for(gpu, softcuda, nth):
    softcuda.set_driver_version(12040)
    device = gpu.device(Lie.LAYER_FIRST)
    softcuda.refuse("cuMemcpyAsync", OUT_OF_MEMORY, nth=nth)
    with softcuda.gate() as gate:
        copy = device.start_write("kv", [3, 1], memoryview(content(2)))
        if nth > 1:
            gate.wait_held()
            await turns()
            assert not copy.is_over
    with pytest.raises(DeviceError, match="a copy of 6 pieces was refused"):
        await copy.wait()
    assert softcuda.count("copies") == nth - 1
    await works(device)
    await device.aclose()


async def test_a_refused_copy_lets_no_stream_read_its_pages(gpu, softcuda):
    device = gpu.device()
    softcuda.refuse("cuMemcpyBatchAsync", OUT_OF_MEMORY)
    copy = device.start_write("kv", [1], memoryview(content()))
    assert copy.fence is None
    with pytest.raises(DeviceError):
        await copy.wait()
    await device.aclose()


@pytest.mark.parametrize("function", ["cuEventRecord", "cuEventCreate"])
async def test_a_copy_without_an_event_is_over_when_its_stream_is_done(
    gpu, softcuda, function
):
    device = gpu.device()
    softcuda.refuse(function, OUT_OF_MEMORY)
    with softcuda.gate() as gate:
        copy = device.start_write("kv", [1], memoryview(content()))
        gate.wait_held()
        await turns()
        assert copy.fence is None
        assert not copy.is_over
    await copy.wait()
    assert held(device, [1]) == content()
    await works(device)
    await device.aclose()


@pytest.mark.parametrize("function", ["cuEventRecord", "cuEventCreate"])
async def test_a_forward_without_an_event_is_over_when_its_stream_is_done(
    gpu, softcuda, function
):
    device, stream, told = gpu.device(), gpu.stream(), Told()
    softcuda.refuse(function, OUT_OF_MEMORY)
    with softcuda.gate(Direction.OTHER) as gate:
        device.copy_pages("kv", [1], [2], stream=stream)
        device.when_done(stream, told)
        gate.wait_held()
        await turns()
        assert not told.count
    await told.wait()
    await works(device)
    await device.aclose()


async def test_a_refused_copy_of_pages_onto_pages_is_an_error_at_once(gpu, softcuda):
    device = gpu.device()
    softcuda.refuse("cuMemcpyBatchAsync", OUT_OF_MEMORY)
    with pytest.raises(DeviceError, match=r"pages could not be copied .*OUT_OF_MEMORY"):
        device.copy_pages("kv", [1], [2], stream=gpu.stream())
    await works(device)
    await device.aclose()


async def test_a_stream_that_is_none_is_not_the_end_of_the_gpu(gpu, softcuda):
    device, told, stream = gpu.device(waits="words"), Told(), 0xBAD0
    with pytest.raises(DeviceError, match="INVALID_HANDLE"):
        device.copy_pages("kv", [1], [2], stream=stream)
    word = device.new_word()
    with pytest.raises(DeviceError, match="INVALID_HANDLE"):
        word.hold(stream, 1)
    word.release()
    with softcuda.gate() as gate:
        copy = device.start_write("kv", [3], memoryview(content()))
        gate.wait_held()
        with pytest.raises(DeviceError, match="INVALID_HANDLE"):
            copy.fence.hold(stream)
    await copy.wait()
    device.when_done(stream, told)
    await told.wait()
    await works(device)
    await device.aclose()


async def test_a_stream_holds_for_a_copy_and_no_longer(gpu, softcuda):
    device, stream = gpu.device(), gpu.stream()
    with softcuda.gate(Direction.HOST_TO_DEVICE) as gate:
        copy = device.start_write("kv", [1], memoryview(content()))
        copy.fence.hold(stream)
        device.copy_pages("kv", [1], [2], stream=stream)
        gate.wait_held()
        assert not gpu.is_idle(stream)
    await copy.wait()
    gpu.synchronize(stream)
    assert held(device, [2]) == content()
    num_waits = softcuda.count("cuStreamWaitEvent")
    copy.fence.hold(stream)
    assert softcuda.count("cuStreamWaitEvent") == num_waits
    await device.aclose()
