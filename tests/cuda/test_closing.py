"""The end of devices, of their loops, and of coroutines that nobody resumes."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest
import uvloop

from asyncache.core import ClosedError, DeviceError
from tests.cuda.scene import Told, content, device_threads, held, raw

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


async def test_a_closed_device_has_no_thread_and_refuses_everything(gpu):
    device = gpu.device(waits="words")
    assert len(device_threads()) == 4
    await device.aclose()
    names = {thread.name for thread in device_threads()}
    # What gave the memory back has yet to end.
    assert names <= {"asyncache-pin_0"}
    assert device.new_word() is None
    for begin in (
        lambda: device.start_write("kv", [1], memoryview(content())),
        lambda: device.copy_pages("kv", [1], [2]),
        lambda: device.tensor("kv"),
    ):
        with pytest.raises(ClosedError):
            begin()
    with pytest.raises(ClosedError):
        await device.allocate_staging(10)
    assert "closed" in repr(device)
    with pytest.raises(DeviceError):
        device.page_views("kv", [0])


async def test_closing_twice_at_once_is_closing_once(gpu, softcuda):
    device = gpu.device()
    memory = await device.allocate_staging(10)
    with softcuda.gate() as gate:
        copy = device.start_write("kv", [1], memoryview(content()))
        gate.wait_held()
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(device.aclose)
                group.start_soon(device.aclose)
                await anyio.wait_all_tasks_blocked()
                gate.open()
    assert copy.is_over
    assert softcuda.count("retained_contexts") == 0
    await device.free_staging(memory)
    await device.aclose()


@pytest.mark.parametrize("make_loop", LOOPS)
def test_a_copy_outlives_its_loop_and_the_device_is_closed_in_another(
    gpu, softcuda, make_loop
):
    device = gpu.device()
    tensor = device.tensor("kv")

    async def begin():
        return device.start_write("kv", [1], memoryview(content()))

    async def close():
        async with anyio.create_task_group() as group:
            group.start_soon(device.aclose)
            await anyio.wait_all_tasks_blocked()
            assert device_threads()
            gate.open()

    with softcuda.gate() as gate:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            copy = runner.run(begin())
            gate.wait_held()
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(close())
    assert raw(tensor[1]) == content()
    assert not copy.is_over


@pytest.mark.parametrize("make_loop", LOOPS)
def test_a_coroutine_that_is_thrown_away_blocks_until_its_copy_is_over(
    gpu, softcuda, make_loop
):
    device = gpu.device()

    async def begin():
        copy = device.start_write("kv", [1], memoryview(content()))
        gate.wait_held()
        waiting = copy.wait()
        waiting.send(None)
        return copy, waiting

    with softcuda.gate() as gate:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            copy, waiting = runner.run(begin())
        opener = threading.Timer(0.05, gate.open)
        opener.start()
        waiting.close()
        assert copy.is_over
        opener.join()
    assert held(device, [1]) == content()
    asyncio.run(device.aclose())


async def test_a_coroutine_that_is_thrown_away_while_it_pins_leaves_nothing(
    gpu, softcuda
):
    device = gpu.device()
    pinning = device.allocate_staging(10)
    pinning.send(None)
    pinning.close()
    await device.aclose()
    assert softcuda.count("registered_ranges") == 0


async def test_a_device_that_is_not_closed_is_kept_while_it_copies(gpu, softcuda):
    device, told = gpu.device(close_s=60), Told()
    with softcuda.gate() as gate:
        device.start_write("kv", [1], memoryview(content())).when_over(told)
        gate.wait_held()
        closing = device.aclose()
        closing.send(None)
        closing.close()
    await told.wait()
    await device.aclose()
