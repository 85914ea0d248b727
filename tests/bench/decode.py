"""How much a decode step slows while pages are restored beside it.

The restore is held to a rate, and what it is compared with is a thread that reads the
same files with plain system calls at the same rate: the machine has two cores and one
memory, and whoever moves bytes takes a share.
"""

# A Path costs as much as the system calls that it would be made for.
# ruff: noqa: PTH123

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from statistics import median

import anyio
import anyio.to_thread
import torch

from asyncache.devices import CpuDevice
from asyncache.engine import KVCache
from asyncache.stores import FileStore
from tests.bench import inputs
from tests.bench.measure import Row

MIB = 2**20
PROMPT_PAGES = 8  # of a MiB each
PROMPT_BYTES = PROMPT_PAGES * MIB
NUM_PROMPTS = 6
NUM_STEPS = 60
# The target is for a rate that leaves the cores to the model.
BOUNDS = {200: 1.1, 1000: None}
LAYOUT = inputs.layout(MIB, 16)
PROMPTS = [
    inputs.tokens(PROMPT_PAGES * inputs.PAGE_TOKENS + 1, seed)
    for seed in range(NUM_PROMPTS)
]


def run(num_rounds: int) -> Iterator[Row]:
    """Decode beside a restore, beside a thread that reads, and alone, in turns."""
    for rate_mib in BOUNDS:
        with tempfile.TemporaryDirectory(prefix="asyncache-bench-") as folder:
            yield asyncio.run(_compare(folder, rate_mib, num_rounds))


async def _compare(folder: str, rate_mib: int, num_rounds: int) -> Row:
    await _fill(folder)
    step = _Decoder()
    rounds = [
        [
            await step.p50_s(beside)
            for beside in (
                _Pace(rate_mib).restoring(folder),
                _Pace(rate_mib).reading(folder),
                _Pace(rate_mib).idle(),
            )
        ]
        for _ in range(min(num_rounds, 11) + 1)
    ]
    # The first round warms up.
    restoring, reading, alone = map(median, zip(*rounds[1:], strict=True))
    return Row(
        name=f"decode step beside a restore of {rate_mib} MiB/s, p50",
        ours=1e3 * restoring,
        unit="ms",
        baseline=1e3 * reading,
        against=f"beside preadv of as much; {1e3 * alone:.2f} ms alone",
        bound=BOUNDS[rate_mib],
    )


async def _fill(folder: str) -> None:
    device = CpuDevice(LAYOUT, num_pages=PROMPT_PAGES + 1)
    async with KVCache(LAYOUT, device=device, store=FileStore(folder)) as cache:
        for prompt in PROMPTS:
            with cache.request(prompt) as request:
                request.extend(len(prompt))
                request.commit(len(prompt))
            assert await cache.drain() == 0


class _Decoder:
    """A step of a model: some milliseconds of one thread, which waits for memory."""

    def __init__(self) -> None:
        self._weights = torch.ones(6, 2048, 2048)
        self._state = torch.ones(1, 2048)

    async def p50_s(self, beside: AbstractAsyncContextManager[None]) -> float:
        """Return the median time from token to token."""
        times = []
        async with beside:
            for _ in range(NUM_STEPS):
                start = time.perf_counter()
                await anyio.to_thread.run_sync(self._step)
                times.append(time.perf_counter() - start)
        return median(times)

    def _step(self) -> None:
        for weights in self._weights:
            torch.mm(self._state, weights)


class _Pace:
    """Moves a prompt's pages again and again, at a rate, while something else runs."""

    def __init__(self, rate_mib: int) -> None:
        self._prompt_s = PROMPT_BYTES / MIB / rate_mib
        self._began = 0.0
        self._num_moved = 0

    @asynccontextmanager
    async def restoring(self, folder: str) -> AsyncIterator[None]:
        """Restore from files into a pool that has room for one prompt."""
        device = CpuDevice(LAYOUT, num_pages=PROMPT_PAGES + 1)
        async with KVCache(LAYOUT, device=device, store=FileStore(folder)) as cache:
            async with anyio.create_task_group() as group:
                self._began = time.perf_counter()
                group.start_soon(self._restore, cache)
                yield
                self._check()
                group.cancel_scope.cancel()
            loaded = cache.statistics().counters.loaded_pages
            assert loaded >= self._num_moved * PROMPT_PAGES

    async def _restore(self, cache: KVCache) -> None:
        for prompt in itertools.cycle(PROMPTS):
            with cache.request(prompt) as request:
                hit = await request.restore()
                await hit.wait()
                assert hit.num_tokens == PROMPT_PAGES * inputs.PAGE_TOKENS
            await anyio.sleep(self._ahead_s())

    @asynccontextmanager
    async def reading(self, folder: str) -> AsyncIterator[None]:
        """Read the same files in a thread, into a buffer of as many bytes."""
        stop = threading.Event()
        thread = threading.Thread(target=self._read, args=(folder, stop))
        self._began = time.perf_counter()
        thread.start()
        try:
            yield
            self._check()
        finally:
            stop.set()
            thread.join()

    def _read(self, folder: str, stop: threading.Event) -> None:
        paths = sorted(str(path) for path in Path(folder).rglob("*.kv"))
        size = Path(paths[0]).stat().st_size  # of a page and its head
        pages = [memoryview(bytearray(size)) for _ in range(PROMPT_PAGES)]
        prompts = [paths[i::NUM_PROMPTS] for i in range(NUM_PROMPTS)]
        for prompt in itertools.cycle(prompts):
            for path, page in zip(prompt, pages, strict=True):
                with open(path, "rb", buffering=0) as file:
                    assert os.preadv(file.fileno(), [page], 0) == size
            if stop.wait(self._ahead_s()):
                return

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Move nothing."""
        yield

    def _ahead_s(self) -> float:
        """Return for how long to wait, now that one more has been moved."""
        self._num_moved += 1
        due = self._began + self._num_moved * self._prompt_s
        return max(0.0, due - time.perf_counter())

    def _check(self) -> None:
        """Raise unless the rate was kept."""
        due = (time.perf_counter() - self._began) / self._prompt_s
        assert self._num_moved >= 0.8 * due - 1, (self._num_moved, due)
