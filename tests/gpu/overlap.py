"""A load under a forward: gates a layer, beside load-then-compute, bit by bit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from statistics import median
from typing import Literal

import anyio.to_thread
import torch

from asyncache.core import AttentionPool, KVLayout
from asyncache.devices import CudaDevice
from asyncache.engine import Gates, KVCache, Request
from asyncache.linkers import StoreLinker
from asyncache.stores import MemoryStore
from tests.gpu.model import LARGE, SMALL, Model
from tests.gpu.report import Line, Run, in_turns

PAGE_TOKENS = 16
LOAD = "load alone"
LAYER_GROUPS = {True: 2, False: 8}
Wait = Callable[[Gates, int, int | None], None]


def _wait_blocking(gates: Gates, layer: int, stream: int | None) -> None:
    del stream
    gates.wait_blocking(layer)


def _wait_stream(gates: Gates, layer: int, stream: int | None) -> None:
    gates.wait_stream(layer, stream)


def run(run: Run) -> Iterator[Line]:
    """Load and compute one after the other, and at once in three ways."""
    return iter(asyncio.run(_measure(run)))


async def _measure(run: Run) -> list[Line]:
    async with AsyncExitStack() as stack:
        fences = await stack.enter_async_context(_bench(run, "fences"))
        works: dict[str, Callable[[], Awaitable[float]]] = {
            "load, then compute": fences.load_then_compute,
            "compute alone": fences.compute,
            LOAD: fences.load,
            "overlapped, wait_blocking()": partial(fences.overlap, _wait_blocking),
        }
        skipped = []
        if run.is_small:
            note = "not run: needs a GPU, for torch.cuda has to wait"
            skipped = [
                Line(what=f"overlapped, wait_stream(), {kind}", note=note)
                for kind in ("fences", "words")
            ]
        else:
            words = await stack.enter_async_context(_bench(run, "words"))
            name = "overlapped, wait_stream()"
            works[f"{name}, fences"] = partial(fences.overlap, _wait_stream)
            works[f"{name}, words"] = partial(words.overlap, _wait_stream)
        found = await in_turns(list(works.values()), 0.8 * run.share(1))
    seconds = dict(zip(works, found, strict=True))
    base_s = median(seconds["load, then compute"])
    lines = [
        Line(
            what=name,
            median_us=1e6 * median(taken),
            gb_per_s=fences.num_bytes / median(taken) / 1e9 if name == LOAD else None,
            ratio=median(taken) / base_s,
            is_right=None if name == LOAD else True,  # what it computed was compared
            note="to load, then compute",
        )
        for name, taken in seconds.items()
    ]
    return lines + skipped


@asynccontextmanager
async def _bench(run: Run, waits: Literal["fences", "words"]) -> AsyncIterator[_Bench]:
    shape = SMALL if run.is_small else LARGE
    pool = AttentionPool(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype="bfloat16",
    )
    layout = KVLayout(model="overlap", page_tokens=PAGE_TOKENS, pools=(pool,))
    num_tokens = shape.num_old_tokens + shape.num_new_tokens
    device = run.gpu.open(layout, 2 * num_tokens // PAGE_TOKENS + 2, waits=waits)
    num_bytes = shape.num_old_tokens // PAGE_TOKENS * layout.space(pool).page_bytes
    store = MemoryStore(4 * num_bytes)
    groups = LAYER_GROUPS[run.is_small]
    linker = StoreLinker(store, device, layer_groups=groups)
    model = Model(shape, "cpu" if run.is_small else "cuda")
    try:
        async with KVCache(layout, device=device, linker=linker) as cache:
            bench = _Bench(cache, device, model, num_bytes)
            await bench.fill()
            yield bench
    finally:
        await device.aclose()


class _Bench:
    """A prompt whose first tokens are in a store, and the forward over it."""

    def __init__(
        self, cache: KVCache, device: CudaDevice, model: Model, num_bytes: int
    ) -> None:
        self.num_bytes = num_bytes
        self._cache = cache
        self._device = device
        self._model = model
        self._num_old = model.shape.num_old_tokens
        self._prompt = list(range(self._num_old + model.shape.num_new_tokens))
        self._pool = device.tensor("kv")
        is_gpu = self._pool.is_cuda
        self._stream = torch.cuda.Stream() if is_gpu else None
        self._handle = self._stream.cuda_stream if is_gpu else None
        self._expected: torch.Tensor | None = None

    async def fill(self) -> None:
        """Write random keys and values, have them stored, and compute over them."""
        cache = self._cache
        generator = torch.Generator(self._pool.device).manual_seed(1)
        with cache.request(self._prompt) as request:
            request.extend(self._num_old)
            with cache.forward([request], stream=self._handle):
                self._randomize(self._pages(request), generator)
                request.commit(self._num_old)
            self._expected = await self._forward(request, None, _wait_blocking)
        left = await cache.drain()
        assert left == 0, f"{left} transfers are left"

    def _randomize(self, pages: torch.Tensor, generator: torch.Generator) -> None:
        with torch.cuda.stream(self._stream):  # which does nothing for None
            shape = (len(pages), *self._pool.shape[1:])
            noise = torch.randn(shape, generator=generator, device=self._pool.device)
            self._pool[pages] = noise.to(self._pool.dtype)

    async def load(self) -> float:
        """Load, and compute nothing."""
        self._cache.reset()
        with self._cache.request(self._prompt) as request:
            start = time.perf_counter()
            await self._restore(request)
            return time.perf_counter() - start

    async def compute(self) -> float:
        """Compute over pages that have landed."""
        self._cache.reset()
        with self._cache.request(self._prompt) as request:
            await self._restore(request)
            request.extend(len(self._prompt))
            start = time.perf_counter()
            output = await self._forward(request, None, _wait_blocking)
            return self._check(output, start)

    async def load_then_compute(self) -> float:
        """Load all, then compute."""
        self._cache.reset()
        with self._cache.request(self._prompt) as request:
            start = time.perf_counter()
            await self._restore(request)
            request.extend(len(self._prompt))
            output = await self._forward(request, None, _wait_blocking)
            return self._check(output, start)

    async def overlap(self, wait: Wait) -> float:
        """Compute while the load runs: each layer waits for its pages."""
        self._cache.reset()
        with self._cache.request(self._prompt) as request:
            start = time.perf_counter()
            hit = await request.restore()
            request.extend(len(self._prompt))
            output = await self._forward(request, hit.gates, wait)
            seconds = self._check(output, start)
            await hit.wait()
            assert hit.num_tokens == self._num_old, hit
            return seconds

    async def _restore(self, request: Request) -> None:
        hit = await request.restore()
        await hit.wait()
        assert hit.num_tokens == self._num_old, hit
        assert hit.device_tokens == 0, hit

    async def _forward(
        self, request: Request, gates: Gates | None, wait: Wait
    ) -> torch.Tensor:
        """Run the model in a thread, until its result is there."""

        def on_layer(layer: int) -> None:
            if gates is not None:
                wait(gates, layer, self._handle)

        def compute() -> torch.Tensor:
            with torch.cuda.stream(self._stream):
                output = self._model.forward(self._pool, pages, on_layer)
            if self._stream is not None:
                self._stream.synchronize()
            return output

        with self._cache.forward([request], stream=self._handle):
            pages = self._pages(request)
            return await anyio.to_thread.run_sync(compute)

    def _pages(self, request: Request) -> torch.Tensor:
        ids = request.page_table["kv"][: self._num_old // PAGE_TOKENS]
        return torch.tensor(ids, device=self._pool.device)

    def _check(self, output: torch.Tensor, start: float) -> float:
        seconds = time.perf_counter() - start
        assert torch.equal(output, self._expected), "computed over other bytes"
        return seconds
