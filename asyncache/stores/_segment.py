"""A store of preallocated files and an index, which processes of one machine share.

Pages lie in slots of files that are as long at the start as they ever will be, so a
full disk is found when the store is opened and never later, and a page costs no new
file. SQLite says which page is where, and is the lock between processes.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from asyncache.core import ClosedError, OrderError, PageKey, PageSpace
from asyncache.stores._abc import PageBuffers, Status, Store, check_batch
from asyncache.stores._batches import split
from asyncache.stores._segment_directory import SegmentDirectory
from asyncache.stores._segment_index import SegmentIndex
from asyncache.stores._slot_pages import SlotPages, Stock
from asyncache.threads import Stop, Workers, outlast, when_over

# Where the hop between threads stops to count against the bytes that a job moves.
_JOB_BYTES = 4 * 2**20


class SegmentStore(Store):
    """Pages in preallocated files under a directory of a local file system.

    Any number of processes on one machine may use the directory at once, also one in
    shared memory, ``/dev/shm``. They share all pages, and the pages that were used
    longest ago give way to new ones. A page is told of when it is in place, so one that
    a crash cut short is never seen; what a power loss undoes, digests find. Linux only;
    on a network file system use :class:`FileStore`.

    The constructor does no I/O: ``async with SegmentStore(path, 100 << 30) as store``,
    or leave that to the cache.

    Args:
        directory: Made if it does not exist, for this user alone.
        max_bytes: What the files may take; allocated when the store is opened, as far
            as there is room. Of what exists already, the first user of a directory may
            change it, and who comes while others use it takes theirs.
        segment_bytes: Length of a file, which holds pages of one kind; a page must fit.
        num_threads: Threads that read; half as many write, so that a backlog of writes
            never delays a read.
        checksums: As for :class:`FileStore`.
        durable: Whether to wait for the disk before a page is told of.
        direct: Whether to go around the page cache of the operating system: for disks
            much larger than memory. Buffers should begin at multiples of 4096 then.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_bytes: int,
        *,
        segment_bytes: int = 256 * 2**20,
        num_threads: int = 4,
        checksums: bool = True,
        durable: bool = False,
        direct: bool = False,
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        if segment_bytes < 1 or segment_bytes % 4096:
            raise ValueError(
                f"segment_bytes must be a multiple of 4096, not {segment_bytes}"
            )
        if max_bytes < segment_bytes:
            raise ValueError(
                f"max_bytes must hold a segment of {segment_bytes}, not {max_bytes}"
            )
        self._path = os.fspath(directory)
        self._max_segments = max_bytes // segment_bytes
        self._segment_bytes = segment_bytes
        self._checksums = checksums
        self._durable = durable
        self._direct = direct
        self._reads = Workers(num_threads, "asyncache-read", owner="store")
        self._writes = Workers(-(-num_threads // 2), "asyncache-write", owner="store")
        self._directory: SegmentDirectory | None = None
        self._stock = Stock()
        self._local = threading.local()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<SegmentStore {self._path!r}>"

    @property
    def num_bytes(self) -> int:
        """Bytes that the files take: less than asked for where there was no room."""
        return 0 if self._directory is None else self._directory.num_bytes

    async def open(self) -> None:
        """Allocate the files, and take part in the use of the directory.

        Raises:
            StoreError: If the directory cannot be created or written, has no room for
                a single segment, is not such a store's, has segments of another
                length, or was written by a newer asyncache.
            ClosedError: If the store was closed: make another one.
        """
        if self._is_closed:
            raise ClosedError("the store is closed")
        if self._directory is not None:
            return
        opened: list[SegmentDirectory] = []

        def job(_: None, stop: Stop) -> None:
            opened.append(
                SegmentDirectory(
                    self._path,
                    max_segments=self._max_segments,
                    segment_bytes=self._segment_bytes,
                    durable=self._durable,
                    direct=self._direct,
                    stop=stop,
                )
            )

        try:
            await self._writes.run(job, [None])
        except BaseException:
            for directory in opened:
                directory.close()
            raise
        [self._directory] = opened

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        found = [False] * len(keys)

        def look(pages: SlotPages, run: range, _: Stop) -> None:
            there = pages.find([keys[place].hash for place in run])
            for place in run:
                found[place] = keys[place].hash in there

        await self._run(self._reads, look, keys, [range(len(keys))] if keys else [])
        return found

    async def get_into(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None = None,
    ) -> list[Status]:
        check_batch(keys, targets, layers)
        statuses = [Status.UNAVAILABLE] * len(keys)

        def read(pages: SlotPages, run: range, stop: Stop) -> None:
            job = [(place, keys[place].hash, targets[place]) for place in run]
            pages.read(job, layers, statuses, stop)

        await self._run(self._reads, read, keys, split(targets, _JOB_BYTES))
        return statuses

    async def put(
        self, keys: Sequence[PageKey], sources: Sequence[PageBuffers]
    ) -> list[Status]:
        check_batch(keys, sources)
        statuses = [Status.UNAVAILABLE] * len(keys)

        def write(pages: SlotPages, run: range, stop: Stop) -> None:
            job = [(place, keys[place].hash, sources[place]) for place in run]
            pages.write(job, statuses, stop)

        await self._run(self._writes, write, keys, split(sources, _JOB_BYTES))
        return statuses

    async def remove(self, keys: Sequence[PageKey]) -> None:
        def forget(pages: SlotPages, run: range, _: Stop) -> None:
            pages.remove([keys[place].hash for place in run])

        await self._run(self._writes, forget, keys, [range(len(keys))] if keys else [])

    async def aclose(self) -> None:
        """Give back what this store claimed, and leave the directory."""
        self._is_closed = True
        await self._reads.aclose()
        directory = self._directory
        try:
            if directory is not None:
                job = self._writes.executor.submit(self._leave, directory)
                await outlast(when_over([job]))
                job.result()
                self._directory = None
        finally:
            await self._writes.aclose()

    async def _run(
        self,
        workers: Workers,
        work: Callable[[SlotPages, range, Stop], None],
        keys: Sequence[PageKey],
        parts: Sequence[range],
    ) -> None:
        """Do work on runs of pages of one space; not where the disk fails."""
        self._check_usable()

        def job(part: range, stop: Stop) -> None:
            for run in _runs(keys, part):
                if not stop.is_set():
                    with suppress(sqlite3.Error, OSError):
                        work(self._pages(keys[run[0]].space), run, stop)

        await workers.run(job, parts)

    def _pages(self, space: PageSpace) -> SlotPages:
        """Return what this thread reads and writes pages of a space with."""
        assert self._directory is not None
        known: dict[PageSpace, SlotPages] | None = getattr(self._local, "pages", None)
        if known is None:
            self._local.index = self._directory.new_index()
            known = self._local.pages = {}
        if space not in known:
            index: SegmentIndex = self._local.index
            known[space] = SlotPages(
                self._directory.files,
                index,
                space,
                self._stock,
                digests=self._checksums,
                durable=self._durable,
                direct=self._direct,
            )
        return known[space]

    def _leave(self, directory: SegmentDirectory) -> None:
        try:
            with suppress(sqlite3.Error):
                index = directory.new_index()
                for space, slots, used in self._stock.drain():
                    index.publish(space, [], used)
                    index.release(space, slots)
        finally:
            directory.close()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("the store is closed")
        if self._directory is None:
            raise OrderError(f"{self!r} is not open: await its open() first")


def _runs(keys: Sequence[PageKey], part: range) -> Iterator[range]:
    """Yield the runs of a part whose pages are of one space."""
    start = part.start
    for place in part:
        if keys[place].space != keys[start].space:
            yield range(start, place)
            start = place
    if start < part.stop:
        yield range(start, part.stop)
