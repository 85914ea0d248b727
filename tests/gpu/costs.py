"""What the host pays: to begin copies, to open and close a device, to pin memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from statistics import median

from tests.bench import cuda, inputs
from tests.gpu.report import Line, Run

PINNED_BYTES = 2**30
SMALL_PINNED_BYTES = 2**23
NUM_ROUNDS, NUM_SMALL_ROUNDS = 200, 5


def run(run: Run) -> Iterator[Line]:
    """Begin copies of 4,096 pages; open, pin and close."""
    for shape in cuda.SHAPES:
        num_rounds = NUM_SMALL_ROUNDS if run.is_small else NUM_ROUNDS
        found = asyncio.run(cuda.submit(run.gpu, shape, num_rounds))
        yield Line(
            what=f"begin {cuda.NUM_PAGES} page copies, {shape.name}",
            median_us=found.whole_us,
            note=f"{found.checks_us:.0f} us checks, {found.table_us:.0f} us table, "
            f"{found.call_us:.0f} us driver call",
        )
    yield from asyncio.run(_open_and_close(run))


async def _open_and_close(run: Run) -> list[Line]:
    num_bytes = SMALL_PINNED_BYTES if run.is_small else PINNED_BYTES
    opened, pinned, unpinned, closed = [], [], [], []
    for _ in range(5):
        start = time.perf_counter()
        device = run.gpu.open(inputs.layout(), 4)
        opened.append(time.perf_counter() - start)
        start = time.perf_counter()
        memory = await device.allocate_staging(num_bytes)
        pinned.append(time.perf_counter() - start)
        start = time.perf_counter()
        await device.free_staging(memory)
        unpinned.append(time.perf_counter() - start)
        start = time.perf_counter()
        await device.aclose()
        closed.append(time.perf_counter() - start)
    mib = num_bytes / 2**20
    return [
        Line(what="open a device", median_us=1e6 * median(opened)),
        Line(what="close a device", median_us=1e6 * median(closed)),
        Line(
            what=f"make {mib:.0f} MiB of pinned memory",
            median_us=1e6 * median(pinned),
            gb_per_s=num_bytes / median(pinned) / 1e9,
            note="touched and registered",
        ),
        Line(
            what=f"unpin {mib:.0f} MiB",
            median_us=1e6 * median(unpinned),
            gb_per_s=num_bytes / median(unpinned) / 1e9,
        ),
    ]
