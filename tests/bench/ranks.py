"""A minimum over two processes, and a step, beside a bare all-reduce on a thread."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from array import array
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from asyncache.devices import CpuDevice
from asyncache.engine import KVCache
from asyncache.ranks import TorchGroup
from tests.bench import inputs
from tests.bench.measure import Row, Stopwatch, interleave_async

# Below 8 items or so gloo sends fewer messages, and our header alone has 4.
SIZES = (16, 260, 4096)
"""int32 items: a ballot of a few slots, of 128 slots, and with a large mask."""
# Call by call: a round trip is mostly what the machine makes of it at the moment.
NUM_CALLS, NUM_TURNS = 1, 50
NUM_OPEN = 64


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
    names = [f"minimum over 2 processes, {size} items" for size in SIZES]
    names.append(f"step() of 2 processes, {NUM_OPEN} open requests")
    for name, (ours, bare) in zip(names, seconds, strict=True):
        yield Row(
            name=name,
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
        seconds = []
        for size in SIZES:
            vector = array("i", range(size))
            ours = partial(group.all_min, vector)
            seconds.append(await _time(ours, thread, size, num_rounds))
        seconds.append(await _time_step(group, thread, num_rounds))
    return seconds


async def _time_step(
    group: TorchGroup, thread: ThreadPoolExecutor, num_rounds: int
) -> list[float]:
    """Time a step in which nothing happens, as in most of a decode."""
    layout = inputs.layout()
    device = CpuDevice(layout, num_pages=2 * NUM_OPEN)
    async with KVCache(layout, device=device, group=group) as cache:
        prompts = [cache.prompt([token]) for token in range(NUM_OPEN)]
        with ExitStack() as scopes:
            for request in cache.admit(prompts):
                scopes.enter_context(request).extend(1)
            size = cache._runtime.replica.ballot().num_ints
            return await _time(cache.step, thread, size, num_rounds)


async def _time(
    ours: Callable[[], Awaitable[object]],
    thread: ThreadPoolExecutor,
    size: int,
    num_rounds: int,
) -> list[float]:
    tensor = torch.arange(size, dtype=torch.int32)
    all_reduce = partial(dist.all_reduce, tensor, op=dist.ReduceOp.MIN)
    loop = asyncio.get_running_loop()
    return await interleave_async(
        partial(_repeat, ours),
        partial(_repeat, partial(loop.run_in_executor, thread, all_reduce)),
        num_rounds=NUM_TURNS * num_rounds,
    )


async def _repeat(call: Callable[[], Awaitable[object]]) -> float:
    with (watch := Stopwatch()):
        for _ in range(NUM_CALLS):
            await call()
    return watch.seconds / NUM_CALLS
