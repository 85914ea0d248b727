"""A handler may be cancelled anywhere, in every way: nothing of it stays behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import asynccontextmanager, suppress

import anyio
import pytest

from asyncache.core import AbortedError, PageState
from asyncache.devices import CpuDevice
from asyncache.devices._threads import CopyThread
from asyncache.stores import FileStore
from asyncache.testing import CancelStyle, cancel_nth
from tests.engine.scene import (
    LAYOUT,
    PAGE,
    StubbornStore,
    check_pages,
    compute,
    gate_device,
    gate_store,
    memory_store,
    prompt,
    scene,
    staged,
    store_pages,
    turns,
)
from tests.engine.ways import WAYS, by_scope, by_task_again

TOKENS = prompt(3)


def handler(view, tokens=TOKENS):
    async def handle():
        with view.cache.request(tokens) as request:
            hit = await request.restore()
            await hit.wait()
            view.finish(request, tokens, hit.num_tokens)
            await anyio.sleep_forever()

    return handle


# In each way, where the store or the device is held.


@pytest.mark.parametrize("way", WAYS)
async def test_cancelled_during_the_lookup_it_holds_nothing(way):
    store = await gate_store(TOKENS)
    async with scene(store) as view:
        await way(handler(view), store.contains_gate.wait_arrived)
        await turns(5)
        view.check_clean()
        assert view.pool.free == 8
        assert store.contains_gate.num_waiting == 0


@pytest.mark.parametrize("way", WAYS)
async def test_cancelled_during_the_load_its_pages_go_back_when_the_store_stops(way):
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        await way(handler(view), store.get_gate.wait_arrived)
        await turns(8)
        view.check_clean()
        assert view.pool.free == 8
        assert store.get_gate.num_waiting == 0


@pytest.mark.parametrize("way", WAYS)
async def test_cancelled_during_the_copy_its_pages_wait_until_the_copy_is_over(way):
    store, device = await memory_store(TOKENS), gate_device()
    async with scene(device=device, linker=staged(store)) as view:
        await way(handler(view), device.write_gate.wait_arrived)
        await turns(8)
        assert (view.pool.quarantine, view.pool.transit, view.pool.free) == (3, 0, 5)
        held = view.pages(PageState.QUARANTINE)
        with view.cache.request(prompt(4, seed=1)) as other:
            other.extend(other.num_tokens)
            assert held.isdisjoint(other.page_table["kv"])
        view.cache.check_invariants()
        device.write_gate.open()


@pytest.mark.parametrize("way", WAYS)
async def test_cancelled_while_a_store_cannot_stop_its_pages_are_not_given_out(way):
    inner = await memory_store(TOKENS)
    store = StubbornStore(inner, is_open=True)
    store.get_gate.close()
    other = prompt(4, seed=1)
    async with scene(store) as view:
        await way(handler(view), store.get_gate.wait_arrived)
        await turns(8)
        assert view.pool.quarantine == 3
        # The rest of the pool, in full: none of it may change when the store goes on.
        with view.cache.request(other) as request:
            request.extend(len(other))
            compute(view.device, request, other)
            store.get_gate.open()
            while view.pool.quarantine:
                await turns(1)
            check_pages(view.device, request, other, len(other) - 1)


@pytest.mark.parametrize("way", WAYS)
async def test_cancelled_after_its_commit_what_it_shared_stays(way):
    async with scene() as view:
        arrived = anyio.Event()

        async def handle():
            with view.cache.request(TOKENS) as request:
                view.finish(request, TOKENS, 0)
                arrived.set()
                await asyncio.get_running_loop().create_future()

        await way(handle, arrived.wait)
        await turns(2)
        view.check_clean()
        assert view.cache.match_nowait(TOKENS) == 3 * PAGE


@pytest.mark.parametrize("way", WAYS)
async def test_cancelling_a_drain_leaves_the_offload_alone(way):
    store = await gate_store(is_open=True)
    store.put_gate.close()
    async with scene(store) as view:
        await view.serve(TOKENS)
        await way(view.cache.drain, store.put_gate.wait_arrived)
        assert view.cache.statistics().transfers == 1
        assert not view.cache._runtime._resting
        store.put_gate.open()
        assert await view.cache.drain() == 0
        assert view.cache.statistics().counters.stored_pages == 3


@pytest.mark.parametrize("way", WAYS)
async def test_cancelling_a_gate_leaves_the_load_alone(way):
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            await store.get_gate.wait_arrived()
            waiting = anyio.Event()

            async def handle():
                waiting.set()
                await hit.gates.wait(0)

            await way(handle, waiting.wait)
            assert not view.cache._runtime.board._waiters
            store.get_gate.open()
            await hit.wait()
            assert hit.num_tokens == 3 * PAGE


# The scope goes on after its restore was cancelled.


async def test_a_scope_whose_restore_is_cancelled_goes_on_with_what_is_there():
    store = await gate_store(TOKENS)
    async with scene(store) as view:
        await view.serve(TOKENS[: PAGE + 1], deadline_s=0)
        with view.cache.request(TOKENS) as request:
            with anyio.move_on_after(0.01):
                await request.restore()
            assert not view.cache._runtime._deadlines
            assert request.settled
            assert request.reserved
            view.finish(request, TOKENS, PAGE)
        store.contains_gate.open()
        store.put_gate.open()
    assert view.cache.statistics().counters.aborted == 0


async def test_a_restore_cancelled_in_the_turn_of_its_answer_gives_the_load_up():
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(TOKENS) as request:
            task = asyncio.create_task(request.restore())
            await turns(1)
            landing = request._landing
            while not landing.agreed.is_set():
                await turns(1)
            assert not task.done() or task.cancelled() or task.result()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            if task.cancelled():
                assert request.settled
                assert list(request.page_table["kv"]) == []
            request.suspend()
            store.get_gate.open()
            hit = await (await request.restore()).wait()
            assert hit.num_tokens == 3 * PAGE


async def test_a_cancelled_wait_may_be_taken_up_again():
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            for _ in range(3):
                with anyio.move_on_after(0):
                    await hit.wait()
            store.get_gate.open()
            await hit.wait()
            check_pages(view.device, request, TOKENS, 3 * PAGE)


# Generators, and scopes that nobody leaves.


async def test_a_streaming_handler_that_is_closed_at_a_yield_gives_all_back():
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:

        async def stream():
            with view.cache.request(TOKENS) as request:
                await request.restore()
                yield "headers"
                await anyio.sleep_forever()

        answer = stream()
        assert await anext(answer) == "headers"
        assert view.pool.transit == 3
        await answer.aclose()
        assert view.pool.transit == 0
        await turns(5)
        view.check_clean()


async def test_a_streaming_handler_that_is_lost_gives_all_back():
    async with scene(await memory_store(TOKENS)) as view:

        async def stream():
            with view.cache.request(TOKENS) as request:
                await (await request.restore()).wait()
                yield "headers"

        answer = stream()
        await anext(answer)
        del answer
        gc.collect()
        while view.cache.statistics().replica.num_requests:
            await turns(1)


async def test_a_request_that_is_lost_is_aborted_and_said_so():
    async with scene(await memory_store(TOKENS)) as view:
        lost = [view.cache.request(TOKENS).__enter__()]
        await (await lost[0].restore()).wait()
        lost.append(lost)
        del lost
        with pytest.warns(ResourceWarning, match="never left"):
            gc.collect()
        while view.cache.statistics().replica.num_requests:
            await turns(1)
        assert view.cache.statistics().counters.aborted == 1


async def test_a_lost_request_is_aborted_even_where_warnings_are_errors(monkeypatch):
    seen = []
    monkeypatch.setattr("sys.unraisablehook", seen.append)
    async with scene() as view:
        request = view.cache.request(TOKENS).__enter__()
        del request
        gc.collect()
        await turns(2)
        view.check_clean()
    assert [type(args.exc_value) for args in seen] == [ResourceWarning]


async def test_a_scope_that_another_thread_collects_ends_on_the_loop():
    async with scene(await memory_store(TOKENS)) as view:
        scope = view.cache.request(TOKENS)
        request = scope.__enter__()
        await (await request.restore()).wait()
        leave = threading.Thread(target=scope.__exit__, args=(None, None, None))
        leave.start()
        await anyio.to_thread.run_sync(leave.join)
        await turns(2)
        counters = view.cache.statistics().counters
        assert (counters.closed, counters.aborted) == (1, 0)


async def test_a_scope_that_ends_while_the_core_is_at_work_ends_soon_after():
    scopes = []

    def policy(node):
        # The collector may run anywhere; here it is made to run in an eviction.
        while scopes:
            scopes.pop().__exit__(None, None, None)
        return node.used

    tokens = prompt(2)
    async with scene(num_pages=5, policy=policy) as view:
        await view.serve(prompt(2, seed=1))
        scope = view.cache.request(prompt(1, seed=2))
        scope.__enter__().extend(PAGE)
        scopes.append(scope)
        with view.cache.request(tokens) as request:
            request.extend(len(tokens))
            assert not scopes
            await turns(1)
            view.cache.check_invariants()
            assert view.cache.statistics().replica.num_requests == 1
            compute(view.device, request, tokens)


async def test_leaving_a_scope_after_the_loop_is_gone_is_harmless():
    scopes = []

    async def leave_open():
        view = scene(check=False)
        opened = await view.__aenter__()
        scope = opened.cache.request(TOKENS)
        scope.__enter__()
        scopes.append((view, opened, scope))

    def run():
        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave_open())
        loop.close()
        _, opened, scope = scopes[0]
        scope.__exit__(None, None, None)
        again = opened.cache._runtime
        again.abandon(scope._state)
        again._gate_timed_out(1)

    thread = threading.Thread(target=run)
    thread.start()
    await anyio.to_thread.run_sync(thread.join)
    view, _, scope = scopes.pop()
    with pytest.raises(Exception, match="the request has ended"):
        scope.extend(1)
    with pytest.raises(Exception, match="another thread or loop"):
        await view.__aexit__(None, None, None)


# At each await.


@asynccontextmanager
async def in_place():
    async with scene(await memory_store(TOKENS)) as view:
        yield view


@asynccontextmanager
async def far_away():
    store = await memory_store(TOKENS)
    link = staged(store, layer_groups=2, batch_bytes=64)
    async with scene(device=gate_device(is_open=True), linker=link) as view:
        yield view


@pytest.fixture
def on_files(tmp_path):
    @asynccontextmanager
    async def fresh():
        store = FileStore(tmp_path)
        await store.open()
        await store_pages(store, TOKENS)
        async with scene(store) as view:
            yield view

    return fresh


async def whole_life(view):
    """Restore, wait, compute in a thread, commit, decode, drain."""
    tokens = [*TOKENS, *range(50, 50 + PAGE)]
    thread = CopyThread()
    try:
        with view.cache.request(TOKENS, reserve_tokens=PAGE) as request:
            hit = await request.restore()
            await hit.gates.wait(1)
            await hit.wait()
            request.append(tokens[len(TOKENS) :])
            request.extend(len(tokens))
            with view.cache.forward([request]):
                await thread.start(
                    lambda: compute(view.device, request, tokens, 3), num_bytes=2**30
                ).wait()
            request.commit(len(tokens))
        await view.cache.step()
        await view.cache.drain()
    finally:
        with anyio.CancelScope(shield=True):
            await thread.aclose()


async def check(view):
    await view.rest()
    assert await view.serve(TOKENS) == 3 * PAGE


@pytest.mark.parametrize("place", ["in_place", "far_away", "on_files"])
@pytest.mark.parametrize("style", CancelStyle)
async def test_a_whole_life_may_be_cancelled_at_each_await(place, style, request):
    fresh = {
        "in_place": in_place,
        "far_away": far_away,
        "on_files": request.getfixturevalue("on_files"),
    }[place]
    num = await cancel_nth(whole_life, fresh=fresh, check=check, styles=[style])
    assert num >= 4


@pytest.mark.parametrize("way", [by_scope, by_task_again])
async def test_many_handlers_cancelled_at_once_leave_nothing(way):
    prompts = [prompt(3, seed=seed) for seed in range(6)]
    store = await gate_store(*prompts, is_open=True)
    store.get_gate.close()
    async with scene(store, num_pages=16) as view:

        async def handle():
            async with anyio.create_task_group() as group:
                for tokens in prompts:
                    group.start_soon(handler(view, tokens))

        await way(handle, lambda: store.get_gate.wait_arrived(4))
        await turns(10)
        view.check_clean()


async def test_after_its_end_every_call_says_how_the_request_ended():
    async with scene() as view:
        with (
            pytest.raises(RuntimeError, match="client gone"),
            view.cache.request(TOKENS) as request,
        ):
            raise RuntimeError("client gone")
        for call in (
            lambda: request.extend(1),
            lambda: request.commit(1),
            lambda: request.truncate(1),
            lambda: request.append([1]),
            lambda: request.page_table,
            request.suspend,
        ):
            with pytest.raises(AbortedError, match="was aborted"):
                call()
        with pytest.raises(AbortedError):
            await request.restore()


def test_the_device_may_be_made_before_there_is_a_loop():
    device = CpuDevice(LAYOUT, 8)

    async def run():
        async with scene(device=device) as view:
            await view.serve(TOKENS)

    asyncio.run(run())
