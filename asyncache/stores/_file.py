"""A store of one file a page in a directory, which any number of processes may share.

Page reads and writes do not go through aiofiles: it makes three thread hops a page,
each dearer than the read. Here a batch makes one, into buffers that are the caller's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from pathlib import Path

from asyncache.core import OrderError, PageKey, PageSpace, StoreError
from asyncache.stores._abc import PageBuffers, Status, Store, check_batch
from asyncache.stores._batches import share, until
from asyncache.stores._directory import look_up, prepare, sweep
from asyncache.stores._file_room import FileRoom, NoRoomError
from asyncache.stores._page_files import PageFiles, PageReader
from asyncache.stores._page_walk import Entry, walk
from asyncache.threads import Stop, Workers

_JOB_ENTRIES = 1024


class FileStore(Store):
    """Pages in files under a directory of a local or network file system.

    A page is written beside its place and renamed into it, so pages are there whole or
    not at all after any crash of a process. Files are this user's alone; delete them at
    will, also while the store is in use. Linux only.

    The constructor does no I/O: ``async with FileStore(path) as store``, or leave that
    to the cache.

    Args:
        directory: Made if it does not exist.
        max_bytes: What all pages may take; those that were used longest ago give way.
            All processes share the bound, so give each the same; each may be over it by
            a 256th. Finding the oldest looks at every file there is, each time an
            eighth of the bound was written. With None nothing is ever evicted: bound
            the directory from outside, as with a quota.
        num_threads: Threads that read; half as many write, so that a backlog of
            writes never delays a read.
        checksums: Whether to write an xxh3_64 digest of each layer slice and to verify
            it in each read. Without, rotten bits are served; and pages written without
            are a MISS to stores with.
        durable: Whether to wait for the disk before a page becomes visible. Without, a
            power loss may leave pages that are there and hold zeros: digests find
            them, so do not turn off both.
        create: Whether to make the directory, and to tidy up what dead writers left.
            Without, it must be a store's, and stays as it is but for pages that are
            found corrupt: those without digests are a MISS as ever, and stay too.

    Raises:
        ValueError: If ``num_threads`` or ``max_bytes`` is below 1.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_bytes: int | None = None,
        *,
        num_threads: int = 4,
        checksums: bool = True,
        durable: bool = False,
        create: bool = True,
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, not {max_bytes}")
        self._directory = os.fspath(directory)
        self._max_bytes = max_bytes
        self._checksums = checksums
        self._durable = durable
        self._creates = create
        self._num_reads, self._num_writes = num_threads, -(-num_threads // 2)
        self._reads = Workers(self._num_reads, "asyncache-read", owner="store")
        self._writes = Workers(
            self._num_writes, "asyncache-write", owner="store", after=self._reads
        )
        self._temporary: str | None = None
        self._room: FileRoom | None = None
        self._spaces: dict[PageSpace, PageFiles] = {}

    def __repr__(self) -> str:
        return f"<FileStore {self._directory!r}>"

    async def open(self) -> None:
        """Make the directory ready.

        Raises:
            StoreError: If the directory cannot be created or written, is not a
                store's, or was written by a newer asyncache: give another one. If
                it must be there and is not.
            ClosedError: If the store was closed: make another one.
        """
        self._writes.check_open()
        if self._temporary is None:
            come_in = prepare if self._creates else look_up
            temporary = await come_in(self._directory, executor=self._writes.executor)
            if self._max_bytes is not None:
                self._room = FileRoom(self._directory, temporary, self._max_bytes)
            self._temporary = temporary

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        self._check_usable()
        found = [False] * len(keys)

        def look(part: range, stop: Stop) -> None:
            for index in until(stop, part):
                key = keys[index]
                found[index] = self._files(key.space).holds(key.hash)

        await self._reads.run(look, [range(len(keys))] if keys else [])
        return found

    async def get_into(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None = None,
    ) -> list[Status]:
        self._check_usable()
        check_batch(keys, targets, layers)
        statuses, now_ns = [Status.UNAVAILABLE] * len(keys), time.time_ns()

        def read(part: range, stop: Stop) -> None:
            space, reader = None, None
            for index in until(stop, part):
                key = keys[index]
                if reader is None or key.space is not space:
                    space = key.space
                    reader = PageReader(self._files(space), layers)
                # Of a prefix the first page is used last: it is evicted last.
                used_ns = now_ns - index
                statuses[index] = reader.read(key.hash, targets[index], used_ns)

        await self._reads.run(read, share(targets, self._num_reads))
        return statuses

    async def put(
        self, keys: Sequence[PageKey], sources: Sequence[PageBuffers]
    ) -> list[Status]:
        self._check_usable()
        check_batch(keys, sources)
        statuses, now_ns = [Status.UNAVAILABLE] * len(keys), time.time_ns()
        full = threading.Event()

        def write(part: range, stop: Stop) -> None:
            for index in until(stop, part):
                key = keys[index]
                files = self._files(key.space)
                if files.holds(key.hash):
                    files.note_use(key.hash, now_ns - index)
                    statuses[index] = Status.HIT
                elif full.is_set():
                    statuses[index] = Status.REJECTED
                else:
                    used_ns = now_ns - index
                    statuses[index] = self._write(key, sources[index], used_ns, stop)
                    if statuses[index] is Status.REJECTED:
                        full.set()

        await self._writes.run(write, share(sources, self._num_writes))
        return statuses

    async def remove(self, keys: Sequence[PageKey]) -> None:
        self._check_usable()

        def unlink(part: range, stop: Stop) -> None:
            for index in until(stop, part):
                key = keys[index]
                self._files(key.space).remove(key.hash)

        await self._writes.run(unlink, [range(len(keys))] if keys else [])

    async def keys(self) -> AsyncIterator[PageKey]:
        self._check_usable()
        entries, part = walk(self._directory), list[Entry | None]()

        def advance(_: None, __: Stop) -> None:
            part[:] = islice(entries, _JOB_ENTRIES)

        while True:
            part.clear()
            try:
                await self._reads.run(advance, [None])
            except OSError as error:
                raise StoreError(f"{self!r} cannot list its pages: {error}") from error
            if not part:
                self._reads.check_open()  # it may have been closed before that began
                return
            for entry in part:
                if entry is not None and entry.is_page:
                    yield entry.key

    async def collect_garbage(self) -> int:
        """Remove the files of dead writers, and what is under a page's name and none.

        A writer is taken for dead when its file is an hour old.
        """
        self._check_usable()
        freed: list[int] = []

        def collect(_: None, stop: Stop) -> None:
            assert self._temporary is not None
            freed.append(sweep(Path(self._temporary)))
            for entry in walk(self._directory):
                if stop.is_set():
                    return
                if entry is not None and not entry.is_page:
                    self._files(entry.key.space).remove(entry.key.hash)
                    freed.append(entry.num_bytes)

        try:
            await self._writes.run(collect, [None])
        except OSError as error:
            raise StoreError(f"{self!r} cannot remove garbage: {error}") from error
        return sum(freed)

    async def aclose(self) -> None:
        await self._reads.aclose()
        await self._writes.aclose(None if self._room is None else self._room.leave)

    def _write(
        self, key: PageKey, source: PageBuffers, used_ns: int, stop: Stop
    ) -> Status:
        files, room = self._files(key.space), self._room
        if room is None:
            return files.write(key.hash, source, used_ns)
        num_bytes = files.frame.file_bytes
        try:
            room.take(num_bytes, stop)
        except NoRoomError:
            return Status.REJECTED
        except OSError:
            return Status.UNAVAILABLE
        status = files.write(key.hash, source, used_ns)
        if status is not Status.HIT:
            room.give_back(num_bytes)
        return status

    def _check_usable(self) -> None:
        self._writes.check_open()
        if self._temporary is None:
            raise OrderError(f"{self!r} is not open: await its open() first")

    def _files(self, space: PageSpace) -> PageFiles:
        files = self._spaces.get(space)
        if files is None:
            assert self._temporary is not None
            files = PageFiles(
                f"{self._directory}/{space.name}",
                self._temporary,
                space,
                digests=self._checksums,
                keeps_plain=not self._creates,
                durable=self._durable,
                notes_uses=self._room is not None and self._creates,
            )
            # Several threads may come here at once; all of theirs are as good.
            self._spaces[space] = files
        return files
