"""Forwards on streams: what they may still touch stays as it is until they have run."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress

import anyio
import pytest

from asyncache.core import DeviceError, PageState
from asyncache.engine import Limits, Overdue
from asyncache.stores import FileStore
from tests.cuda.rig import ILLEGAL_ADDRESS, Model, gpu, model
from tests.engine.scene import (
    PAGE,
    check_pages,
    content,
    keys,
    memory_store,
    prompt,
    scene,
    staged,
    turns,
)
from tests.softcuda import Direction

TOKENS, STORED, OTHER = prompt(3), prompt(3, seed=1), prompt(3, seed=2)
GARBAGE = b"\xee" * len(content(TOKENS, 0))
FORWARDS = Direction.OTHER
PATIENCE_S = 20.0


@asynccontextmanager
async def engine(softcuda, store=None, *, num_pages=8, check=True, **arguments):
    """Open a cache on a GPU, and a model."""
    linker = None if store is None else staged(store)
    async with gpu(softcuda, num_pages) as device:
        with model(softcuda) as stream:
            async with scene(
                device=device, linker=linker, check=check, **arguments
            ) as view:
                yield view, stream


async def to_thread(function, *args):
    with anyio.fail_after(PATIENCE_S):
        return await anyio.to_thread.run_sync(function, *args)


async def until(holds) -> None:
    with anyio.fail_after(PATIENCE_S):
        while not holds():
            await turns(1)


def computes(view, stream: Model, request, tokens) -> None:
    """Give the stream what fills a request's pages."""
    for position, page in enumerate(request.page_table["kv"][: len(tokens) // PAGE]):
        stream.write(view.device.tensor("kv")[page], content(tokens, position))


def spoils(view, stream: Model, pages) -> None:
    """Give the stream what fills pages with what is no page's."""
    for page in pages:
        stream.write(view.device.tensor("kv")[page], GARBAGE)


async def test_pages_wait_until_the_stream_has_run_though_the_block_was_left(softcuda):
    store = await memory_store(STORED)
    async with engine(softcuda, store) as (view, stream):
        with softcuda.gate(FORWARDS) as gate:
            with view.cache.request(TOKENS) as request:
                request.extend(len(TOKENS))
                held = set(request.page_table["kv"])
                with view.cache.forward([request], stream=stream.stream):
                    spoils(view, stream, held)
            assert view.pages(PageState.QUARANTINE) == held
            with view.cache.request(STORED) as other:
                hit = await (await other.restore()).wait()
                assert hit.num_tokens == 3 * PAGE
                assert held.isdisjoint(other.page_table["kv"])
                await to_thread(gate.wait_held)
                gate.open()
                await to_thread(stream.run)
                check_pages(view.device, other, STORED, 3 * PAGE)
            await until(lambda: not view.pool.quarantine)


async def test_who_needs_the_pages_of_a_forward_waits_for_its_stream(softcuda):
    store = await memory_store(STORED)
    async with engine(softcuda, store, num_pages=4) as (view, stream):
        with softcuda.gate(FORWARDS) as gate:
            with view.cache.request(TOKENS) as request:
                request.extend(len(TOKENS))
                held = list(request.page_table["kv"])
                with view.cache.forward([request], stream=stream.stream):
                    spoils(view, stream, held)
            async with anyio.create_task_group() as group:
                group.start_soon(view.serve, STORED)
                await to_thread(gate.wait_held)
                await turns(20)
                assert view.cache.statistics().replica.num_waiting == 1
                gate.open()


async def test_an_offload_reads_what_the_stream_has_written_and_nothing_before(
    softcuda, tmp_path
):
    store = FileStore(tmp_path)
    async with engine(softcuda, store) as (view, stream):
        with softcuda.gate(FORWARDS) as gate:
            with view.cache.request(TOKENS) as request:
                request.extend(len(TOKENS))
                with view.cache.forward([request], stream=stream.stream):
                    computes(view, stream, request, TOKENS)
                request.commit(len(TOKENS))
            await to_thread(gate.wait_held)
            await turns(20)
            assert await view.cache.drain(deadline_s=0.01) == 1
            assert await store.contains(keys(TOKENS)) == [False] * 3
            gate.open()
            assert await view.cache.drain() == 0
        names = keys(TOKENS)
        pages = [bytearray(len(GARBAGE)) for _ in names]
        await store.get_into(names, [[memoryview(page)] for page in pages])
        assert pages == [content(TOKENS, position) for position in range(3)]


async def test_forwards_on_two_streams_finish_in_order(softcuda):
    async with engine(softcuda) as (view, one):
        with model(softcuda) as two, softcuda.gate(FORWARDS) as gate:
            with view.cache.request(TOKENS) as request:
                request.extend(len(TOKENS))
                held = set(request.page_table["kv"])
                with view.cache.forward([request], stream=one.stream):
                    spoils(view, one, held)
                with view.cache.forward([request], stream=two.stream):
                    two.run()
            # Left under the second, which has run; but the first has not.
            await turns(20)
            assert view.pages(PageState.QUARANTINE) == held
            gate.open()
            await until(lambda: not view.pool.quarantine)


async def test_a_model_that_raises_leaves_a_forward_that_still_runs(softcuda):
    async with engine(softcuda) as (view, stream):
        with softcuda.gate(FORWARDS) as gate:
            with suppress(EOFError), view.cache.request(TOKENS) as request:
                request.extend(len(TOKENS))
                held = set(request.page_table["kv"])
                with view.cache.forward([request], stream=stream.stream):
                    spoils(view, stream, held)
                    raise EOFError
            await to_thread(gate.wait_held)
            with view.cache.request(OTHER) as other:
                other.extend(len(OTHER))
                assert held.isdisjoint(other.page_table["kv"])
                assert view.pages(PageState.QUARANTINE) == held
            gate.open()
            await until(lambda: not view.pool.quarantine)


async def test_a_cache_may_be_closed_and_its_memory_not_while_a_forward_runs(softcuda):
    async with engine(softcuda, check=False) as (view, stream):
        with softcuda.gate(FORWARDS) as gate:
            with view.cache.request(TOKENS) as request:
                request.extend(len(TOKENS))
                with view.cache.forward([request], stream=stream.stream):
                    spoils(view, stream, request.page_table["kv"])
                await view.cache.aclose()
            async with anyio.create_task_group() as group:
                group.start_soon(view.device.aclose)
                await to_thread(gate.wait_held)
                await turns(20)
                assert view.pool.quarantine == 4
                assert softcuda.leftovers()["live_streams"] == 3
                gate.open()
            await until(lambda: not view.pool.quarantine)


async def test_a_forward_that_is_left_after_the_close_is_told_of_no_more(softcuda):
    limits = Limits(overdue_s=0.001)
    async with engine(softcuda, check=False, limits=limits) as (view, stream):
        with softcuda.gate(FORWARDS) as gate:
            with view.cache.request(TOKENS) as request:
                request.extend(len(TOKENS))
                with view.cache.forward([request], stream=stream.stream):
                    spoils(view, stream, request.page_table["kv"])
                    await view.cache.aclose()
            await to_thread(gate.wait_held)
            assert not view.cache._runtime.forwards._late._running
            gate.open()
            await until(lambda: not view.pool.quarantine)
        assert not view.log.of(Overdue)


async def test_a_lost_gpu_is_told_to_who_begins_a_forward(softcuda):
    async with engine(softcuda) as (view, stream):
        with view.cache.request(TOKENS) as request:
            request.extend(len(TOKENS))
            softcuda.poison("cuMemcpyAsync", ILLEGAL_ADDRESS)
            with view.cache.forward([request], stream=stream.stream):
                spoils(view, stream, request.page_table["kv"][:1])
            await until(lambda: not view.cache._runtime.driver._open_brackets)
            with (
                pytest.raises(DeviceError, match="GPU 0 is lost"),
                view.cache.forward([request], stream=stream.stream),
            ):
                pass
        assert view.pool.free == 8


async def test_what_a_forward_wrote_on_a_gpu_that_died_is_never_stored(softcuda):
    store = await memory_store()
    async with engine(softcuda, store, check=False) as (view, stream):
        with softcuda.gate(FORWARDS) as gate:
            with view.cache.request(TOKENS) as request:
                request.extend(len(TOKENS))
                softcuda.poison("cuMemcpyAsync", ILLEGAL_ADDRESS)
                with view.cache.forward([request], stream=stream.stream):
                    computes(view, stream, request, TOKENS)
                request.commit(len(TOKENS))
            await to_thread(gate.wait_held)
            gate.open()
        assert await view.cache.drain() == 0
        assert not store._pages
        assert view.cache.statistics().leaked_pages == 0
