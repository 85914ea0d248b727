"""Cancelled in any way, a call ends only when nothing of it runs any more."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest
from cuda.bindings import driver

from tests.cuda.scene import content, held

WAYS = pytest.mark.parametrize("way", ["scope", "task", "task three times"])


class Call:
    """A call in a task of its own, which is cancelled where it waits."""

    def __init__(self, call):
        self.scope = anyio.CancelScope()
        self.has_ended = False
        self.task = asyncio.create_task(self._run(call))

    async def _run(self, call):
        try:
            with self.scope:
                await call()
        finally:
            self.has_ended = True

    async def cancel(self, way):
        """Cancel it, and check that it does not end."""
        if way == "scope":
            self.scope.cancel()
        for _ in range({"scope": 0, "task": 1, "task three times": 3}[way]):
            self.task.cancel()
            await turns()
        await turns()
        assert not self.has_ended

    async def end(self):
        """Wait until it has ended, cancelled."""
        await asyncio.wait([self.task])
        assert self.task.cancelled() or self.scope.cancelled_caught


async def turns():
    for _ in range(8):
        await asyncio.sleep(0)


class Held:
    """Calls of the driver that stay in it until the test lets them go."""

    def __init__(self, monkeypatch, name):
        self._call = getattr(driver, name)
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._may_go = threading.Event()
        monkeypatch.setattr(driver, name, self)

    def __call__(self, *arguments):
        self._loop.call_soon_threadsafe(self._arrived.set)
        assert self._may_go.wait(10)
        return self._call(*arguments)

    async def wait_arrived(self):
        await self._arrived.wait()

    def let_go(self):
        self._may_go.set()


@WAYS
async def test_a_cancelled_write_ends_when_its_copy_is_over(gpu, softcuda, way):
    device, source = gpu.device(), content()
    with softcuda.gate() as gate:
        call = Call(lambda: device.write_pages("kv", [1], memoryview(source)))
        await turns()
        gate.wait_held()
        await call.cancel(way)
        gate.open()
        await call.end()
    source[:] = bytes(len(source))
    assert held(device, [1]) == content()
    await device.aclose()


@WAYS
async def test_a_cancelled_read_ends_when_its_copy_is_over(gpu, softcuda, way):
    device, target = gpu.device(), content()
    with softcuda.gate() as gate:
        call = Call(lambda: device.read_pages("kv", [1], memoryview(target)))
        await turns()
        gate.wait_held()
        await call.cancel(way)
        gate.open()
        await call.end()
    assert not any(target)
    await device.aclose()


@WAYS
async def test_cancelled_memory_is_pinned_and_unpinned_again(
    gpu, softcuda, monkeypatch, way
):
    device, register = gpu.device(), Held(monkeypatch, "cuMemHostRegister")
    call = Call(lambda: device.allocate_staging(10))
    await register.wait_arrived()
    await call.cancel(way)
    register.let_go()
    await call.end()
    assert softcuda.count("cuMemHostRegister") == 1
    assert softcuda.count("registered_ranges") == 0
    await device.aclose()


@WAYS
async def test_memory_is_unpinned_once_a_cancelled_call_ends(
    gpu, softcuda, monkeypatch, way
):
    device, unregister = gpu.device(), Held(monkeypatch, "cuMemHostUnregister")
    memory = await device.allocate_staging(10)
    call = Call(lambda: device.free_staging(memory))
    await unregister.wait_arrived()
    await call.cancel(way)
    unregister.let_go()
    await call.end()
    assert softcuda.count("registered_ranges") == 0
    await device.aclose()


@WAYS
async def test_a_cancelled_close_closes_when_no_copy_runs(gpu, softcuda, way):
    device = gpu.device()
    with softcuda.gate() as gate:
        copy = device.start_write("kv", [1], memoryview(content()))
        gate.wait_held()
        call = Call(device.aclose)
        await turns()
        await call.cancel(way)
        assert softcuda.count("live_streams") == 2
        gate.open()
        await call.end()
    assert copy.is_over
    assert softcuda.count("live_streams") == 0
    assert softcuda.count("retained_contexts") == 0


@WAYS
async def test_a_cancelled_close_closes_while_it_gives_memory_back(
    gpu, softcuda, monkeypatch, way
):
    device, destroy = gpu.device(), Held(monkeypatch, "cuStreamDestroy")
    call = Call(device.aclose)
    await destroy.wait_arrived()
    await call.cancel(way)
    destroy.let_go()
    await call.end()
    assert softcuda.count("retained_contexts") == 0
