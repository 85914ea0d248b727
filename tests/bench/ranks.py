"""A minimum over two processes, beside a bare all-reduce on a thread."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from array import array
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from asyncache.ranks import TorchGroup
from tests.bench.measure import Row, Stopwatch, interleave_async

# Below 8 items or so gloo sends fewer messages, and our header alone has 4.
SIZES = (16, 260, 4096)
"""int32 items: a ballot of a few slots, of 128 slots, and with a large mask."""
# Call by call: a round trip is mostly what the machine makes of it at the moment.
NUM_CALLS, NUM_TURNS = 1, 50


def run(num_rounds: int) -> Iterator[Row]:
    """Reduce vectors of some sizes, in turns, with a rank in another process."""
    with tempfile.TemporaryDirectory(prefix="asyncache-bench-") as folder:
        path = str(Path(folder, "store"))
        spawn = multiprocessing.get_context("spawn")
        # The other rank does all that this one does.
        other = spawn.Process(target=_reduce, args=(1, path, num_rounds), daemon=True)
        other.start()
        try:
            seconds = _reduce(0, path, num_rounds)
        finally:
            other.join(10)
            other.kill()
    for size, (ours, bare) in zip(SIZES, seconds, strict=True):
        yield Row(
            name=f"minimum over 2 processes, {size} items",
            ours=1e6 * ours,
            baseline=1e6 * bare,
            against="bare gloo all_reduce on a thread",
            bound=1.3,
        )


def _reduce(rank: int, path: str, num_rounds: int) -> list[list[float]]:
    torch.set_num_threads(1)
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        return asyncio.run(_time_all(num_rounds))
    finally:
        dist.destroy_process_group()


async def _time_all(num_rounds: int) -> list[list[float]]:
    group = TorchGroup()
    with ThreadPoolExecutor(1) as thread:
        seconds = [await _time(group, thread, size, num_rounds) for size in SIZES]
    await group.aclose()
    return seconds


async def _time(
    group: TorchGroup, thread: ThreadPoolExecutor, size: int, num_rounds: int
) -> list[float]:
    vector, tensor = array("i", range(size)), torch.arange(size, dtype=torch.int32)
    all_reduce = partial(dist.all_reduce, tensor, op=dist.ReduceOp.MIN)
    loop = asyncio.get_running_loop()
    return await interleave_async(
        partial(_repeat, partial(group.all_min, vector)),
        partial(_repeat, partial(loop.run_in_executor, thread, all_reduce)),
        num_rounds=NUM_TURNS * num_rounds,
    )


async def _repeat(call: Callable[[], Awaitable[object]]) -> float:
    with (watch := Stopwatch()):
        for _ in range(NUM_CALLS):
            await call()
    return watch.seconds / NUM_CALLS
