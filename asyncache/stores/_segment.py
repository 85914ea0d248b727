"""A store of preallocated files and an index, which processes of one machine share.

Pages lie in slots of files that are as long at the start as they ever will be, so a
full disk is found when the store is opened and never later, and a page costs no new
file. SQLite says which page is where, and is the lock between processes.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from asyncache.core import (
    ClosedError,
    Namespace,
    OrderError,
    PageHash,
    PageKey,
    PageSpace,
    StoreError,
)
from asyncache.stores._abc import PageBuffers, Status, Store, check_batch
from asyncache.stores._batches import first_places, runs, share
from asyncache.stores._segment_census import SegmentUsage, page_hashes, spaces
from asyncache.stores._segment_database import SegmentDatabase
from asyncache.stores._segment_directory import SegmentDirectory
from asyncache.stores._segment_files import ALIGNMENT
from asyncache.stores._segment_index import SegmentIndex
from asyncache.stores._segment_put import Put
from asyncache.stores._segment_quotas import Quotas, SegmentQuotas
from asyncache.stores._segment_room import SLOTS_PER_SEGMENT
from asyncache.stores._slot_pages import SlotPages
from asyncache.stores._stock import Stock
from asyncache.threads import Stop, Workers

_Answer = TypeVar("_Answer")

_MOST_SEGMENT_BYTES = ALIGNMENT * SLOTS_PER_SEGMENT


@dataclass(slots=True)
class _Mine:
    """What one thread works with."""

    index: SegmentIndex
    database: SegmentDatabase
    pages: dict[PageSpace, SlotPages] = field(default_factory=dict)


class SegmentStore(Store):
    """Pages in preallocated files under a directory of a local file system.

    Any number of processes on one machine may use the directory at once, also one in
    shared memory, ``/dev/shm``. They share all pages, and the pages that were used
    longest ago give way to new ones; that another process read one is known a second
    later. A page is told of when it is in place, so one that a crash cut short is never
    seen; what a power loss undoes, digests find. Linux only; on a network file system
    use :class:`FileStore`.

    The constructor does no I/O: ``async with SegmentStore(path, 100 << 30) as store``,
    or leave that to the cache.

    Args:
        directory: Made if it does not exist, for this user alone.
        max_bytes: What the segments may take; the index takes some 300 bytes a page
            more. Allocated when the store is opened, as far as there is room:
            ``num_bytes`` and a warning of the logger "asyncache" tell how far, and a
            cache's observer is told :class:`~asyncache.engine.StoreSmaller`. Who is
            alone in a directory may change what is there; who comes while others use
            it takes theirs. None takes what is there, also when alone: the directory
            must be a store's with a sound index, and stays as it is but for pages that
            are put, or found corrupt. Reads do not count as uses then, and
            pages without digests, a MISS as ever, stay.
        segment_bytes: Length of a file, which holds pages of one kind; a page must fit.
            As it is there where ``max_bytes`` is None.
        namespace_bytes: What the pages of each namespace may take, or of those that are
            named; whose pages are over that loses its own oldest ones. It binds what
            this store writes; others of the directory have bounds of their own.
        num_threads: Threads that read; half as many write, so that a backlog of writes
            never delays a read. No more than cores, so that writers leave some free.
        checksums: As for :class:`FileStore`.
        durable: Whether to wait for the disk before a page is told of.
        direct: Whether to go around the page cache of the operating system: for disks
            much larger than memory. Buffers should begin at multiples of 4096 then.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If a bound of a namespace is no int.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_bytes: int | None,
        *,
        segment_bytes: int = 256 * 2**20,
        namespace_bytes: int | Mapping[Namespace, int] | None = None,
        num_threads: int = 4,
        checksums: bool = True,
        durable: bool = False,
        direct: bool = False,
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        if not 0 < segment_bytes <= _MOST_SEGMENT_BYTES or segment_bytes % ALIGNMENT:
            raise ValueError(
                f"segment_bytes must be a multiple of {ALIGNMENT} up to "
                f"{_MOST_SEGMENT_BYTES}, not {segment_bytes}"
            )
        if max_bytes is not None and max_bytes < segment_bytes:
            raise ValueError(
                f"max_bytes must hold a segment of {segment_bytes}, not {max_bytes}"
            )
        self._path = os.fspath(directory)
        self._max_segments = None if max_bytes is None else max_bytes // segment_bytes
        self._segment_bytes = segment_bytes
        self._quotas = Quotas(namespace_bytes)
        self._checksums = checksums
        self._durable = durable
        self._direct = direct
        self._num_reads, self._num_writes = num_threads, -(-num_threads // 2)
        self._reads = Workers(self._num_reads, "asyncache-read", owner="store")
        self._writes = Workers(
            self._num_writes, "asyncache-write", owner="store", after=self._reads
        )
        self._directory: SegmentDirectory | None = None
        self._stock = Stock(notes_uses=max_bytes is not None)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._is_closed = False
        self._process = 0

    def __repr__(self) -> str:
        return f"<SegmentStore {self._path!r}>"

    @property
    def num_bytes(self) -> int:
        """Bytes that the files take: less than asked for where there was no room."""
        return 0 if self._directory is None else self._directory.num_bytes

    @property
    def missing_bytes(self) -> int:
        if self._directory is None or self._max_segments is None:
            return 0
        return max(0, self._max_segments * self._segment_bytes - self.num_bytes)

    async def usage(self) -> SegmentUsage:
        """Return how full the store is, and who claims what in it.

        Raises:
            StoreError: If the disk fails, or others are in the way.
        """

        def count(my: _Mine) -> SegmentUsage:
            assert self._directory is not None
            return self._directory.usage(my.database)

        return await self._ask(self._reads, count)

    async def open(self) -> None:
        """Allocate the files, and take part in the use of the directory.

        Raises:
            StoreError: If the directory cannot be created or written, may be written
                by other users, has no room for a single segment, is not such a
                store's, has segments of another length, or was written by a newer
                asyncache; or if direct I/O is impossible there. If what is there was
                to be taken, and is broken.
            ClosedError: If the store was closed: make another one.
        """
        self._check_open()
        if self._directory is None:
            await self._writes.run(self._enter, [None])
        self._check_open()

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

        await self._run(self._reads, read, keys, share(targets, self._num_reads))
        return statuses

    async def put(
        self, keys: Sequence[PageKey], sources: Sequence[PageBuffers]
    ) -> list[Status]:
        check_batch(keys, sources)
        self._check_usable()
        # Hashes are told apart far quicker than keys, and one is here twice but rarely.
        is_clear = len({key.hash for key in keys}) == len(keys)
        if not is_clear and len(once := first_places(keys)) < len(keys):
            some = list(once.values())
            found = await self.put([keys[n] for n in some], [sources[n] for n in some])
            said = dict(zip(once, found, strict=True))
            return [said[key] for key in keys]
        put = Put(keys, sources, self._stock, self._pages)
        try:
            # Those that wait for the first to claim do less in the second round.
            parts = share(sources, self._num_writes, rounds=2)
            await self._guard(self._writes, put.write, parts)
        finally:
            put.end(self._writes)
        return put.statuses

    async def remove(self, keys: Sequence[PageKey]) -> None:
        def forget(pages: SlotPages, run: range, _: Stop) -> None:
            pages.remove([keys[place].hash for place in run])

        await self._run(self._writes, forget, keys, [range(len(keys))] if keys else [])

    async def keys(self) -> AsyncIterator[PageKey]:
        for number, space in await self._ask(self._reads, _spaces):
            after = b""
            while part := await self._ask(
                self._reads, partial(_page_hashes, number, after)
            ):
                for page_hash in part:
                    yield PageKey(page_hash, space)
                after = part[-1]

    async def collect_garbage(self) -> int:
        """Free what dead processes claimed; forget segments without a file."""

        def collect(my: _Mine) -> int:
            assert self._directory is not None
            return self._directory.collect_garbage(my.index, my.database)

        return await self._ask(self._writes, collect)

    async def aclose(self) -> None:
        """Give back what this store claimed, and leave the directory."""
        self._is_closed = True
        try:
            await self._reads.aclose()
        finally:
            await self._writes.aclose(self._leave)

    async def _run(
        self,
        workers: Workers,
        work: Callable[[SlotPages, range, Stop], None],
        keys: Sequence[PageKey],
        parts: list[range],
    ) -> None:
        """Do work on runs of pages of one space; not where the disk fails."""
        self._check_usable()

        def job(part: range, stop: Stop) -> None:
            for run in runs(keys, part):
                if not stop.is_set():
                    work(self._pages(keys[run[0]].space, stop), run, stop)

        await self._guard(workers, job, parts)

    async def _guard(
        self, workers: Workers, job: Callable[[range, Stop], None], parts: list[range]
    ) -> None:
        """Run jobs; where the disk fails, what was not reached has no answer."""

        def guarded(part: range, stop: Stop) -> None:
            try:
                job(part, stop)
            except sqlite3.ProgrammingError:
                raise  # ours, not the disk's
            except (sqlite3.Error, OSError):
                pass

        await workers.run(guarded, parts)

    async def _ask(
        self, workers: Workers, question: Callable[[_Mine], _Answer]
    ) -> _Answer:
        """Return what a thread answers.

        Raises:
            StoreError: If the disk fails, or others are in the way.
        """
        self._check_usable()
        answers: list[_Answer] = []

        def job(_: None, stop: Stop) -> None:
            answers.append(question(self._my(stop)))

        try:
            await workers.run(job, [None])
        except (sqlite3.Error, OSError) as error:
            self._check_usable()
            raise StoreError(f"{self!r} cannot tell: {error}") from error
        for answer in answers:
            return answer
        raise ClosedError("the store was closed meanwhile")

    def _my(self, stop: Stop) -> _Mine:
        """Return what this thread works with."""
        assert self._directory is not None
        mine: _Mine | None = getattr(self._local, "mine", None)
        if mine is None:
            mine = self._local.mine = _Mine(*self._directory.new_index())
        mine.database.stop = stop
        return mine

    def _pages(self, space: PageSpace, stop: Stop) -> SlotPages:
        """Return what this thread reads and writes pages of a space with."""
        directory, mine = self._directory, self._my(stop)
        assert directory is not None
        if space not in mine.pages:
            segment_bytes = directory.files.segment_bytes
            quotas = SegmentQuotas(
                self._quotas, mine.index, mine.database, segment_bytes
            )
            mine.pages[space] = SlotPages(
                directory.files,
                mine.index,
                space,
                stock=self._stock,
                quotas=quotas,
                digests=self._checksums,
                durable=self._durable,
                direct=self._direct,
                keeps_plain=self._max_segments is None,
            )
        return mine.pages[space]

    def _enter(self, _: None, stop: Stop) -> None:
        with self._lock:
            if self._directory is None:
                self._process = os.getpid()
                self._directory = SegmentDirectory(
                    self._path,
                    max_segments=self._max_segments,
                    segment_bytes=self._segment_bytes,
                    durable=self._durable,
                    direct=self._direct,
                    stop=stop,
                )

    def _leave(self) -> None:
        with self._lock:
            directory, self._directory = self._directory, None
            # After a fork all of it is the parent's.
            if directory is None or self._process != os.getpid():
                return
            owns_something = True
            with suppress(sqlite3.Error, OSError):
                index, _ = directory.new_index()
                index.leave(self._stock.take_used())
                owns_something = False
            directory.close(owns_something=owns_something)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the store is closed")

    def _check_usable(self) -> None:
        self._check_open()
        if self._directory is None:
            raise OrderError(f"{self!r} is not open: await its open() first")
        if self._process != os.getpid():
            raise OrderError(f"{self!r} was opened by the parent of this process")


def _spaces(my: _Mine) -> list[tuple[int, PageSpace]]:
    return spaces(my.database)


def _page_hashes(space: int, after: bytes, my: _Mine) -> list[PageHash]:
    return page_hashes(my.database, space, after)
