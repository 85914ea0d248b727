"""FileStore beside plain system calls in a pool of threads, on the same files.

Everything is in the page cache: what is measured is what the store adds.
"""

# A Path costs as much as the system calls that it would be made for.
# ruff: noqa: PTH104, PTH108, PTH119

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self

from asyncache.stores import FileStore, PageBuffers
from tests.bench.measure import Row, Stopwatch, interleave_async
from tests.bench.pages import BATCH_BYTES, KIB, MIB, NUM_THREADS, Pages


def run(num_rounds: int) -> Iterator[Row]:
    """Read and write pages of several sizes, with and without checksums."""
    for page_bytes in (256 * KIB, 2 * MIB):
        with _Bench(page_bytes, BATCH_BYTES // page_bytes) as bench:
            yield from asyncio.run(bench.throughput(num_rounds))
    with _Bench(64 * KIB, 32) as bench:
        yield from asyncio.run(bench.small(num_rounds))


class _Bench(Pages):
    """Pages of one size in files and in a device."""

    def store(self, name: str, *, checksums: bool) -> FileStore:
        return FileStore(
            f"{self.folder}/{name}", num_threads=NUM_THREADS, checksums=checksums
        )

    async def throughput(self, num_rounds: int) -> list[Row]:
        rows = []
        async with (
            self.store("plain", checksums=False) as plain,
            self.store("checked", checksums=True) as checked,
            _PlainFiles(f"{self.folder}/plain", self) as files,
        ):
            await plain.put(self.keys, self.views)
            await checked.put(self.keys, self.views)
            files.find()
            reads = await interleave_async(
                partial(self.read, plain),
                files.read,
                partial(self.read, checked),
                num_rounds=num_rounds,
            )
            writes = await interleave_async(
                partial(self.write, plain),
                files.write,
                partial(self.write, checked),
                num_rounds=num_rounds,
            )
        for what, times, against, bound in (
            ("read", reads, "plain preadv", 0.85),
            ("write", writes, "plain writev + rename", 0.8),
        ):
            ours, baseline, digested = map(self.mib_per_s, times)
            rows += [
                Row(
                    name=f"{what} {self.name}, no checksums",
                    ours=ours,
                    unit="MiB/s",
                    baseline=baseline,
                    against=against,
                    bound=bound,
                    at_least=True,
                ),
                Row(
                    name=f"{what} {self.name}, checksums",
                    ours=digested,
                    unit="MiB/s",
                    baseline=baseline,
                    against=against,
                ),
            ]
        return rows

    async def small(self, num_rounds: int) -> list[Row]:
        async with (
            self.store("plain", checksums=False) as plain,
            self.store("checked", checksums=True) as checked,
            _PlainFiles(f"{self.folder}/plain", self) as files,
        ):
            await plain.put(self.keys, self.views)
            await checked.put(self.keys, self.views)
            files.find()
            times = await interleave_async(
                partial(self.read, plain),
                partial(self.read, checked),
                files.read,
                num_rounds=5 * num_rounds,
            )
        ours, digested, baseline = (1e6 * t / self.num_pages for t in times)
        name = f"read {self.name} by {self.num_pages}, a page"
        return [
            Row(name=name, ours=ours, bound=40),
            Row(
                name=f"{name}, checksums",
                ours=digested,
                baseline=ours,
                against="the same without",
                bound=1.3,
            ),
            Row(name=name, ours=ours, baseline=baseline, against="plain preadv"),
        ]


class _PlainFiles:
    """Nothing but system calls in a pool of threads, over a FileStore's files."""

    def __init__(self, directory: str, bench: _Bench) -> None:
        self._directory = Path(directory)
        self._bench = bench
        self._readers = ThreadPoolExecutor(NUM_THREADS)
        self._writers = ThreadPoolExecutor(NUM_THREADS // 2)
        self._paths: list[str] = []
        self._head = memoryview(b"")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._readers.shutdown()
        self._writers.shutdown()

    def find(self) -> None:
        """Learn where the store keeps the pages, and how long its heads are."""
        found = {path.stem: path for path in self._directory.rglob("*.kv")}
        self._paths = [str(found[key.hash.hex()]) for key in self._bench.keys]
        size = Path(self._paths[0]).stat().st_size - self._bench.page_bytes
        self._head = memoryview(bytearray(size))

    async def read(self) -> float:
        return await self._timed(self._readers, NUM_THREADS, self._read, self._paths)

    async def write(self) -> float:
        # New names in folders that are there, as for the store.
        paths = [f"{path}.{os.urandom(4).hex()}" for path in self._paths]
        try:
            return await self._timed(
                self._writers, NUM_THREADS // 2, self._write, paths
            )
        finally:
            for path in paths:
                os.unlink(path)

    async def _timed(
        self, pool: ThreadPoolExecutor, num_threads: int, job, paths: Sequence[str]
    ) -> float:
        loop, watch = asyncio.get_running_loop(), Stopwatch()
        share = -(-len(paths) // num_threads)
        with watch:
            parts = [
                loop.run_in_executor(
                    pool,
                    job,
                    paths[start : start + share],
                    self._bench.views[start : start + share],
                )
                for start in range(0, len(paths), share)
            ]
            await asyncio.gather(*parts)
        return watch.seconds

    def _read(self, paths: Sequence[str], pages: Sequence[PageBuffers]) -> None:
        head = memoryview(bytearray(len(self._head)))
        for path, buffers in zip(paths, pages, strict=True):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            count = os.preadv(descriptor, [head, *buffers], 0)
            os.close(descriptor)
            assert count == len(head) + self._bench.page_bytes

    def _write(self, paths: Sequence[str], pages: Sequence[PageBuffers]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for path, buffers in zip(paths, pages, strict=True):
            temporary = f"{self._directory}/tmp/{os.path.basename(path)}"
            descriptor = os.open(temporary, flags, 0o644)
            os.writev(descriptor, [self._head, *buffers])
            os.close(descriptor)
            os.rename(temporary, path)
