"""Whoever goes while a copy runs: its pages wait for the copy, and go back once."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager, contextmanager, suppress

import anyio
import pytest

from asyncache.core import AbortedError, DeviceError, OrderError, PageState
from asyncache.devices import CudaDevice
from asyncache.engine import Limits
from asyncache.testing import CancelStyle, cancel_nth
from tests.cuda.rig import OUT_OF_MEMORY, device_memory, gpu, on_gpu
from tests.engine.blocking import blocking_scene
from tests.engine.scenarios import SCENARIOS
from tests.engine.scene import (
    LAYOUT,
    PAGE,
    POISON,
    content,
    memory_store,
    prompt,
    read,
    scene,
    staged,
    turns,
)
from tests.engine.stage import check_stored
from tests.engine.ways import WAYS
from tests.softcuda import Direction

TOKENS, OTHER = prompt(3), prompt(3, seed=1)
HASTY = Limits(close_s=0.05, retry_s=0.001, breaker_s=0.001)
PATIENCE_S = 20.0


@asynccontextmanager
async def engine(softcuda, *prompts, **arguments):
    """Open a cache on a GPU, over a store that holds some prompts."""
    store = await memory_store(*prompts)
    async with (
        gpu(softcuda) as device,
        scene(device=device, linker=staged(store), **arguments) as view,
    ):
        yield view


def loads(softcuda):
    return softcuda.gate(Direction.HOST_TO_DEVICE)


def offloads(softcuda):
    return softcuda.gate(Direction.DEVICE_TO_HOST)


async def held(gate) -> None:
    with anyio.fail_after(PATIENCE_S):
        await anyio.to_thread.run_sync(gate.wait_held)


async def until(holds) -> None:
    with anyio.fail_after(PATIENCE_S):
        while not holds():
            await turns(1)


async def in_the_end(call) -> None:
    """Do what may be too slow for the limit, again and again until it is done."""
    with anyio.fail_after(PATIENCE_S):
        while True:
            with suppress(OrderError):
                await call()
                return


def handler(view):
    async def handle():
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            await hit.wait()
            view.finish(request, TOKENS, hit.num_tokens)

    return handle


# Handlers.


@pytest.mark.parametrize("way", WAYS)
async def test_cancelled_during_a_copy_its_pages_are_nobodys_until_it_ends(
    way, softcuda
):
    async with engine(softcuda, TOKENS) as view:
        with loads(softcuda) as gate:
            await way(handler(view), lambda: held(gate))
            await turns(8)
            assert (view.pool.quarantine, view.pool.transit) == (3, 0)
            pages = view.pages(PageState.QUARANTINE)
            with view.cache.request(OTHER) as other:
                other.extend(len(OTHER))
                assert pages.isdisjoint(other.page_table["kv"])
                view.finish(other, OTHER, 0)
                gate.open()
                await until(lambda: not view.pool.quarantine)
                for position, page in enumerate(other.page_table["kv"][:3]):
                    assert read(view.device, page) == content(OTHER, position)
        await view.rest()
        assert (view.pool.free, view.pool.tree) == (5, 3)


@pytest.mark.parametrize("way", WAYS)
async def test_cancelled_during_an_offload_what_is_shared_is_stored(way, softcuda):
    async with engine(softcuda) as view:
        with offloads(softcuda) as gate:
            await view.serve(TOKENS)
            await way(view.cache.drain, lambda: held(gate))
            await turns(8)
            assert view.cache.statistics().transfers == 1
            gate.open()
        assert await view.cache.drain() == 0
        assert view.cache.statistics().counters.stored_pages == 3


# They look at all timers that are left, which uvloop does not show.
@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize(
    ("scenario", "style"),
    list(zip(SCENARIOS, itertools.cycle(CancelStyle), strict=False)),
    ids=str,
)
async def test_it_may_be_cancelled_at_each_await(scenario, style, softcuda):
    num = await cancel_nth(
        scenario.play,
        fresh=lambda: on_gpu(softcuda, None, scenario),
        check=check_stored,
        styles=[style],
    )
    assert num >= 1


# A page of which half is there.


async def test_nobody_reads_a_page_that_is_half_there(softcuda):
    async with engine(softcuda, TOKENS) as view:
        with loads(softcuda) as gate, view.cache.request(TOKENS) as one:
            first = await one.restore()
            await held(gate)
            pages = [read(view.device, page) for page in one.page_table["kv"][:3]]
            there = b"".join(pages)
            whole = b"".join(content(TOKENS, position) for position in range(3))
            half = len(whole) // 2
            assert there[:half] == whole[:half]
            assert there[half:] == bytes([POISON]) * half
            with view.cache.request(TOKENS) as two:
                second = await two.restore()
                await turns(20)
                assert view.cache.match_nowait(TOKENS) == 0
                assert [first.settled, second.settled] == [False, False]
                assert not view.cache.gates([one, two]).is_open(0)
                gate.open()
                for request, hit in ((one, first), (two, second)):
                    await hit.wait()
                    view.finish(request, TOKENS, hit.num_tokens)
        assert view.cache.statistics().counters.loaded_pages == 3


# The cache.


async def test_a_reset_leaves_the_pages_of_a_running_copy_alone(softcuda):
    async with engine(softcuda, TOKENS) as view:
        with loads(softcuda) as gate, view.cache.request(TOKENS) as request:
            hit = await request.restore()
            await held(gate)
            view.cache.reset()
            await hit.wait()
            assert hit.num_tokens == 0
            assert view.pool.quarantine == 3
            gate.open()
            await until(lambda: not view.pool.quarantine)
        await view.serve(TOKENS)


async def prefetch(view) -> None:
    with suppress(AbortedError):
        await view.cache.prefetch(TOKENS)


@pytest.mark.parametrize("what", [loads, offloads])
async def test_a_copy_that_does_not_end_is_told_by_aclose_and_no_page_goes_back(
    what, softcuda
):
    stored = [TOKENS] if what is loads else []
    async with engine(softcuda, *stored, limits=HASTY, check=False) as view:
        with what(softcuda) as gate:
            async with anyio.create_task_group() as group:
                if what is loads:
                    group.start_soon(prefetch, view)
                else:
                    await view.serve(TOKENS)
                await held(gate)
                busy = view.pages(PageState.FREE)
                for _ in range(2):
                    with pytest.raises(OrderError, match="1 transfers did not stop"):
                        await view.cache.aclose()
                    assert view.pages(PageState.FREE) == busy
                group.cancel_scope.cancel()
            gate.open()
            await in_the_end(view.cache.aclose)
        view.check_clean()


async def test_a_detach_waits_for_a_copy_that_runs(softcuda):
    async with engine(softcuda, TOKENS, limits=HASTY) as view:
        with loads(softcuda) as gate, view.cache.request(TOKENS) as request:
            hit = await request.restore()
            await held(gate)
            with pytest.raises(OrderError, match="1 transfers did not stop"):
                await view.cache.detach()
            await hit.wait()
            assert (hit.num_tokens, view.pool.quarantine) == (0, 3)
            gate.open()
            await in_the_end(view.cache.detach)
            assert view.pool.quarantine == 0
            view.finish(request, TOKENS, 0)


async def test_without_pinned_memory_nothing_is_opened_or_attached(softcuda):
    store = await memory_store(TOKENS)
    async with gpu(softcuda) as device:
        softcuda.refuse("cuMemHostRegister", OUT_OF_MEMORY)
        with pytest.raises(DeviceError, match="could not be pinned"):
            async with scene(device=device, linker=staged(store)):
                pass
        async with scene(device=device) as view:
            softcuda.refuse("cuMemHostRegister", OUT_OF_MEMORY)
            with pytest.raises(DeviceError, match="could not be pinned"):
                await view.cache.attach(store)
            assert await view.serve(TOKENS) == 0
            await view.cache.attach(store)
            assert await view.serve(TOKENS) == 3 * PAGE


# The blocking face.


@contextmanager
def blocking_engine(softcuda, **arguments):
    with device_memory(softcuda, LAYOUT, 8) as tensors:
        device = CudaDevice.adopt(LAYOUT, tensors)
        store = anyio.run(memory_store, TOKENS)
        try:
            with blocking_scene(
                device=device, linker=staged(store), **arguments
            ) as view:
                yield view
        finally:
            anyio.run(device.aclose)


def test_a_blocking_cache_keeps_the_pages_of_a_copy_until_it_ends(softcuda):
    with blocking_engine(softcuda) as view:
        with loads(softcuda) as gate:
            with view.cache.request(TOKENS) as request:
                request.restore()
                gate.wait_held()
            view.cache.step()
            assert view.pool.quarantine == 3
            gate.open()
            view.until(lambda: not view.pool.quarantine)
        assert view.serve(TOKENS) == 3 * PAGE


def test_a_blocking_cache_tells_of_a_copy_that_does_not_end(softcuda):
    with blocking_engine(softcuda, limits=HASTY, check=False) as view:
        with loads(softcuda) as gate:
            request = view.cache.request(TOKENS)
            with request:
                request.restore()
                gate.wait_held()
                with pytest.raises(OrderError, match="1 transfers did not stop"):
                    view.cache.close()
            assert view.pool.free == 5
            gate.open()
            while view.cache._thread is not None:
                with suppress(OrderError):
                    view.cache.close()
        view.check_clean()
