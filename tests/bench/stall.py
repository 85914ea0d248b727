"""The longest stretch for which a cache keeps the event loop from everybody else."""

from __future__ import annotations

import asyncio
import tempfile
import time
from asyncio.events import Handle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from asyncache.devices import CpuDevice
from asyncache.engine import KVCache
from asyncache.stores import FileStore, MemoryStore, Store
from tests.bench import inputs
from tests.bench.measure import Row

NUM_TOKENS = 32_768
NUM_PAGES = NUM_TOKENS // inputs.PAGE_TOKENS
PAGE_BYTES = 16 * 2**10
BOUND_MS = 5.0


class Stretches:
    """The longest stretch on the loop, by phase.

    A stretch is one callback of the loop: a task's run from one await to the next.
    """

    def __init__(self) -> None:
        self.longest_s: defaultdict[str, float] = defaultdict(float)
        self._phase = ""

    async def phase(self, name: str) -> None:
        """Begin a phase, with a stretch of its own."""
        self._phase = name
        await asyncio.sleep(0)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Time every callback of every loop."""
        run, longest_s = Handle._run, self.longest_s

        def timed(handle: Handle) -> None:
            phase, start = self._phase, time.perf_counter()
            run(handle)
            longest_s[phase] = max(longest_s[phase], time.perf_counter() - start)

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
    num_rounds = min(num_rounds, 7)
    memory, files = [], []
    for _ in range(num_rounds):
        store = _KeptStore(2**30)
        memory.append(_run_once(store, store))
        with tempfile.TemporaryDirectory(prefix="asyncache-bench-") as folder:
            files.append(_run_once(FileStore(folder), FileStore(folder)))
    yield from _rows("MemoryStore", memory)
    yield from _rows("FileStore", files)


def _rows(store: str, runs: list[dict[str, float]]) -> Iterator[Row]:
    longest = {phase: median(run[phase] for run in runs) for phase in runs[0]}
    for phase, seconds in longest.items():
        yield Row(
            name=f"longest stretch, {store}: {phase}",
            ours=1e3 * seconds,
            unit="ms",
            bound=BOUND_MS,
        )


def _run_once(*stores: Store) -> dict[str, float]:
    """Serve once with each store; the later ones have what the first was given."""
    stretches = Stretches()
    with stretches.watch():
        asyncio.run(_serve_with(stores, stretches))
    del stretches.longest_s[""]
    return dict(stretches.longest_s)


async def _serve_with(stores: Sequence[Store], stretches: Stretches) -> None:
    layout = inputs.layout(PAGE_BYTES)
    device = CpuDevice(layout, num_pages=2 * NUM_PAGES)
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
