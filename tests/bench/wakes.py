"""How soon a coroutine resumes once a copy has ended, in three ways, in turns.

Each round, a stream is stopped by a word in memory, copies are put behind it, and the
word lets them go: so the time that it takes to begin them does not count. When each
copy ended, softcuda knows; on a GPU it is what a spinning cuEventQuery saw in its turn.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from statistics import median
from typing import NamedTuple

from cuda.bindings import driver

from asyncache.devices._pooled import Direction
from tests.bench import inputs
from tests.bench.gpus import Gpu, check

SOFT_COPY_S = 300e-6
PAGE_BYTES = {True: 4096, False: 4 * 2**20}
"""Of a copy; on a GPU, one takes longer than a wake-up."""
_EVENT_FLAGS = (
    driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
    | driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC
)
_AT_LEAST = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ


class End(NamedTuple):
    """When a copy's end was noticed, and when softcuda says that it was."""

    noticed_ns: int
    true_ns: int | None


@dataclass(slots=True)
class Latencies:
    """Times from the end of the work to its being noticed."""

    us: list[float] = field(default_factory=list)

    @property
    def median_us(self) -> float:
        """The median."""
        return median(self.us)

    @property
    def p99_us(self) -> float:
        """What 99 of 100 stay below."""
        return sorted(self.us)[math.ceil(0.99 * len(self.us)) - 1]


class Found(NamedTuple):
    """Latencies of the three."""

    spinning: Latencies
    bare: Latencies
    ours: Latencies


class Gate:
    """A word that streams wait for."""

    def __init__(self) -> None:
        flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
        self._host = int(check(driver.cuMemHostAlloc(64, flags)))
        self._there = check(driver.cuMemHostGetDevicePointer(self._host, 0))
        self._word = ctypes.c_uint32.from_address(self._host)
        self._word.value = self._goal = 0

    def shut(self, stream: int) -> None:
        """Have a stream wait until :meth:`open`."""
        self._goal += 1
        check(
            driver.cuStreamWaitValue32(stream, self._there, self._goal, int(_AT_LEAST))
        )

    def open(self) -> int:
        """Let the stream go on; return when."""
        self._word.value = self._goal
        return time.monotonic_ns()

    def free(self) -> None:
        """Give the memory back."""
        check(driver.cuMemFreeHost(self._host))


@contextmanager
def opened_gate() -> Iterator[Gate]:
    """Make a gate, and free it at the end of the block."""
    gate = Gate()
    try:
        yield gate
    finally:
        gate.free()


class Way(ABC):
    """A way to hear of the end of copies on a stream of its own."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed

    @abstractmethod
    async def round(self, count: int) -> tuple[int, list[End]]:
        """Let so many copies go; return when they were, and their ends in order."""

    @abstractmethod
    async def close(self) -> None:
        """Give back what was taken."""


@dataclass(slots=True)
class Bed:
    """What the ways have in common.

    Attributes:
        gpu: Where it runs.
        gate: Stops the streams.
        source: Pinned memory of a copy's bytes.
        target: Memory of the GPU of as many.
    """

    gpu: Gpu
    gate: Gate
    source: int
    target: int
    num_bytes: int

    def end(self, event: int) -> End:
        """Note that the end of an event's copy was noticed, now."""
        now, soft = time.monotonic_ns(), self.gpu.soft
        return End(now, None if soft is None else soft.event_done_ns(event))


class _Raw(Way):
    """Bare calls of the driver."""

    def __init__(self, bed: Bed) -> None:
        super().__init__(bed)
        own = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.stream = int(check(driver.cuStreamCreate(own)))
        self.events: list[int] = []

    def begin(self, count: int) -> None:
        while len(self.events) < count:
            self.events.append(int(check(driver.cuEventCreate(int(_EVENT_FLAGS)))))
        bed = self.bed
        bed.gate.shut(self.stream)
        for event in self.events[:count]:
            check(
                driver.cuMemcpyHtoDAsync(
                    bed.target, bed.source, bed.num_bytes, self.stream
                )
            )
            check(driver.cuEventRecord(event, self.stream))

    async def close(self) -> None:
        for event in self.events:
            check(driver.cuEventDestroy(event))
        check(driver.cuStreamDestroy(self.stream))


class Spinning(_Raw):
    """A loop around cuEventQuery: the soonest there is, at the price of a core."""

    async def round(self, count: int) -> tuple[int, list[End]]:
        self.begin(count)
        query, ends, end = driver.cuEventQuery, [], self.bed.end
        start = self.bed.gate.open()
        for event in self.events[:count]:
            while query(event)[0]:
                pass
            ends.append(end(event))
        return start, ends


class Bare(_Raw):
    """A thread in cuEventSynchronize and call_soon_threadsafe, and nothing else."""

    def __init__(self, bed: Bed) -> None:
        super().__init__(bed)
        self._queue: SimpleQueue[tuple[int, asyncio.Future[None]] | None]
        self._queue = SimpleQueue()
        self._context = check(driver.cuCtxGetCurrent())
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        driver.cuCtxSetCurrent(self._context)
        call, wait = self._loop.call_soon_threadsafe, driver.cuEventSynchronize
        while (item := self._queue.get()) is not None:
            wait(item[0])
            with suppress(RuntimeError):  # the loop is closed
                call(item[1].set_result, None)

    async def round(self, count: int) -> tuple[int, list[End]]:
        self.begin(count)
        futures = [self._loop.create_future() for _ in range(count)]
        for item in zip(self.events, futures, strict=False):
            self._queue.put(item)

        async def wait(event: int, future: asyncio.Future[None]) -> End:
            await future
            return self.bed.end(event)

        events = self.events[:count]
        waiters = [
            self._loop.create_task(wait(*pair))
            for pair in zip(events, futures, strict=True)
        ]
        await asyncio.sleep(0)
        start = self.bed.gate.open()
        return start, await asyncio.gather(*waiters)

    async def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        await super().close()


class Ours(Way):
    """``start_write().wait()`` of a device."""

    def __init__(self, bed: Bed) -> None:
        super().__init__(bed)
        self._device = bed.gpu.open(inputs.layout(bed.num_bytes), 1)
        self._stream = self._device._streams[Direction.INTO_PAGES]
        self._memory: memoryview | None = None
        self._pages = array("i", [0])

    async def round(self, count: int) -> tuple[int, list[End]]:
        device = self._device
        if self._memory is None:
            self._memory = await device.allocate_staging(self.bed.num_bytes)
        self.bed.gate.shut(self._stream)
        copies = [
            device.start_write("kv", self._pages, self._memory) for _ in range(count)
        ]

        async def wait(number: int) -> End:
            await copies[number].wait()
            return self.bed.end(copies[number]._event)

        loop = asyncio.get_running_loop()
        waiters = [loop.create_task(wait(number)) for number in range(count)]
        await asyncio.sleep(0)
        start = self.bed.gate.open()
        return start, await asyncio.gather(*waiters)

    async def close(self) -> None:
        await self._device.aclose()


async def measure(
    gpu: Gpu, *, num_in_flight: int, num_rounds: int, budget_s: float = math.inf
) -> Found:
    """Let copies go in each way in turn, until the rounds or the time are over."""
    deadline = time.monotonic() + budget_s
    with gpu.current(), gpu.slow_copies(SOFT_COPY_S), opened_gate() as gate:
        bed = _make_bed(gpu, gate)
        ways = [Spinning(bed), Bare(bed), Ours(bed)]
        try:
            for way in ways:
                await way.round(num_in_flight)  # warm up
            rounds = []
            while not rounds or (
                len(rounds) < num_rounds and time.monotonic() < deadline
            ):
                rounds.append([await way.round(num_in_flight) for way in ways])
        finally:
            for way in ways:
                await way.close()
            _free(bed)
    return _compare(rounds)


def _make_bed(gpu: Gpu, gate: Gate) -> Bed:
    num_bytes = PAGE_BYTES[gpu.soft is not None]
    source = int(check(driver.cuMemHostAlloc(num_bytes, 0)))
    target = int(check(driver.cuMemAlloc(num_bytes)))
    return Bed(gpu, gate, source, target, num_bytes)


def _free(bed: Bed) -> None:
    check(driver.cuMemFreeHost(bed.source))
    check(driver.cuMemFree(bed.target))


def _compare(rounds: Sequence[Sequence[tuple[int, list[End]]]]) -> Found:
    """Take from each notice when the copy of its place in line had ended."""
    spins = [spin for spin, _, _ in rounds]
    usual_ns = [
        median(ends[place].noticed_ns - start for start, ends in spins)
        for place in range(len(spins[0][1]))
    ]
    found = Found(Latencies(), Latencies(), Latencies())
    for one_round in rounds:
        for latencies, (start, ends) in zip(found, one_round, strict=True):
            for end, usual in zip(ends, usual_ns, strict=True):
                true_ns = start + usual if end.true_ns is None else end.true_ns
                latencies.us.append((end.noticed_ns - true_ns) / 1e3)
    return found
