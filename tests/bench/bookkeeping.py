"""What the engine itself costs: a restore without bytes, and a step without work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median

import anyio

from asyncache.core import KVLayout
from asyncache.devices import CpuDevice
from asyncache.engine import KVCache
from asyncache.stores import MemoryStore
from tests.bench import inputs
from tests.bench.measure import Row, Stopwatch, interleave_async

PAGE = inputs.PAGE_TOKENS
NUM_PROMPTS = 40
STEPS = 500


class _KeptStore(MemoryStore):
    """Outlives the caches that it is given to."""

    async def aclose(self) -> None:
        """Keep the pages."""


def run(num_rounds: int) -> Iterator[Row]:
    """Restore from memory, and step an idle cache."""
    yield asyncio.run(_restore(4, num_rounds, bound=6))
    yield asyncio.run(_restore(4, num_rounds, num_others=200))
    yield asyncio.run(_restore(384, num_rounds))
    yield asyncio.run(_idle_step(num_rounds))


async def _restore(
    num_pages: int,
    num_rounds: int,
    *,
    num_others: int = 0,
    bound: float | None = None,
) -> Row:
    layout, store = inputs.layout(), _KeptStore(2**30)
    prompts = [inputs.packed(num_pages * PAGE + 1, seed) for seed in range(NUM_PROMPTS)]
    views = [memoryview(prompt).cast("i") for prompt in prompts]
    room = NUM_PROMPTS * (num_pages + 1) + num_others
    device = CpuDevice(layout, num_pages=room)
    await _fill(layout, device, store, views)

    async def ours() -> float:
        watch = Stopwatch()
        async with KVCache(layout, device=device, store=store) as cache:
            with ExitStack() as others:
                for token in range(num_others):
                    others.enter_context(cache.request([token])).extend(1)
                for view in views:
                    with watch, cache.request(view) as request:
                        hit = await request.restore()
                        await hit.wait()
                        assert hit.num_tokens == num_pages * PAGE
            assert cache.statistics().counters.loaded_pages == num_pages * NUM_PROMPTS
        return watch.seconds / NUM_PROMPTS

    async def baseline() -> float:
        watch = Stopwatch()
        async with anyio.create_task_group() as group:
            for _ in range(NUM_PROMPTS):
                with watch:
                    event = anyio.Event()
                    group.start_soon(_set, event)
                    await event.wait()
        return watch.seconds / NUM_PROMPTS

    beside = f" beside {num_others} requests" if num_others else ""
    ours_s, baseline_s = await interleave_async(ours, baseline, num_rounds=num_rounds)
    return Row(
        name=f"restore {num_pages} pages from MemoryStore{beside}",
        ours=1e6 * ours_s,
        baseline=1e6 * baseline_s,
        against="one anyio task + Event",
        bound=bound,
    )


async def _set(event: anyio.Event) -> None:
    event.set()


async def _fill(
    layout: KVLayout, device: CpuDevice, store: MemoryStore, views: list[memoryview]
) -> None:
    async with KVCache(layout, device=device, store=store) as cache:
        for view in views:
            with cache.request(view) as request:
                request.extend(len(view))
                request.commit(len(view))
        assert await cache.drain() == 0


async def _idle_step(num_rounds: int) -> Row:
    layout = inputs.layout()
    device, watches = CpuDevice(layout, num_pages=8), []
    async with KVCache(layout, device=device, store=MemoryStore(2**20)) as cache:
        for _ in range(num_rounds):
            watches.append(watch := Stopwatch())
            with watch:
                for _ in range(STEPS):
                    await cache.step()
    seconds = median(watch.seconds for watch in watches)
    return Row(name="step() of an idle cache", ours=1e6 * seconds / STEPS, bound=5)
