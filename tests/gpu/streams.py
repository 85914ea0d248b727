"""Streams that wait at gates: what it costs, and that nothing is read too early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from statistics import median
from typing import Literal, Self

import anyio
import anyio.to_thread
from cuda.bindings import driver

from asyncache.core import PageKey
from asyncache.devices._pooled import Direction
from asyncache.engine import KVCache, Request
from asyncache.linkers import StoreLinker
from asyncache.stores import MemoryStore, PageBuffers, Status
from tests.bench import inputs, wakes
from tests.bench.gpus import check
from tests.gpu.report import Line, Run

NUM_LAYERS, NUM_PAGES, LAYER_BYTES = 8, 16, 8192
NUM_ROUNDS, NUM_SMALL_ROUNDS = 50, 3


class _HeldStore(MemoryStore):
    """Reads nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__(2**30)
        self.may_read = anyio.Event()

    async def get_into(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None = None,
    ) -> list[Status]:
        await self.may_read.wait()
        return await super().get_into(keys, targets, layers)


def run(run: Run) -> Iterator[Line]:
    """Enqueue what reads pages before they are there, in both kinds of waiting."""
    yield asyncio.run(_measure(run, "words"))
    yield asyncio.run(_measure(run, "fences"))


async def _measure(run: Run, waits: Literal["fences", "words"]) -> Line:
    layout = inputs.layout(NUM_LAYERS * LAYER_BYTES, NUM_LAYERS)
    device = run.gpu.open(layout, 2 * NUM_PAGES, waits=waits)
    store = _HeldStore()
    linker = StoreLinker(
        store,
        device,
        layer_groups=NUM_LAYERS,
        batch_bytes=NUM_PAGES * NUM_LAYERS * LAYER_BYTES,
        num_batches=NUM_LAYERS,  # one a layer: the copies of all begin, and none ends
    )
    costs_us: list[float] = []
    try:
        with run.gpu.current(), wakes.opened_gate() as gate, _Reader() as reader:
            async with KVCache(layout, device=device, linker=linker) as cache:
                bench = _Bench(cache, store, reader)
                await bench.fill()
                shut = partial(gate.shut, device._streams[Direction.INTO_PAGES])
                one_round = bench.words if waits == "words" else bench.fences
                for _ in range(NUM_SMALL_ROUNDS if run.is_small else NUM_ROUNDS):
                    costs_us += await one_round(shut, gate.open)
    finally:
        await device.aclose()
    when = {
        "words": "before its copies have begun",
        "fences": "while its copies are stopped",
    }
    return Line(
        what=f"wait_stream(), {waits}: a layer, {when[waits]}",
        median_us=median(costs_us),
        p99_us=sorted(costs_us)[int(0.99 * len(costs_us))],
        is_right=True,
        note="what the stream read behind it is what was stored",
    )


class _Reader(AbstractContextManager["_Reader"]):
    """A stream that copies pages away: a forward, as far as gates go."""

    def __enter__(self) -> Self:
        self.stream = int(check(driver.cuStreamCreate(1)))
        self._num_bytes = NUM_PAGES * NUM_LAYERS * LAYER_BYTES
        self._there = int(check(driver.cuMemAlloc(self._num_bytes)))
        return self

    def __exit__(self, *_: object) -> None:
        check(driver.cuStreamSynchronize(self.stream))
        check(driver.cuMemFree(self._there))
        check(driver.cuStreamDestroy(self.stream))

    def read(self, layer: int, sources: Sequence[int]) -> None:
        """Enqueue that a layer of pages, at these addresses, is copied."""
        for place, source in enumerate(sources):
            target = self._there + (place * NUM_LAYERS + layer) * LAYER_BYTES
            check(driver.cuMemcpyAsync(target, source, LAYER_BYTES, self.stream))

    def result(self) -> bytes:
        """Wait, and return what was read, page after page."""
        check(driver.cuStreamSynchronize(self.stream))
        found = bytearray(self._num_bytes)
        check(driver.cuMemcpyDtoH(found, self._there, self._num_bytes))
        return bytes(found)


class _Bench:
    """A prompt whose pages are in a store."""

    def __init__(self, cache: KVCache, store: _HeldStore, reader: _Reader) -> None:
        self._cache = cache
        self._device = cache._device
        self._store = store
        self._reader = reader
        self._prompt = list(range(NUM_PAGES * inputs.PAGE_TOKENS + 1))
        self._expected = b""

    async def fill(self) -> None:
        """Store pages that differ."""
        cache, num_tokens = self._cache, len(self._prompt) - 1
        num_bytes = NUM_PAGES * NUM_LAYERS * LAYER_BYTES
        self._expected = bytes(place * 251 // 4096 % 256 for place in range(num_bytes))
        with cache.request(self._prompt) as request:
            request.extend(num_tokens)
            pages = request.page_table["kv"]
            await self._device.write_pages("kv", pages, memoryview(self._expected))
            with cache.forward([request], stream=self._reader.stream):
                request.commit(num_tokens)
        assert await cache.drain() == 0

    async def words(
        self, shut: Callable[[], object], let_go: Callable[[], object]
    ) -> list[float]:
        """Enqueue all that reads before the store has answered."""
        del shut, let_go
        with self._begin() as request:
            hit = await request.restore()
            with self._cache.forward([request], stream=self._reader.stream):
                costs_us = self._enqueue(request, hit.gates.wait_stream)
                assert not hit.gates.is_open(0)
                self._store.may_read.set()
            await self._compare(request)
            await hit.wait()
        return costs_us

    async def fences(
        self, shut: Callable[[], object], let_go: Callable[[], object]
    ) -> list[float]:
        """Enqueue all that reads while the copy stream stands still."""
        shut()
        with self._begin() as request:
            hit = await request.restore()
            self._store.may_read.set()
            with self._cache.forward([request], stream=self._reader.stream):
                last, wait = NUM_LAYERS - 1, hit.gates.wait_stream
                # Blocks until the copies have begun; they cannot end.
                await anyio.to_thread.run_sync(wait, last, self._reader.stream)
                assert not hit.gates.is_open(0)
                costs_us = self._enqueue(request, wait)
                let_go()
            await self._compare(request)
            await hit.wait()
        return costs_us

    def _begin(self) -> Request:
        self._cache.reset()
        self._store.may_read = anyio.Event()
        # What was there before must not be taken for what is loaded.
        for page in range(self._device.num_pages["kv"]):
            for layer in range(NUM_LAYERS):
                address = self._address(page, layer)
                check(driver.cuMemsetD8Async(address, 0xEE, LAYER_BYTES, self._stream))
        check(driver.cuStreamSynchronize(self._stream))
        return self._cache.request(self._prompt)

    @property
    def _stream(self) -> int:
        return self._reader.stream

    def _enqueue(
        self, request: Request, wait: Callable[[int, int], object]
    ) -> list[float]:
        costs_us, pages = [], request.page_table["kv"][:NUM_PAGES]
        for layer in range(NUM_LAYERS):
            start = time.perf_counter()
            wait(layer, self._stream)
            costs_us.append(1e6 * (time.perf_counter() - start))
            self._reader.read(layer, [self._address(page, layer) for page in pages])
        return costs_us

    def _address(self, page: int, layer: int) -> int:
        return int(self._device.layer("kv", layer)[page].data_ptr())

    async def _compare(self, request: Request) -> None:
        found = await anyio.to_thread.run_sync(self._result)
        assert found == self._expected, f"{request!r} was read too early"

    def _result(self) -> bytes:
        context = self._device._context
        with context:
            return self._reader.result()
