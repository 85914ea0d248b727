"""Stores under pressure: many puts at once, offloads beside loads, a server that stops.

What a serving loop feels of it: the time of an operation, of a load that somebody waits
for, of the loop's own next turn, and of a close.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from statistics import median

import anyio

from asyncache.core import LoadPlan, Moved, OffloadPlan, PageHash, PageKey
from asyncache.devices import CpuDevice
from asyncache.linkers import Outcome, StoreLinker
from asyncache.stores import RedisStore, SegmentStore, Status
from tests.bench import inputs
from tests.bench.measure import Row, Stopwatch
from tests.bench.pages import KIB, MIB, Pages
from tests.bench.stall import Stretches
from tests.stores.redis_server import binary, running

COUNTS = (3_000, 7_000, 15_000)
PAGE_BYTES = 256 * KIB
NUM_LOADED, NUM_OFFLOADED, NUM_OFFLOADS = 8, 32, 4
LOAD_EVERY_S = 0.005
PAUSED_S = 1.0


def run(num_rounds: int) -> Iterator[Row]:
    """Measure what is said above."""
    yield from asyncio.run(_many_puts())
    yield from asyncio.run(_loads_beside_offloads(30 * num_rounds))
    if binary() is None:
        print("no server to stop", file=sys.stderr)
    else:
        yield from asyncio.run(_server_that_stops())


async def _many_puts() -> list[Row]:
    """Put pages by as many calls, submitted at once; the cost of each is flat."""
    cost_us = {}
    with Pages(16 * KIB, 1) as pages:
        for count in COUNTS:
            directory = f"{pages.folder}/{count}"
            async with SegmentStore(directory, 512 * MIB, segment_bytes=64 * MIB) as s:
                keys = pages.new_keys(count)
                with (watch := Stopwatch()):
                    async with asyncio.TaskGroup() as group:
                        puts = [
                            group.create_task(s.put([key], pages.views)) for key in keys
                        ]
                assert all(put.result() == [Status.HIT] for put in puts)
            cost_us[count] = 1e6 * watch.seconds / count
    few, *more = COUNTS
    return [
        Row(
            name=f"pressure: {count} puts at once, each",
            ours=cost_us[count],
            baseline=cost_us[few],
            against=f"of {few}",
            bound=1.25,
        )
        for count in more
    ]


class _Traffic:
    """A linker with pages to load, and others to offload."""

    def __init__(self, linker: StoreLinker) -> None:
        self._linker = linker
        self._hashes = inputs.new_hashes(NUM_LOADED)
        self._seq = 0
        self.num_offloaded = 0
        """Bytes so far."""

    async def fill(self) -> None:
        await self._offload(range(NUM_LOADED), self._hashes)

    async def load(self) -> float:
        """Load the pages; return the seconds."""
        pages = array("i", range(NUM_LOADED))
        plan = LoadPlan(
            self._next(), 0, NUM_LOADED, (Moved(0, 0, pages, self._hashes),)
        )
        start = time.perf_counter()
        assert await self._linker.load(plan, lambda *_: None) == NUM_LOADED
        return time.perf_counter() - start

    async def offload_for_ever(self, number: int) -> None:
        first = NUM_LOADED + number * NUM_OFFLOADED
        while True:
            hashes = inputs.new_hashes(NUM_OFFLOADED)
            await self._offload(range(first, first + NUM_OFFLOADED), hashes)

    async def _offload(self, pages: range, hashes: list[PageHash]) -> None:
        moved = Moved(0, 0, array("i", pages), hashes)
        plan = OffloadPlan(self._next(), 0, len(pages), (moved,), None)
        assert await self._linker.offload(plan) is Outcome.STORED
        self.num_offloaded += len(pages) * PAGE_BYTES

    async def loads(self, count: int) -> tuple[list[float], float]:
        """Load so many times, and now and then; return the seconds, and offloads' rate.

        Loads come when they come: one right after the other would keep the offloads
        from a new beginning, and so be measured beside few of them.
        """
        times, before, start = [], self.num_offloaded, time.perf_counter()
        for _ in range(count):
            await anyio.sleep(LOAD_EVERY_S)
            times.append(await self.load())
        num_bytes = self.num_offloaded - before
        return times, num_bytes / MIB / (time.perf_counter() - start)

    def _next(self) -> int:
        self._seq += 1
        return self._seq


@asynccontextmanager
async def _traffic() -> AsyncIterator[_Traffic]:
    layout = inputs.layout(PAGE_BYTES, 8)
    device = CpuDevice(layout, NUM_LOADED + NUM_OFFLOADS * NUM_OFFLOADED)
    device.tensor("kv").fill_(1.0)
    with tempfile.TemporaryDirectory(prefix="asyncache-bench-") as folder:
        store = SegmentStore(
            folder,
            512 * MIB,
            segment_bytes=64 * MIB,
            num_threads=min(4, len(os.sched_getaffinity(0))),
        )
        linker = StoreLinker(store, device, batch_bytes=8 * MIB)
        await linker.open()
        try:
            traffic = _Traffic(linker)
            await traffic.fill()
            yield traffic
        finally:
            await linker.aclose()


async def _loads_beside_offloads(count: int) -> list[Row]:
    async with _traffic() as traffic:
        idle, _ = await traffic.loads(count)
        offloads = [
            asyncio.ensure_future(traffic.offload_for_ever(number))
            for number in range(NUM_OFFLOADS)
        ]
        busy, rate = await traffic.loads(count)
        for offload in offloads:
            offload.cancel()
        await asyncio.wait(offloads)
    what = f"pressure: load of {NUM_LOADED} pages beside offloads"
    return [
        Row(
            name=f"{what}, p99",
            ours=1e3 * _p99(busy),
            unit="ms",
            baseline=1e3 * _p99(idle),
            against="idle",
            bound=2.0,
        ),
        Row(
            name=f"{what}, median",
            ours=1e3 * median(busy),
            unit="ms",
            baseline=1e3 * median(idle),
            against="idle",
        ),
        Row(name="pressure: the offloads beside them", ours=rate, unit="MiB/s"),
    ]


def _p99(times: list[float]) -> float:
    return sorted(times)[len(times) * 99 // 100]


async def _server_that_stops() -> list[Row]:
    """Read, have the server stopped, and close."""
    stretches = Stretches()
    with running() as server, Pages(PAGE_BYTES, 32) as pages, stretches.watch():
        store = RedisStore(server.url, timeout_s=PAUSED_S)
        await store.open()
        keys: list[PageKey] = pages.keys
        assert await store.put(keys, pages.views) == [Status.HIT] * len(keys)
        await stretches.phase("paused")
        with server.paused():
            reading = asyncio.ensure_future(store.get_into(keys, pages.views))
            assert set(await reading) == {Status.UNAVAILABLE}
            reading = asyncio.ensure_future(store.get_into(keys, pages.views))
            await anyio.wait_all_tasks_blocked()
            with (watch := Stopwatch()):
                await store.aclose()
            await reading
    longest = stretches.longest["paused"]
    return [
        Row(
            name="pressure: the loop's longest stretch while Redis is stopped",
            ours=1e3 * longest.cpu_s,
            unit="ms",
            bound=10,
        ),
        Row(
            name="pressure: close while Redis is stopped in the middle of a read",
            ours=1e3 * watch.seconds,
            unit="ms",
            bound=1_000,
        ),
    ]
