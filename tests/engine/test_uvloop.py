"""The core of it all on the other event loop too."""

from __future__ import annotations

import asyncio

import anyio
import pytest
import uvloop

from asyncache.core import AbortedError
from asyncache.stores import FileStore
from tests.engine.scene import (
    PAGE,
    gate_device,
    gate_store,
    prompt,
    scene,
    staged,
    turns,
)
from tests.engine.ways import by_scope, by_task_again, by_timeout

TOKENS = prompt(3)


def on_uvloop(main):
    """Run a coroutine on uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop, debug=True) as runner:
        return runner.run(main)


def test_pages_come_back_from_files(tmp_path):
    async def main():
        async with scene(FileStore(tmp_path)) as view:
            assert await view.serve(TOKENS) == 0
        async with scene(FileStore(tmp_path)) as view:
            assert await view.serve(TOKENS) == 3 * PAGE

    on_uvloop(main())


@pytest.mark.parametrize("way", [by_scope, by_task_again, by_timeout])
def test_a_cancelled_copy_keeps_its_pages_until_it_is_over(way):
    async def main():
        store, device = await gate_store(TOKENS, is_open=True), gate_device()
        async with scene(device=device, linker=staged(store)) as view:
            await way(lambda: view.serve(TOKENS), device.write_gate.wait_arrived)
            await turns(8)
            assert (view.pool.quarantine, view.pool.free) == (3, 5)
            device.write_gate.open()

    on_uvloop(main())


def test_closing_outlasts_a_native_cancel():
    async def main():
        store = await gate_store(TOKENS, is_open=True)
        device = gate_device()
        async with scene(device=device, linker=staged(store), check=False) as view:
            with view.cache.request(TOKENS) as request:
                hit = await request.restore()
                await device.write_gate.wait_arrived()
                closing = asyncio.create_task(view.cache.aclose())
                for _ in range(4):
                    await turns(2)
                    closing.cancel()
                await turns(2)
                assert not closing.done()
                device.write_gate.open()
                with pytest.raises(asyncio.CancelledError):
                    await closing
                assert view.cache.statistics().transfers == 0
                with pytest.raises(AbortedError):
                    await hit.wait()

    on_uvloop(main())


def test_a_thread_waits_for_a_layer():
    async def main():
        store = await gate_store(TOKENS, is_open=True)
        store.get_gate.close()
        async with scene(store) as view:
            with view.cache.request(TOKENS) as request:
                hit = await request.restore()
                async with anyio.create_task_group() as group:
                    group.start_soon(
                        anyio.to_thread.run_sync, hit.gates.wait_blocking, 1
                    )
                    await store.get_gate.wait_arrived()
                    store.get_gate.open()
                await hit.wait()

    on_uvloop(main())
