"""A store on a Redis or Valkey server, or a cluster of them.

Page bytes do not go through redis-py: it made the 4 MiB that a socket moves at 2.1 GB/s
into 0.7, with copies on the way. Blocking sockets on threads of our own read as fast as
a protocol on the event loop, or faster, and take none of the loop's time; one system
call fills a page, and shutting the socket down ends it at once.
"""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from asyncache.core import ClosedError, OrderError, PageKey, PageSpace, StoreError
from asyncache.stores._abc import PageBuffers, Status, Store, check_batch
from asyncache.stores._redis_nodes import Node, Nodes
from asyncache.stores._redis_pages import (
    Reader,
    Shelf,
    Writer,
    are_there,
    remove,
    scan,
)
from asyncache.stores._redis_url import Door
from asyncache.stores._redis_wire import ReplyError
from asyncache.threads import Stop, Workers

_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# Where a round trip and a hop between threads stop to count against the bytes.
_JOB_BYTES = 4 * 2**20
# The requests for so many fit into any socket's buffers: neither end waits for the
# other to read.
_JOB_PAGES = 256
# Answers without bytes do.
_JOB_QUESTIONS = 2048
_MIN_TTL_S, _MAX_TTL_S = 0.001, 1e9
_MAX_TIMEOUT_S = 3600.0


class _Part(NamedTuple):
    node: Node
    indices: Sequence[int]


class RedisStore(Store):
    """Pages on a Redis or Valkey server, which any number of hosts may share.

    A page is a string under ``<prefix>:<space>:<hash>``, with an xxh3_64 digest a layer
    slice that each read verifies. The server evicts: give it ``maxmemory`` and
    ``maxmemory-policy allkeys-lru``. A server that is full and does not evict REJECTS;
    one that is down, paused, loading, or a replica is UNAVAILABLE, and used again as
    soon as it answers. A server that says that it belongs to a cluster is believed,
    and the others are asked for their part.

    Needs redis-py: ``pip install 'asyncache[redis]'``. The constructor does no I/O.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, as redis-py takes it; of its
            options those of TLS (``ssl_ca_certs`` and others) and ``db``.
        prefix: What all keys begin with. Pages are found by content, so that even
            different models may share one.
        ttl_s: Seconds that a page lives after it was stored; for ever when None.
        timeout_s: Seconds that a call takes at most. Pages that it did not reach by
            then are UNAVAILABLE.
        num_connections: Connections that read, a thread each; half as many write, so
            that a backlog of writes never delays a read.

    Raises:
        ImportError: If redis-py is not installed.
        StoreError: If the URL cannot be read.
        ValueError: If another argument is out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "asyncache",
        ttl_s: float | None = None,
        timeout_s: float = 5.0,
        num_connections: int = 4,
    ) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"prefix must match {_PREFIX.pattern}, not {prefix!r}")
        if ttl_s is not None and not _MIN_TTL_S <= ttl_s <= _MAX_TTL_S:
            raise ValueError(
                f"ttl_s must be in [{_MIN_TTL_S}, {_MAX_TTL_S}], not {ttl_s}"
            )
        if not 0 < timeout_s <= _MAX_TIMEOUT_S:
            raise ValueError(
                f"timeout_s must be in (0, {_MAX_TIMEOUT_S}], not {timeout_s}"
            )
        if num_connections < 1:
            raise ValueError(
                f"num_connections must be at least 1, not {num_connections}"
            )
        self._door = Door(url)
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._nodes = Nodes(self._door, timeout_s)
        num_writes = -(-num_connections // 2)
        self._reads = Workers(num_connections, "asyncache-redis-read", owner="store")
        self._writes = Workers(num_writes, "asyncache-redis-write", owner="store")
        self._shelves: dict[PageSpace, Shelf] = {}
        self._is_open = False

    def __repr__(self) -> str:
        return f"<RedisStore {self._door} {self._prefix}>"

    async def open(self) -> None:
        """Find out who there is. Nobody may be: they may come up later.

        Raises:
            StoreError: If the server does not let us in: the password is wrong, the
                database does not exist, its certificate is another's.
            ClosedError: If the store was closed: make another one.
        """
        self._reads.check_open()
        if not self._is_open:
            await self._reads.run(self._look, [()], timeout_s=self._timeout_s)
            self._is_open = True

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        found = [False] * len(keys)

        def look(part: _Part, stop: Stop) -> None:
            with part.node.wire(stop) as wire:
                names = [self._name(keys[index]) for index in part.indices]
                answers = are_there(wire, names)
                for index, is_there in zip(part.indices, answers, strict=True):
                    found[index] = bool(is_there)

        await self._run(self._reads, look, keys)
        return found

    async def get_into(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None = None,
    ) -> list[Status]:
        self._check_usable()
        check_batch(keys, targets, layers)
        statuses = [Status.UNAVAILABLE] * len(keys)

        def read(part: _Part, stop: Stop) -> None:
            with part.node.wire(stop) as wire:
                spaces = {keys[index].space for index in part.indices}
                readers = {
                    space: Reader(wire, self._shelf(space), layers) for space in spaces
                }
                asked = [keys[index] for index in part.indices]
                wire.send(b"".join(readers[key.space].ask(key.hash) for key in asked))
                for index, key in zip(part.indices, asked, strict=True):
                    reader = readers[key.space]
                    statuses[index] = reader.read(key.hash, targets[index])
                remove(
                    wire,
                    [
                        self._name(keys[index])
                        for index in part.indices
                        if statuses[index] is Status.CORRUPT
                    ],
                )

        await self._run(self._reads, read, keys, _sizes(targets))
        return statuses

    async def put(
        self, keys: Sequence[PageKey], sources: Sequence[PageBuffers]
    ) -> list[Status]:
        self._check_usable()
        check_batch(keys, sources)
        statuses = [Status.UNAVAILABLE] * len(keys)
        full = threading.Event()

        def write(part: _Part, stop: Stop) -> None:
            with part.node.wire(stop) as wire:
                names = [self._name(keys[index]) for index in part.indices]
                there = list(are_there(wire, names))
                writer = Writer(wire, statuses.__setitem__, full)
                for index, is_there in zip(part.indices, there, strict=True):
                    if is_there:
                        statuses[index] = Status.HIT
                    elif is_there is not None:
                        shelf, key = self._shelf(keys[index].space), keys[index]
                        command = partial(shelf.set, key.hash, sources[index])
                        writer.write(index, command)
                writer.finish()

        await self._run(self._writes, write, keys, _sizes(sources))
        return statuses

    async def remove(self, keys: Sequence[PageKey]) -> None:
        def unlink(part: _Part, stop: Stop) -> None:
            with part.node.wire(stop) as wire:
                remove(wire, [self._name(keys[index]) for index in part.indices])

        await self._run(self._writes, unlink, keys)

    async def keys(self) -> AsyncIterator[PageKey]:
        """Yield the keys of all pages under the prefix.

        One may come twice: the server says so of its SCAN.
        """
        self._check_usable()
        await self._refresh(self._reads)
        for node in self._nodes.all():
            cursor, found = await self._scan(node, b"0")
            for key in found:
                yield key
            while cursor != b"0":
                cursor, found = await self._scan(node, cursor)
                for key in found:
                    yield key

    async def aclose(self) -> None:
        try:
            await self._reads.aclose()
            await self._writes.aclose()
        finally:
            self._nodes.close()

    def _check_usable(self) -> None:
        self._reads.check_open()
        if not self._is_open:
            raise OrderError(f"{self!r} is not open: await its open() first")

    async def _run(
        self,
        workers: Workers,
        job: Callable[[_Part, Stop], None],
        keys: Sequence[PageKey],
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Run a job for all pages; what cannot be had now is left as it was."""
        self._check_usable()

        def attempt(part: _Part, stop: Stop) -> None:
            with suppress(OSError, StoreError):
                job(part, stop)

        timeout_s = await self._refresh(workers)
        with suppress(ClosedError):  # closed meanwhile, so that nothing was reached
            await workers.run(attempt, self._split(keys, sizes), timeout_s=timeout_s)

    async def _refresh(self, workers: Workers) -> float:
        """Look around again if need be; return how long the rest of a call may take."""

        def look_again(_: tuple[()], stop: Stop) -> None:
            with suppress(StoreError):
                self._look(_, stop)

        if not self._nodes.take_doubts():
            return self._timeout_s
        timeout_s = self._timeout_s / 2  # at most: there may be nobody to ask
        await workers.run(look_again, [()], timeout_s=timeout_s)
        return timeout_s

    async def _scan(self, node: Node, cursor: bytes) -> tuple[bytes, list[PageKey]]:
        self._check_usable()
        answers: list[tuple[bytes, list[PageKey]]] = []
        reason: object = f"no answer within {self._timeout_s} s"

        def ask(_: None, stop: Stop) -> None:
            try:
                with node.wire(stop) as wire:
                    answers.append(scan(wire, self._prefix, cursor))
            except OSError:
                if not stop.is_set():  # which is what ended it
                    raise

        try:
            await self._reads.run(ask, [None], timeout_s=self._timeout_s)
        except ReplyError as error:  # it never will: we may not, or it knows no SCAN
            raise StoreError(f"RedisStore cannot list its pages: {error}") from error
        except OSError as error:
            reason = error
        for answer in answers:
            return answer
        self._check_usable()
        raise StoreError(f"{self!r} cannot list its pages: {reason}")

    def _look(self, _: tuple[()], stop: Stop) -> None:
        with suppress(OSError):
            self._nodes.look_around(stop, self._prefix)

    def _split(
        self, keys: Sequence[PageKey], sizes: Sequence[int] | None
    ) -> list[_Part]:
        """Cut a batch into jobs, each for one server and worth a round trip."""
        by_node: dict[Node, Sequence[int]] = {}
        if self._nodes.is_cluster:
            lists: dict[Node, list[int]] = {}
            for index, key in enumerate(keys):
                lists.setdefault(self._nodes.node_of(self._name(key)), []).append(index)
            by_node.update(lists)
        elif keys:
            by_node[self._nodes.node_of(b"")] = range(len(keys))
        return [
            _Part(node, part)
            for node, indices in by_node.items()
            for part in _cut(indices, sizes)
        ]

    def _name(self, key: PageKey) -> bytes:
        return self._shelf(key.space).key(key.hash)

    def _shelf(self, space: PageSpace) -> Shelf:
        shelf = self._shelves.get(space)
        if shelf is None:
            # Several threads may come here at once; all of theirs are as good.
            shelf = self._shelves[space] = Shelf(self._prefix, space, self._ttl_s)
        return shelf


def _sizes(pages: Sequence[PageBuffers]) -> list[int]:
    return [sum(map(len, page)) for page in pages]


def _cut(indices: Sequence[int], sizes: Sequence[int] | None) -> list[Sequence[int]]:
    most = _JOB_QUESTIONS if sizes is None else _JOB_PAGES
    parts, start, num_bytes = [], 0, 0
    for stop, index in enumerate(indices, 1):
        num_bytes += 0 if sizes is None else sizes[index]
        if num_bytes >= _JOB_BYTES or stop - start == most:
            parts.append(indices[start:stop])
            start, num_bytes = stop, 0
    if start < len(indices):
        parts.append(indices[start:])
    return parts
