"""What never ends, ends late, or ends without a word."""

from __future__ import annotations

import anyio
import pytest

from asyncache.core import DeviceError
from tests.cuda.scene import Told, content, held
from tests.softcuda import Direction


async def test_a_copy_that_never_ends_keeps_its_memory_until_it_does(gpu, softcuda):
    device = gpu.device(close_s=0.05)
    memory = await device.allocate_staging(10)
    with softcuda.gate() as gate:
        copy = device.start_write("kv", [1], memoryview(content()))
        gate.wait_held()
        for _ in range(2):
            with pytest.raises(
                DeviceError,
                match=r"1 copies or forwards still run on GPU 0 after 0.05 s",
            ):
                await device.aclose()
        assert not copy.is_over
        assert softcuda.count("live_streams") == 2
        assert softcuda.count("registered_ranges") == 1
    del memory
    await copy.wait()
    await device.aclose()
    assert softcuda.count("registered_ranges") == 0


async def test_a_stalled_forward_is_not_over_and_keeps_the_memory(gpu, softcuda):
    device, stream, told = gpu.device(close_s=0.05), gpu.stream(), Told()
    with softcuda.gate(Direction.OTHER) as gate:
        device.copy_pages("kv", [1], [2], stream=stream)
        device.when_done(stream, told)
        gate.wait_held()
        with pytest.raises(DeviceError, match="1 copies or forwards still run"):
            await device.aclose()
        assert not told.count
    await told.wait()
    await device.aclose()


async def test_a_stalled_stream_holds_up_no_other(gpu, softcuda):
    device, told, late = gpu.device(), Told(), Told()
    with softcuda.gate(Direction.OTHER) as gate:
        stalled = gpu.stream()
        device.copy_pages("kv", [1], [2], stream=stalled)
        device.when_done(stalled, late)
        gate.wait_held()
        device.when_done(gpu.stream(), told)
        await told.wait()
        assert not late.count
    await late.wait()
    await device.aclose()


async def test_a_forward_that_ends_while_the_device_closes_is_waited_for(gpu, softcuda):
    device, stream, told, later = gpu.device(), gpu.stream(), Told(), Told()
    with softcuda.gate(Direction.OTHER) as gate:
        device.copy_pages("kv", [1], [2], stream=stream)
        async with anyio.create_task_group() as group:
            device.when_done(stream, told)
            gate.wait_held()
            group.start_soon(device.aclose)
            await anyio.wait_all_tasks_blocked()
            device.when_done(stream, later)
            assert not told.count
            gate.open()
    assert (told.count, later.count) == (1, 1)


async def test_a_forward_on_a_closed_device_is_over(gpu):
    device, told = gpu.device(), Told()
    await device.aclose()
    device.when_done(None, told)
    assert told.count == 1


async def test_the_watch_finds_what_a_lost_wake_up_hid_in_order(gpu, softcuda):
    device, ends, told, last = gpu.device(), [], Told(), Told()
    with softcuda.lost_wakes():
        copies = [
            device.start_write("kv", [page], memoryview(content())) for page in range(5)
        ]
        for number, copy in enumerate(copies):
            copy.when_over(lambda number=number: ends.append(number))
        device.when_done(gpu.stream(), told)
        copies[-1].when_over(last)
        await last.wait()
        await told.wait()
        assert ends == [0, 1, 2, 3, 4]
        assert held(device, [4]) == content()
        # The thread still waits for the first: its event is nobody else's.
        num_events = softcuda.count("live_events")
        await device.write_pages("kv", [1], memoryview(content()))
        assert softcuda.count("live_events") == num_events + 1
    await device.write_pages("kv", [1], memoryview(content()))
    assert told.count == 1
    await device.aclose()


async def test_a_thread_that_nothing_woke_does_not_keep_the_device_open(
    gpu, softcuda, monkeypatch
):
    monkeypatch.setattr("asyncache.devices._cuda._JOIN_S", 0.05)
    device = gpu.device()
    with softcuda.lost_wakes():
        await device.write_pages("kv", [1], memoryview(content()))
        await device.aclose()
        assert softcuda.leftovers().keys() <= {
            "live_events",
            "retained_contexts",
            "live_streams",
            "declared_ranges",
        }
        assert softcuda.count("live_events") == 1


async def test_a_call_that_raises_ends_no_thread(gpu, monkeypatch):
    errors, told, again = [], Told(), Told()
    monkeypatch.setattr("threading.excepthook", errors.append)
    device = gpu.device()

    def fail():
        told()
        raise LookupError("of the embedder")

    device.when_done(None, fail)
    device.when_done(None, again)
    await again.wait()
    (error,) = errors
    assert error.exc_type is LookupError
    assert error.thread.name == "asyncache-forward"
    await device.aclose()
