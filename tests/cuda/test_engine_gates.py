"""Streams that wait for layers read the loaded bytes, and never wait for ever."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager, contextmanager

import anyio
import pytest

from asyncache.core import DeviceError, OrderError
from asyncache.devices import CudaDevice
from asyncache.engine import Limits
from asyncache.testing import GateStore
from tests.cuda.rig import ILLEGAL_ADDRESS, OUT_OF_MEMORY, device_memory, gpu, model
from tests.engine.blocking import blocking_scene
from tests.engine.scene import (
    KV,
    LAYOUT,
    PAGE,
    content,
    gate_store,
    memory_store,
    prompt,
    scene,
    staged,
)
from tests.softcuda import Direction

TOKENS = prompt(3)
HASTY = Limits(gate_s=0.05, close_s=5.0, breaker_s=0.001, retry_s=0.001)
PATIENT = Limits(gate_s=20.0, close_s=5.0, breaker_s=0.001, retry_s=0.001)
PATIENCE_S = 10.0
each_way = pytest.mark.parametrize("waits", ["fences", "words"])
LINK = {"layer_groups": 2, "batch_bytes": 128, "num_batches": 4}


@asynccontextmanager
async def engine(softcuda, store, *, waits, limits=PATIENT):
    """Open a cache on a GPU, and a model; its stream has run all before the close."""
    async with gpu(softcuda, waits=waits) as device:
        with model(softcuda) as stream:
            async with scene(
                device=device, linker=staged(store, **LINK), limits=limits
            ) as view:
                yield view, stream
                await to_thread(stream.run)


async def to_thread(function, *args):
    with anyio.fail_after(PATIENCE_S):
        return await anyio.to_thread.run_sync(function, *args)


def read_layers(view, stream, request, gates) -> list[list]:
    """Have the stream wait for each layer, and read its pages at once."""
    table = request.page_table["kv"]
    found = []
    for layer in range(KV.num_layers):
        gates.wait_stream(layer, stream.stream)
        pages = [view.device.tensor("kv")[page, layer] for page in table[:3]]
        found.append([stream.read(page) for page in pages])
    return found


def check_layers(found) -> None:
    size = LAYOUT.space(KV).layer_bytes
    for layer, pages in enumerate(found):
        for position, page in enumerate(pages):
            whole = content(TOKENS, position)
            wanted = whole[layer * size : (layer + 1) * size]
            assert bytes(page.numpy()) == wanted, (layer, position)


@each_way
async def test_a_stream_reads_each_layer_once_it_has_landed(waits, softcuda):
    store = await memory_store(TOKENS)
    async with engine(softcuda, store, waits=waits) as (view, stream):
        shut = softcuda.gate(Direction.HOST_TO_DEVICE)
        with shut as gate, view.cache.request(TOKENS) as request:
            hit = await request.restore()
            gates = view.cache.gates([request])
            await to_thread(gate.wait_held)
            with view.cache.forward([request], stream=stream.stream):
                found = await to_thread(read_layers, view, stream, request, gates)
            assert not stream.is_done
            await to_thread(gate.let_pass, 4)
            await to_thread(stream.run)
            check_layers(found)
            await hit.wait()
            assert hit.num_tokens == 3 * PAGE


async def test_with_words_a_stream_may_wait_before_the_load_has_begun(softcuda):
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with engine(softcuda, store, waits="words") as (view, stream):
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            await store.get_gate.wait_arrived()
            with view.cache.forward([request], stream=stream.stream):
                found = read_layers(view, stream, request, hit.gates)
            assert not stream.is_done
            store.get_gate.open()
            await to_thread(stream.run)
            check_layers(found)
            await hit.wait()


async def test_with_fences_the_loop_may_wait_only_for_what_has_begun(softcuda):
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with engine(softcuda, store, waits="fences") as (view, stream):
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            with pytest.raises(OrderError, match="event loop's thread"):
                hit.gates.wait_stream(0, stream.stream)
            assert stream.is_done
            with view.cache.forward([request], stream=stream.stream):
                async with anyio.create_task_group() as group:
                    found = []

                    async def wait() -> None:
                        args = (read_layers, view, stream, request, hit.gates)
                        found.extend(await to_thread(*args))

                    group.start_soon(wait)
                    await store.get_gate.wait_arrived()
                    store.get_gate.open()
            await to_thread(stream.run)
            check_layers(found)
            hit.gates.wait_stream(
                1, stream.stream
            )  # it has landed: nothing to wait for
            await hit.wait()


# A load that fails.


async def is_refused(view, store, softcuda):
    softcuda.refuse("cuMemcpyBatchAsync", OUT_OF_MEMORY, nth=2)
    store.get_gate.open()


async def cannot_tell_streams(view, store, softcuda):
    softcuda.refuse("cuStreamWriteValue32", OUT_OF_MEMORY)
    store.get_gate.open()


async def loses_a_page(view, store, softcuda):
    store._inner._pages.clear()
    store.get_gate.open()


async def is_detached(view, store, softcuda):
    await view.cache.detach()


async def is_reset(view, store, softcuda):
    view.cache.reset()


async def never_comes(view, store, softcuda):
    return


@pytest.mark.parametrize(
    "fails",
    [
        is_refused,
        cannot_tell_streams,
        loses_a_page,
        is_detached,
        is_reset,
        never_comes,
    ],
)
async def test_a_load_that_fails_lets_the_streams_go_on_that_wait_for_it(
    fails, softcuda
):
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    limits = HASTY if fails is never_comes else PATIENT
    async with engine(softcuda, store, waits="words", limits=limits) as (view, stream):
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            await store.get_gate.wait_arrived()
            with view.cache.forward([request], stream=stream.stream):
                read_layers(view, stream, request, hit.gates)
            assert not stream.is_done
            await fails(view, store, softcuda)
            await to_thread(stream.run)
            store.get_gate.open()
            await hit.wait()
            view.finish(request, TOKENS, hit.num_tokens)


@pytest.mark.parametrize("nth", [2, 4])  # of four copies
async def test_a_gpu_that_dies_under_a_load_ends_it_though_streams_wait(nth, softcuda):
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with gpu(softcuda, waits="words") as device:
        with model(softcuda) as stream:
            async with scene(
                device=device, linker=staged(store, **LINK), limits=PATIENT
            ) as view:
                with view.cache.request(TOKENS) as request:
                    hit = await request.restore()
                    await store.get_gate.wait_arrived()
                    with view.cache.forward([request], stream=stream.stream):
                        read_layers(view, stream, request, hit.gates)
                    softcuda.poison("cuMemcpyBatchAsync", ILLEGAL_ADDRESS, nth=nth)
                    store.get_gate.open()
                    with anyio.fail_after(PATIENCE_S):
                        await hit.wait()
                    assert hit.num_tokens == 0
                    assert hit.gates.is_open(1)


@pytest.mark.parametrize("end", ["abort", "suspend", "close"])
async def test_a_load_that_nobody_wants_any_more_lets_streams_go_on(end, softcuda):
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with gpu(softcuda, waits="words") as device:
        with model(softcuda) as stream:
            async with scene(
                device=device, linker=staged(store, **LINK), check=False
            ) as view:
                with view.cache.request(TOKENS) as request:
                    hit = await request.restore()
                    await store.get_gate.wait_arrived()
                    with view.cache.forward([request], stream=stream.stream):
                        read_layers(view, stream, request, hit.gates)
                    match end:
                        case "abort":
                            view.cache.abort(request)
                        case "suspend":
                            request.suspend()
                        case "close":
                            await view.cache.aclose()
                    await to_thread(stream.run)


async def test_a_stream_that_cannot_be_told_raises_and_leaves_the_load_alone(softcuda):
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with engine(softcuda, store, waits="words") as (view, stream):
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            softcuda.refuse("cuStreamWaitValue32", OUT_OF_MEMORY)
            with pytest.raises(DeviceError, match="could not be told"):
                hit.gates.wait_stream(0, stream.stream)
            store.get_gate.open()
            await hit.wait()
            assert hit.num_tokens == 3 * PAGE


# The blocking face.


@contextmanager
def blocking_engine(softcuda, store, *, waits, limits=PATIENT, **arguments):
    with device_memory(softcuda, LAYOUT, 8) as tensors, model(softcuda) as stream:
        device = CudaDevice.adopt(LAYOUT, tensors, waits=waits)
        try:
            with blocking_scene(
                device=device,
                linker=staged(store, **LINK),
                limits=limits,
                **arguments,
            ) as view:
                yield view, stream
                run(stream)
        finally:
            anyio.run(device.aclose)


def run(stream) -> None:
    """Block this thread, as an embedder does, until the stream has run all."""
    thread = threading.Thread(target=stream.run)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@each_way
def test_the_owner_of_a_blocking_cache_may_have_a_stream_wait(waits, softcuda):
    store = anyio.run(memory_store, TOKENS)
    with (
        blocking_engine(softcuda, store, waits=waits) as (view, stream),
        view.cache.request(TOKENS) as request,
    ):
        hit = request.restore()
        with view.cache.forward([request], stream=stream.stream):
            found = read_layers(view, stream, request, hit.gates)
        run(stream)
        check_layers(found)
        assert hit.wait().num_tokens == 3 * PAGE


def test_a_stream_goes_on_though_its_owner_waits_for_it_and_no_page_comes(softcuda):
    """The owner blocks in the driver, and rings no clock: somebody else has to."""

    async def held() -> GateStore:
        store = await gate_store(TOKENS, is_open=True)
        store.get_gate.close()
        return store

    store = anyio.run(held)
    with blocking_engine(softcuda, store, waits="words", limits=HASTY) as (
        view,
        stream,
    ):
        with view.cache.request(TOKENS) as request:
            hit = request.restore()
            with view.cache.forward([request], stream=stream.stream):
                read_layers(view, stream, request, hit.gates)
            run(stream)
            assert hit.wait().num_tokens == 0
        view.open(store.get_gate)


def test_a_stream_does_not_wait_for_a_load_that_no_thread_will_run(softcuda):
    store = anyio.run(memory_store, TOKENS)
    arguments = {"waits": "words", "launch": "batch", "check": False}
    with (
        blocking_engine(softcuda, store, **arguments) as (view, stream),
        view.cache.request(TOKENS) as request,
    ):
        hit = request.restore()
        thread = view.cache._thread
        thread.cancel()
        view.until(lambda: thread.is_over)
        assert not hit.gates.is_open(0)
        with view.cache.forward([request], stream=stream.stream):
            read_layers(view, stream, request, hit.gates)
        run(stream)
