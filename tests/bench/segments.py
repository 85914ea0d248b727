"""SegmentStore beside plain system calls on slots of a file, and small pages in files.

Everything is in the page cache: what is measured is what the store adds.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self

from asyncache.core import PageHash, PageKey
from asyncache.stores import FileStore, PageBuffers, SegmentStore
from asyncache.stores._frame import Frame
from asyncache.stores._segment_files import slot_bytes
from tests.bench import inputs
from tests.bench.measure import Row, Stopwatch, interleave_async
from tests.bench.pages import BATCH_BYTES, KIB, MIB, NUM_THREADS, Pages

SEGMENT_BYTES = 64 * MIB
JOB_BYTES = 4 * MIB
MAX_BYTES = 5 * SEGMENT_BYTES
NUM_PROCESSES = 3
SHARED_MEMORY = Path("/dev/shm")


def run(num_rounds: int) -> Iterator[Row]:
    """Read and write pages of several sizes, alone and with other processes."""
    for page_bytes in (256 * KIB, 2 * MIB):
        with _Bench(page_bytes, BATCH_BYTES // page_bytes) as bench:
            yield from asyncio.run(bench.throughput(num_rounds))
    with _Bench(64 * KIB, 32) as bench:
        yield from asyncio.run(bench.small(num_rounds))
    if os.access(SHARED_MEMORY, os.W_OK):
        yield from _shared(num_rounds)


class _Bench(Pages):
    """Pages of one size in slots, in files and in a device."""

    def segments(self, name: str, *, checksums: bool) -> SegmentStore:
        return SegmentStore(
            f"{self.folder}/{name}",
            MAX_BYTES,
            segment_bytes=SEGMENT_BYTES,
            num_threads=NUM_THREADS,
            checksums=checksums,
        )

    def files(self) -> FileStore:
        return FileStore(
            f"{self.folder}/files", num_threads=NUM_THREADS, checksums=False
        )

    async def throughput(self, num_rounds: int) -> list[Row]:
        async with (
            self.segments("plain", checksums=False) as plain,
            self.segments("checked", checksums=True) as checked,
            _PlainSlots(f"{self.folder}/slots", self) as slots,
        ):
            stores = (plain, checked)
            for store in stores:
                await store.put(self.keys, self.views)
            reads = await interleave_async(
                slots.read,
                *(partial(self.read, store) for store in stores),
                num_rounds=num_rounds,
            )
            writes = await interleave_async(
                slots.write,
                *(partial(self.write, store) for store in stores),
                num_rounds=num_rounds,
            )
        return [
            *self._rows("read", "plain preadv", reads, (0.95, 0.8)),
            *self._rows("write", "plain pwritev + a commit", writes, (0.9, None)),
        ]

    def _rows(
        self,
        what: str,
        against: str,
        times: Sequence[float],
        bounds: Sequence[float | None],
    ) -> Iterator[Row]:
        baseline, *ours = map(self.mib_per_s, times)
        kinds = ("no checksums", "checksums")
        for kind, rate, bound in zip(kinds, ours, bounds, strict=True):
            yield Row(
                name=f"slots: {what} {self.name}, {kind}",
                ours=rate,
                unit="MiB/s",
                baseline=baseline,
                against=against,
                bound=bound,
                at_least=True,
            )

    async def small(self, num_rounds: int) -> list[Row]:
        async with (
            self.segments("plain", checksums=False) as plain,
            self.segments("checked", checksums=True) as checked,
            self.files() as files,
        ):
            stores = (plain, checked, files)
            for store in stores:
                await store.put(self.keys, self.views)
            times = await interleave_async(
                *(partial(self.read, store) for store in stores),
                num_rounds=5 * num_rounds,
            )
        ours, digested, in_files = (1e6 * t / self.num_pages for t in times)
        name = f"slots: read {self.name} by {self.num_pages}, a page"
        return [
            Row(name=name, ours=ours, bound=25),
            Row(name=f"{name}, checksums", ours=digested),
            Row(name=name, ours=ours, baseline=in_files, against="FileStore"),
        ]


class _PlainSlots:
    """Nothing but system calls in a pool of threads, and a row a page in SQLite."""

    def __init__(self, directory: str, bench: _Bench) -> None:
        self._bench = bench
        frame = Frame(bench.keys[0].space)
        self._slot_bytes = slot_bytes(frame)
        self._head = memoryview(bytearray(frame.head_bytes))
        Path(directory).mkdir()
        self._file = os.open(f"{directory}/slots", os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(self._file, 0, bench.num_pages * self._slot_bytes)
        self._index = sqlite3.connect(f"{directory}/index", isolation_level=None)
        self._index.execute("PRAGMA journal_mode = WAL")
        self._index.execute("PRAGMA synchronous = NORMAL")
        self._index.execute("CREATE TABLE page (hash BLOB PRIMARY KEY, slot INTEGER)")
        self._readers = ThreadPoolExecutor(NUM_THREADS)
        self._writers = ThreadPoolExecutor(NUM_THREADS // 2)

    async def __aenter__(self) -> Self:
        await self.write()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._readers.shutdown()
        self._writers.shutdown()
        self._index.close()
        os.close(self._file)

    async def read(self) -> float:
        watch = Stopwatch()
        with watch:
            await self._spread(self._readers, self._read)
        return watch.seconds

    async def write(self) -> float:
        rows = [(os.urandom(32), slot) for slot in range(self._bench.num_pages)]
        watch = Stopwatch()
        with watch:
            await self._spread(self._writers, self._write)
            self._index.execute("BEGIN IMMEDIATE")
            self._index.executemany("INSERT INTO page VALUES (?, ?)", rows)
            self._index.execute("COMMIT")
        return watch.seconds

    async def _spread(self, pool: ThreadPoolExecutor, job) -> None:
        loop = asyncio.get_running_loop()
        share = max(1, JOB_BYTES // self._bench.page_bytes)
        slots = range(self._bench.num_pages)
        await asyncio.gather(
            *(
                loop.run_in_executor(pool, job, slots[start : start + share])
                for start in range(0, len(slots), share)
            )
        )

    def _read(self, slots: range) -> None:
        head = memoryview(bytearray(len(self._head)))
        for slot in slots:
            page = [*self._page(slot), head]
            count = os.preadv(self._file, page, slot * self._slot_bytes)
            assert count == len(head) + self._bench.page_bytes

    def _write(self, slots: range) -> None:
        for slot in slots:
            page = [*self._page(slot), self._head]
            count = os.pwritev(self._file, page, slot * self._slot_bytes)
            assert count == len(self._head) + self._bench.page_bytes

    def _page(self, slot: int) -> PageBuffers:
        return self._bench.views[slot]


# Several processes, each of which reads what all of them put.

WORKER = """
import asyncio, sys, time
from asyncache.stores import SegmentStore, Status
from tests.bench.segments import MAX_BYTES, SEGMENT_BYTES, shared_pages

async def main(directory, number, count, num_rounds):
    keys, views = shared_pages(count)
    mine = keys[number::count]
    async with SegmentStore(directory, MAX_BYTES, segment_bytes=SEGMENT_BYTES) as store:
        await store.put(mine, views[: len(mine)])
        print("ready", flush=True)
        sys.stdin.readline()
        start = time.perf_counter()
        for _ in range(num_rounds):
            assert await store.get_into(keys, views) == [Status.HIT] * len(keys)
        print(time.perf_counter() - start, flush=True)

asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
"""


def shared_pages(count: int) -> tuple[list[PageKey], list[PageBuffers]]:
    """Return keys that all processes know, and memory for them."""
    layout = inputs.layout(256 * KIB, 8)
    space = layout.space(layout.pools[0])
    hashes = [number.to_bytes(32, "little") for number in range(32 * count)]
    memory = memoryview(bytearray(space.page_bytes * len(hashes)))
    views = [
        [memory[start : start + space.page_bytes]]
        for start in range(0, len(memory), space.page_bytes)
    ]
    return [PageKey(PageHash(page_hash), space) for page_hash in hashes], views


def _shared(num_rounds: int) -> Iterator[Row]:
    for count in (1, NUM_PROCESSES):
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
            arguments = (folder, count, num_rounds)
            seconds = max(_together(*arguments))
        total = num_rounds * 32 * count * count * 256 * KIB / MIB
        yield Row(
            name=f"slots: {count} processes read one another's pages in /dev/shm",
            ours=total / seconds,
            unit="MiB/s",
        )


def _together(folder: str, count: int, num_rounds: int) -> list[float]:
    workers = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", WORKER, folder),
                *map(str, (number, count, num_rounds)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    return [float(worker.communicate()[0]) for worker in workers]
