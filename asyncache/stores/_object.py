"""A store in a bucket: S3, Google Cloud Storage, Azure, and all that speak like them.

A bucket has room, and takes its time. So there are few requests: small pages travel in
packs, and pages that were put together are read together.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import anyio

from asyncache.core import OrderError, PageKey, StoreError
from asyncache.stores._abc import PageBuffers, Status, Store, check_batch
from asyncache.stores._object_bucket import Bucket, Entry
from asyncache.stores._object_catalog import Catalog
from asyncache.stores._object_census import Census
from asyncache.stores._object_lane import Lane
from asyncache.stores._object_reads import Reading
from asyncache.stores._object_url import connect, load_client, name_of
from asyncache.stores._object_writes import Writing
from asyncache.threads import Workers

_PREFIX = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,64}(/(?!\.)[A-Za-z0-9_.-]{1,64}){0,7}")
# Far below the hour after which a pack that nobody points at is garbage.
_MAX_TIMEOUT_S = 600.0
# They copy what the network brings, at many times its speed.
_NUM_THREADS = 2


class ObjectStore(Store):
    """Pages in a bucket, which any number of hosts may share.

    A page of 2 MiB or more is an object. Smaller ones of a batch are packed into
    objects of up to 4 MiB, with a pointer of 56 bytes a page: a load that follows a
    lookup reads what lies together in one request. Each read verifies an xxh3_64
    digest a layer slice. A server that is down, slow or in trouble is UNAVAILABLE, and
    used again as soon as it answers; nothing is tried twice, unless ``options`` ask
    for it.

    The bucket evicts: give it a lifecycle rule that expires objects by age. Removing a
    page removes its pointer; the bytes stay until :meth:`collect_garbage`.

    Needs obstore: ``pip install 'asyncache[object]'``. The constructor does no I/O
    over the network.

    Args:
        target: ``s3://bucket/path``, ``gs://``, ``az://``, ``file:///``, or a store
            that obstore made, such as its S3Store or MemoryStore. Give one that you
            made a timeout, and no retries.
        options: For a URL: what obstore calls the configuration of its store, such as
            ``endpoint`` and ``access_key_id``, and its ``client_options``,
            ``retry_config`` and ``credential_provider``. Those that are missing it
            takes from the environment.
        prefix: Folder under which all objects are. Pages are found by content, so that
            even different models may share one.
        timeout_s: Seconds that a call takes at most. Pages that it did not reach by
            then are UNAVAILABLE.
        num_requests: Requests that read at the same time, each of up to 4 MiB or a
            page, held in memory; as many write, so that a backlog of writes never
            delays a read.
        checksums: Whether to write digests of the slices, and to read only pages with
            them, verified.

    Raises:
        ImportError: If obstore is not installed.
        StoreError: If the URL or an option cannot be read.
        TypeError: If the target is neither a URL nor a store of obstore's.
        ValueError: If another argument is out of range.
    """

    def __init__(
        self,
        target: object,
        *,
        options: Mapping[str, Any] | None = None,
        prefix: str = "",
        timeout_s: float = 10.0,
        num_requests: int = 16,
        checksums: bool = True,
    ) -> None:
        if prefix and not _PREFIX.fullmatch(prefix):
            raise ValueError(f"prefix must match {_PREFIX.pattern}, not {prefix!r}")
        if not 0 < timeout_s <= _MAX_TIMEOUT_S:
            raise ValueError(
                f"timeout_s must be in (0, {_MAX_TIMEOUT_S}], not {timeout_s}"
            )
        if num_requests < 1:
            raise ValueError(f"num_requests must be at least 1, not {num_requests}")
        client = load_client()
        self._name = name_of(target)
        self._prefix = f"{prefix}/" if prefix else ""
        self._timeout_s = timeout_s
        store = connect(client, target, options, timeout_s)
        bucket = Bucket(client, store)
        self._catalog = Catalog(bucket, self._prefix, checksums=checksums)
        readers = Workers(_NUM_THREADS, "asyncache-object-read", owner="store")
        writers = Workers(_NUM_THREADS, "asyncache-object-write", owner="store")
        self._reads = Lane(num_requests, readers)
        self._writes = Lane(num_requests, writers)
        self._calls: set[anyio.CancelScope] = set()
        self._is_open = False

    def __repr__(self) -> str:
        return f"<ObjectStore {self._name} {self._prefix!r}>"

    async def open(self) -> None:
        """Find out who there is. Nobody may be: they may come up later.

        Raises:
            StoreError: If the bucket does not exist, or does not let us in.
            ClosedError: If the store was closed: make another one.
        """
        self._reads.workers.check_open()
        if not self._is_open:
            with self._call():
                await self._catalog.bucket.probe(self._prefix, self._name)
            self._is_open = True

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        self._check_usable()
        found = [False] * len(keys)

        async def look(index: int) -> None:
            status, _ = await self._catalog.look(keys[index])
            found[index] = status is Status.HIT

        with self._call():
            await self._reads.each(range(len(keys)), look)
        return found

    async def get_into(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None = None,
    ) -> list[Status]:
        self._check_usable()
        check_batch(keys, targets, layers)
        reading = Reading(self._catalog, self._reads, keys, targets, layers)
        with self._call():
            await reading.run()
        return reading.statuses

    async def put(
        self, keys: Sequence[PageKey], sources: Sequence[PageBuffers]
    ) -> list[Status]:
        self._check_usable()
        check_batch(keys, sources)
        writing = Writing(self._catalog, self._writes, keys, sources)
        with self._call():
            await writing.run()
        return writing.statuses

    async def remove(self, keys: Sequence[PageKey]) -> None:
        self._check_usable()
        with self._call():
            await self._writes.each(list(dict.fromkeys(keys)), self._catalog.drop)

    async def keys(self) -> AsyncIterator[PageKey]:
        self._check_usable()
        async for entries in self._walk(self._prefix):
            for entry in entries:
                key = self._catalog.key(entry.path)
                if key is not None:
                    yield key

    async def collect_garbage(self) -> int:
        """Remove packs without pointers, and pointers without a pack.

        A pack that is younger than an hour stays: its writer may be about to point at
        it. The clocks of this host and of the bucket must not be further apart.
        """
        self._check_usable()
        census = Census(self._catalog, self._reads)
        async for entries in self._walk(self._catalog.packs):
            census.note_packs(entries)
        async for entries in self._walk(self._prefix):
            with self._call():
                await census.note_pages(entries)
        with self._call():
            await census.remove_packs()
        return census.num_bytes

    async def aclose(self) -> None:
        for scope in self._calls:
            scope.cancel()
        try:
            await self._reads.workers.aclose()
        finally:
            await self._writes.workers.aclose()

    def _check_usable(self) -> None:
        self._reads.workers.check_open()
        if not self._is_open:
            raise OrderError(f"{self!r} is not open: await its open() first")

    async def _walk(self, folder: str) -> AsyncIterator[list[Entry]]:
        advance, entries = self._catalog.bucket.walk(folder), None
        while entries is None or entries:
            entries = None
            with self._call():
                entries = await advance()
            self._check_usable()
            if entries is None:
                raise StoreError(f"{self!r} cannot list its pages: no answer")
            yield entries

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Have what is done in here end in time, or when the store is closed."""
        with anyio.move_on_after(self._timeout_s) as scope:
            self._calls.add(scope)
            try:
                yield
            finally:
                self._calls.discard(scope)
