"""What a copy costs the host to begin, and how soon a coroutine hears of its end.

On softcuda, or on the GPU where there is one: the rows say which.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from asyncache.devices import CudaDevice, PageOrder
from asyncache.devices._arguments import check_buffer, check_pages, check_unique
from asyncache.devices._pieces import buffer_pieces
from asyncache.devices._pooled import Direction
from tests.bench import inputs, wakes
from tests.bench.gpus import Gpu, pick_gpu
from tests.bench.measure import Row, Stopwatch, interleave_async

NUM_PAGES = 4096
NUM_LAYERS = 4
# Small, for the host pays by the piece; and softcuda, whose copies run on the CPU,
# would clear its caches between two rounds, as no GPU does.
LAYER_BYTES = 256
SUBMIT_BOUND_US = 250
WAKE_BOUND = 1.5


class Shape(NamedTuple):
    """How pages lie in memory, and which of their layers are copied."""

    name: str
    order: PageOrder
    layers: range
    bound_us: float | None


ALL, ONE = range(NUM_LAYERS), range(1)
SHAPES = (
    Shape("page-first", PageOrder.PAGE_FIRST, ALL, SUBMIT_BOUND_US),
    Shape("layer-first, one layer", PageOrder.LAYER_FIRST, ONE, SUBMIT_BOUND_US),
    Shape(f"layer-first, {NUM_LAYERS} layers", PageOrder.LAYER_FIRST, ALL, None),
)


@dataclass(frozen=True, slots=True)
class Submission:
    """Microseconds to begin copies, in all, and parts of them."""

    whole_us: float
    checks_us: float
    table_us: float
    call_us: float


def run(num_rounds: int) -> Iterator[Row]:
    """Begin copies of 4,096 pages, and wait for one copy at a time."""
    gpu = pick_gpu()
    for shape in SHAPES:
        found = asyncio.run(submit(gpu, shape, 5 * num_rounds))
        yield Row(
            name=f"begin {NUM_PAGES} page copies, {shape.name}",
            ours=found.whole_us,
            against=f"{found.checks_us:.0f} us checks, {found.table_us:.0f} us table, "
            f"{found.call_us:.0f} us driver call; {gpu.name}",
            bound=shape.bound_us,
        )
    yield asyncio.run(_wake(gpu, num_rounds))


async def submit(gpu: Gpu, shape: Shape, num_rounds: int) -> Submission:
    """Time how long ``start_write()`` keeps its caller, and its parts."""
    layers = shape.layers
    layout = inputs.layout(NUM_LAYERS * LAYER_BYTES, NUM_LAYERS)
    device = gpu.open(layout, 2 * NUM_PAGES, order=shape.order)
    pages = array("i", random.Random(0).sample(range(2 * NUM_PAGES), NUM_PAGES))
    memory = await device.allocate_staging(NUM_PAGES * len(layers) * LAYER_BYTES)
    call, calls_s = _TimedCall(device), []
    stream = device._streams[Direction.INTO_PAGES]

    async def begin() -> float:
        # Nothing runs meanwhile: softcuda's threads would take the time of ours.
        gate.shut(stream)
        with (watch := Stopwatch()):
            copy = device.start_write("kv", pages, memory, layers)
        gate.open()
        calls_s.append(call.seconds)
        await copy.wait()
        return watch.seconds

    checks, table = _parts(device, pages, memory, layers)
    with gpu.current(), wakes.opened_gate() as gate:
        seconds = await interleave_async(begin, checks, table, num_rounds=num_rounds)
        await device.aclose()
    return Submission(*(1e6 * part for part in (*seconds, median(calls_s))))


class _TimedCall:
    """Takes the time of the driver's call within ``start_write()``."""

    def __init__(self, device: CudaDevice) -> None:
        self.seconds = 0.0
        give = device._copies.give

        def timed(*arguments: object, **names: object) -> int:
            start = time.perf_counter()
            code = give(*arguments, **names)
            self.seconds = time.perf_counter() - start
            return code

        device._copies.give = timed


def _parts(
    device: CudaDevice, pages: array[int], memory: memoryview, layers: range
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return works that do what ``start_write()`` does before it calls the driver."""
    pool = device._pool("kv")
    ids = check_pages(pages, pool.num_pages)
    address = check_buffer(memory, NUM_PAGES, layers, pool).ctypes.data

    async def checks() -> float:
        with (watch := Stopwatch()):
            check_unique(check_pages(pages, pool.num_pages), pool.num_pages)
            check_buffer(memory, NUM_PAGES, layers, pool)
        return watch.seconds

    async def table() -> float:
        with (watch := Stopwatch()):
            buffer_pieces(pool, ids, layers, address)
        return watch.seconds

    return checks, table


async def _wake(gpu: Gpu, num_rounds: int) -> Row:
    found = await wakes.measure(gpu, num_in_flight=1, num_rounds=20 * num_rounds)
    return Row(
        name="from a copy's end to its coroutine, one in flight",
        ours=found.ours.median_us,
        baseline=found.bare.median_us,
        against=f"a thread in cuEventSynchronize, no more; {gpu.name}",
        bound=WAKE_BOUND,
    )
