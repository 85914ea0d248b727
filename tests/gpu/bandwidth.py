"""Bytes a second, in pages, beside one large copy of as many bytes."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator
from statistics import median

import numpy as np
from cuda.bindings import driver

from asyncache.devices import CudaDevice, PageOrder
from tests.bench import inputs
from tests.bench.gpus import Gpu, check
from tests.gpu.report import Line, Run, in_turns

KIB, MIB = 2**10, 2**20
NUM_LAYERS = 8
TOTAL_BYTES, SMALL_TOTAL_BYTES = 256 * MIB, 4 * MIB
PAGE_BYTES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
PIECES_A_CALL = 4096
"""As many as an engine may give at once, give or take."""

Work = Callable[[], Awaitable[float]]


def run(run: Run) -> Iterator[Line]:
    """Copy pages of each size, in each order, both ways."""
    settings = [(size, order) for size in PAGE_BYTES for order in PageOrder]
    for place, (page_bytes, order) in enumerate(settings):
        budget_s = run.share(len(settings) - place)
        yield from asyncio.run(_measure(run, page_bytes, order, budget_s))


async def _measure(
    run: Run, page_bytes: int, order: PageOrder, budget_s: float
) -> list[Line]:
    total = SMALL_TOTAL_BYTES if run.is_small else TOTAL_BYTES
    pages = _Pages(run.gpu, page_bytes, order, total)
    ordinary = np.ones(total, dtype=np.uint8).data  # touched, as zeros are not
    try:
        await pages.open()
        large = _Large(run.gpu, pages.memory, total)
        with large:
            seconds = await in_turns(
                [pages.write, large.write, pages.read, large.read], 0.9 * budget_s
            )
            slow: list[list[float]] = [[], []]
            if order is PageOrder.PAGE_FIRST:
                pages.memory = ordinary
                slow = await in_turns([pages.write, pages.read], 0.1 * budget_s)
    finally:
        await pages.device.aclose()
    name = f"{page_bytes // KIB} KiB pages, {order.value.replace('_', '-')}"
    lines = []
    for place, direction in enumerate(("H2D", "D2H")):
        ours_s, large_s = (median(s) for s in seconds[2 * place : 2 * place + 2])
        note = f"to one copy, {total / large_s / 1e9:.1f} GB/s"
        if slow[place]:
            pageable_s = median(slow[place])
            note += f"; with pageable memory {total / pageable_s / 1e9:.1f}"
        line = Line(
            what=f"{direction}, {name}",
            median_us=1e6 * ours_s,
            gb_per_s=total / ours_s / 1e9,
            ratio=large_s / ours_s,
            note=note,
        )
        lines.append(line)
    return lines


class _Pages:
    """Copies pages, in no order, a few thousand pieces a call."""

    def __init__(
        self, gpu: Gpu, page_bytes: int, order: PageOrder, total_bytes: int
    ) -> None:
        self._num_pages = total_bytes // page_bytes
        self._page_bytes = page_bytes
        layout = inputs.layout(page_bytes, NUM_LAYERS)
        self.device: CudaDevice = gpu.open(layout, self._num_pages, order=order)
        self._total_bytes = total_bytes
        is_whole = order is PageOrder.PAGE_FIRST
        self._step = PIECES_A_CALL // (1 if is_whole else NUM_LAYERS)
        ids = random.Random(0).sample(range(self._num_pages), self._num_pages)
        self._ids = array("i", ids)
        self.memory = memoryview(b"")

    async def open(self) -> None:
        """Make the pinned memory."""
        self.memory = await self.device.allocate_staging(self._total_bytes)

    async def write(self) -> float:
        """Copy all pages to the GPU."""
        return await self._copy(self.device.start_write)

    async def read(self) -> float:
        """Copy all pages from the GPU."""
        return await self._copy(self.device.start_read)

    async def _copy(self, begin: Callable[..., object]) -> float:
        start, size = time.perf_counter(), self._page_bytes
        copies = [
            begin(
                "kv",
                self._ids[first : first + self._step],
                self.memory[first * size : (first + self._step) * size],
            )
            for first in range(0, self._num_pages, self._step)
        ]
        for copy in copies:
            await copy.wait()
        return time.perf_counter() - start


class _Large:
    """One copy of all bytes, from and to the same pinned memory."""

    def __init__(self, gpu: Gpu, memory: memoryview, num_bytes: int) -> None:
        self._context = gpu.current()
        self._host = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        self._num_bytes = num_bytes

    def __enter__(self) -> None:
        self._context.__enter__()
        self._there = int(check(driver.cuMemAlloc(self._num_bytes)))
        self._stream = check(driver.cuStreamCreate(1))

    def __exit__(self, *error: object) -> None:
        check(driver.cuStreamDestroy(self._stream))
        check(driver.cuMemFree(self._there))
        self._context.__exit__(*error)

    async def write(self) -> float:
        """Copy to the GPU."""
        return self._copy(self._there, self._host)

    async def read(self) -> float:
        """Copy from the GPU."""
        return self._copy(self._host, self._there)

    def _copy(self, target: int, source: int) -> float:
        start = time.perf_counter()
        check(driver.cuMemcpyAsync(target, source, self._num_bytes, self._stream))
        check(driver.cuStreamSynchronize(self._stream))
        return time.perf_counter() - start
