"""Stop means stop: closing ends everything, in time, and whatever else happens."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from asyncache.core import AbortedError, ClosedError, OrderError
from asyncache.devices import CpuDevice
from asyncache.engine import KVCache, Limits
from asyncache.stores import FileStore, MemoryStore
from asyncache.testing import Gate
from asyncache.testing._cancel import Cancellation, cancel_after
from tests.engine.scene import (
    LAYOUT,
    PAGE,
    StubbornStore,
    gate_device,
    gate_store,
    memory_store,
    prompt,
    scene,
    staged,
    turns,
)

TOKENS = prompt(3)
SHORT = Limits(close_s=0.05, retry_s=0.001)


@pytest.mark.parametrize("where", ["contains", "get", "put"])
async def test_closing_ends_requests_and_transfers_wherever_they_are(where):
    store = await gate_store(TOKENS, is_open=True)
    gate = {
        "contains": store.contains_gate,
        "get": store.get_gate,
        "put": store.put_gate,
    }[where]
    gate.close()
    async with scene(store, check=False) as view:
        ends = []

        async def handle():
            with view.cache.request(TOKENS) as request:
                hit = await request.restore()
                await hit.wait()
                view.finish(request, TOKENS, hit.num_tokens)
            await view.cache.drain()

        async def note():
            try:
                if where == "put":
                    await view.serve(prompt(2, seed=5))
                    await view.cache.drain()
                await handle()
            except ClosedError as error:
                ends.append(type(error))

        async with anyio.create_task_group() as group:
            group.start_soon(note)
            await gate.wait_arrived()
            await view.cache.aclose()
            await view.cache.aclose()
        assert ends == [ClosedError if where == "put" else AbortedError]
        assert gate.num_waiting == 0
        view.check_clean()


async def test_closing_stops_retries_and_offers():
    from asyncache.testing import Fault, FaultyStore

    store = FaultyStore(await memory_store(), Fault.UNAVAILABLE)
    async with scene(store, limits=Limits(retry_s=60), check=False) as view:
        await view.serve(TOKENS)
        transfers = view.cache._runtime.transfers
        while not transfers._timers:
            await turns(1)
        await view.cache.aclose()
        assert not transfers._timers
        view.check_clean()


async def test_a_store_that_never_stops_is_told_within_close_s():
    inner = await memory_store(TOKENS)
    store = StubbornStore(inner, is_open=True)
    store.get_gate.close()
    device = CpuDevice(LAYOUT, 8)
    cache = KVCache(LAYOUT, device=device, store=store, limits=SHORT)
    await cache.open()
    with cache.request(TOKENS) as request:
        await request.restore()
        await store.get_gate.wait_arrived()
        with (
            anyio.fail_after(5),
            pytest.raises(OrderError, match=r"1 transfers did not stop within 0\.05 s"),
        ):
            await cache.aclose()
        with pytest.raises(AbortedError):
            request.extend(1)
        assert cache.statistics().replica.pools["kv"].quarantine == 3
        with pytest.raises(OrderError, match="did not stop"):
            await cache.aclose()
    store.get_gate.open()
    await cache.aclose()
    assert cache.statistics().leaked_pages == 0
    with pytest.raises(ClosedError):
        await inner.contains([])


class SlowToClose(MemoryStore):
    """Opens and closes when the test says so."""

    def __init__(self):
        super().__init__(2**20)
        self.open_gate = Gate(is_open=True)
        self.close_gate = Gate(is_open=True)
        self.num_closed = 0

    async def open(self):
        await self.open_gate.pass_through()

    async def aclose(self):
        await self.close_gate.pass_through()
        await super().aclose()
        self.num_closed += 1


async def test_a_store_that_does_not_close_is_told_within_close_s():
    store = SlowToClose()
    store.close_gate.close()
    cache = KVCache(LAYOUT, device=CpuDevice(LAYOUT, 4), store=store, limits=SHORT)
    await cache.open()
    with pytest.raises(OrderError, match="the store did not close"):
        await cache.aclose()
    store.close_gate.open()
    await cache.aclose()
    assert store.num_closed == 1


async def test_two_tasks_that_close_both_wait_until_it_is_closed():
    store = SlowToClose()
    store.close_gate.close()
    cache = KVCache(LAYOUT, device=CpuDevice(LAYOUT, 4), store=store)
    await cache.open()
    closed = []

    async def close(name):
        await cache.aclose()
        closed.append(name)

    async with anyio.create_task_group() as group:
        group.start_soon(close, 1)
        group.start_soon(close, 2)
        await turns(10)
        assert closed == []
        store.close_gate.open()
    assert sorted(closed) == [1, 2]


async def test_a_cache_may_be_opened_in_one_task_and_closed_in_another():
    cache = KVCache(LAYOUT, device=CpuDevice(LAYOUT, 4), store=await memory_store())
    await asyncio.create_task(cache.open())
    await asyncio.create_task(cache.aclose())
    assert "free=4" in repr(cache)


@pytest.mark.parametrize("how", Cancellation)
@pytest.mark.parametrize("num_turns", [1, 2, 4])
async def test_cancelled_while_it_closes_it_returns_only_once_all_has_stopped(
    how, num_turns
):
    store, device = await memory_store(TOKENS), gate_device()
    link = staged(store)(device)
    cache = KVCache(LAYOUT, device=device, linker=link)
    await cache.open()
    with cache.request(TOKENS) as request:
        await request.restore()
        await device.write_gate.wait_arrived()
        async with anyio.create_task_group() as group:
            results = []

            async def close():
                await cache.aclose()

            async def cancelled():
                results.append(await cancel_after(num_turns, close, how))

            group.start_soon(cancelled)
            await turns(num_turns + 10)
            # The copy still runs, and so does aclose().
            assert results == []
            assert cache.statistics().transfers == 1
            device.write_gate.open()
        # A scope's cancellation is its own business, once this has returned.
        assert results == [how is not Cancellation.SCOPE]
        assert cache.statistics().transfers == 0
        assert cache.statistics().leaked_pages == 0
    await cache.aclose()


async def test_left_by_an_exception_the_cache_closes_and_the_exception_goes_on():
    caches = []

    async def serve():
        async with scene(await memory_store(TOKENS)) as view:
            caches.append(view.cache)
            with view.cache.request(TOKENS) as request:
                await request.restore()
                raise RuntimeError("serving failed")

    with pytest.raises(RuntimeError, match="serving failed"):
        await serve()
    assert caches[0].statistics().leaked_pages == 0


async def test_the_task_that_opened_a_cache_may_be_cancelled_with_a_transfer_running():
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    caches = []

    async def serve():
        async with scene(store, check=False) as view:
            caches.append(view)
            await view.serve(TOKENS)

    task = asyncio.create_task(serve())
    await store.get_gate.wait_arrived()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    caches[0].check_clean()
    assert store.get_gate.num_waiting == 0


def test_a_loop_that_ends_without_closing_loses_no_thread(tmp_path):
    async def forget():
        device = CpuDevice(LAYOUT, 4)
        cache = KVCache(LAYOUT, device=device, store=FileStore(tmp_path))
        await cache.open()
        with cache.request(TOKENS) as request:
            request.extend(len(TOKENS))
            request.commit(len(TOKENS))

    asyncio.run(forget())


# Opening.


@pytest.mark.parametrize("how", Cancellation)
async def test_cancelled_while_it_opens_its_store_is_closed_again(how):
    store = SlowToClose()
    store.open_gate.close()
    cache = KVCache(LAYOUT, device=CpuDevice(LAYOUT, 4), store=store)
    assert await cancel_after(5, cache.open, how)
    assert store.num_closed == 1
    await cache.aclose()
    assert repr(cache) == "<KVCache, closed>"


async def test_closed_while_it_opens_it_is_not_opened():
    store = SlowToClose()
    store.open_gate.close()
    cache = KVCache(LAYOUT, device=CpuDevice(LAYOUT, 4), store=store)
    errors = []

    async def open_cache():
        try:
            await cache.open()
        except (ClosedError, asyncio.CancelledError) as error:
            errors.append(type(error))

    async with anyio.create_task_group() as group:
        group.start_soon(open_cache)
        await store.open_gate.wait_arrived()
        await cache.aclose()
    assert errors == [ClosedError]
    assert store.num_closed == 1


async def test_closing_reports_what_closing_the_store_raised_once():
    class Broken(MemoryStore):
        async def aclose(self):
            raise OSError("flush failed")

    cache = KVCache(LAYOUT, device=CpuDevice(LAYOUT, 4), store=Broken(2**20))
    await cache.open()
    with pytest.raises(OSError, match="flush failed"):
        await cache.aclose()
    await cache.aclose()


async def test_what_was_offloaded_before_closing_is_there_after_it(tmp_path):
    async with scene(FileStore(tmp_path)) as view:
        await view.serve(TOKENS)
    async with scene(FileStore(tmp_path)) as view:
        assert await view.serve(TOKENS) == 3 * PAGE
