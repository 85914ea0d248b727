"""The longest stretch for which a cache keeps the event loop from everybody else."""

from __future__ import annotations

import asyncio
import tempfile
import time
from asyncio.events import Handle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from asyncache.devices import CpuDevice, PageOrder
from asyncache.engine import KVCache
from asyncache.stores import FileStore, MemoryStore, Store
from tests.bench import inputs
from tests.bench.measure import Row

NUM_TOKENS = 32_768
NUM_PAGES = NUM_TOKENS // inputs.PAGE_TOKENS
PAGE_BYTES = 16 * 2**10
BOUND_MS = 5.0
WORTH_A_ROW_MS = 1.0
POOLS = {PageOrder.PAGE_FIRST: 4, PageOrder.LAYER_FIRST: 32}
"""Layers by order: where layers come first, each page is that many pieces."""


class Stretch(NamedTuple):
    """One callback of the loop: a task's run from one await to the next."""

    cpu_s: float
    """What the loop's thread worked; other processes, and locks, do not count."""
    wall_s: float


class Stretches:
    """The longest stretch on the loop, by phase."""

    def __init__(self) -> None:
        self.longest: dict[str, Stretch] = {}
        self._phase = ""

    async def phase(self, name: str) -> None:
        """Begin a phase, with a stretch of its own."""
        self._phase = name
        await asyncio.sleep(0)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Time every callback of every loop."""
        run, longest = Handle._run, self.longest

        def timed(handle: Handle) -> None:
            phase, wall, cpu = self._phase, time.perf_counter(), time.thread_time()
            run(handle)
            stretch = Stretch(time.thread_time() - cpu, time.perf_counter() - wall)
            longest[phase] = max(longest.get(phase, stretch), stretch)

        Handle._run = timed
        try:
            yield
        finally:
            Handle._run = run


class _KeptStore(MemoryStore):
    """Outlives the caches that it is given to."""

    async def aclose(self) -> None:
        """Keep the pages."""


def run(num_rounds: int) -> Iterator[Row]:
    """Serve a prompt of 32k tokens, cold and then from the store."""
    for order, num_layers in POOLS.items():
        memory, files = [], []
        for _ in range(min(num_rounds, 7)):
            store = _KeptStore(2**30)
            memory.append(_run_once(order, store, store))
            with tempfile.TemporaryDirectory(prefix="asyncache-bench-") as folder:
                files.append(_run_once(order, FileStore(folder), FileStore(folder)))
        layers = f"{num_layers} layers {order.value.replace('_', '-')}"
        yield from _rows(f"MemoryStore, {layers}", memory)
        yield from _rows(f"FileStore, {layers}", files)


def _rows(setting: str, runs: list[dict[str, Stretch]]) -> Iterator[Row]:
    # Of each phase the run in the middle.
    middle = {
        phase: sorted(run[phase] for run in runs)[len(runs) // 2] for phase in runs[0]
    }
    worst_first = sorted(middle, key=lambda phase: middle[phase], reverse=True)
    for place, phase in enumerate(worst_first):
        cpu_ms, wall_ms = (1e3 * seconds for seconds in middle[phase])
        if not place or cpu_ms >= WORTH_A_ROW_MS:
            yield Row(
                name=f"longest stretch, {setting}: {phase}",
                ours=cpu_ms,
                unit="ms",
                against=f"{wall_ms:.1f} ms by the clock",
                bound=BOUND_MS,
            )


def _run_once(order: PageOrder, *stores: Store) -> dict[str, Stretch]:
    """Serve once with each store; the later ones have what the first was given."""
    stretches = Stretches()
    with stretches.watch():
        asyncio.run(_serve_with(order, stores, stretches))
    del stretches.longest[""]
    return stretches.longest


async def _serve_with(
    order: PageOrder, stores: Sequence[Store], stretches: Stretches
) -> None:
    layout = inputs.layout(PAGE_BYTES, POOLS[order])
    device = CpuDevice(layout, num_pages=2 * NUM_PAGES, order=order)
    prompt, expected = inputs.tokens(NUM_TOKENS), 0
    for store in stores:
        async with KVCache(layout, device=device, store=store) as cache:
            await _serve(cache, prompt, stretches, expected=expected)
        expected = NUM_TOKENS - inputs.PAGE_TOKENS


async def _serve(
    cache: KVCache, prompt: list[int], stretches: Stretches, *, expected: int
) -> None:
    phase, kind = stretches.phase, "warm" if expected else "cold"
    await phase(f"open, {kind}")
    with cache.request(prompt) as request:
        await phase(f"restore, {kind}")
        hit = await request.restore()
        await phase(f"load, {kind}")
        await hit.wait()
        assert hit.num_tokens == expected, hit
        await phase(f"extend, {kind}")
        request.extend(len(prompt))
        await phase(f"commit, {kind}")
        with cache.forward([request]):
            request.commit(len(prompt))
        await phase(f"offload, {kind}")
        assert await cache.drain() == 0
        await phase(f"release, {kind}")
    await phase("")
