"""ObjectStore beside bare obstore: the same bytes, the same server, as many requests.

The bare client keeps one object a page, looks for none, verifies none, and copies what
it has read to where the page belongs.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

import numpy as np

from asyncache.stores import ObjectStore
from tests.bench.measure import Row, Stopwatch, interleave_async
from tests.bench.pages import BATCH_BYTES, KIB, MIB, Pages
from tests.stores.object_server import BUCKET, Server, binary, options, running

NUM_REQUESTS = 16


def run(num_rounds: int) -> Iterator[Row]:
    """Read and write pages of two sizes, and look for them."""
    if binary() is None:
        print("no server to measure ObjectStore with", file=sys.stderr)
        return
    with running() as server:
        for page_bytes in (256 * KIB, 2 * MIB):
            with _Bench(server, page_bytes) as bench:
                yield from asyncio.run(bench.measure(num_rounds))


class _Bench(Pages):
    """Pages of one size in a bucket and in a device."""

    def __init__(self, server: Server, page_bytes: int) -> None:
        super().__init__(page_bytes, BATCH_BYTES // page_bytes)
        self._url = server.url

    async def measure(self, num_rounds: int) -> list[Row]:
        bare = _Bare(self._url, self)
        async with self._store(checksums=False) as plain, self._store() as checked:
            for store in (plain, checked):
                await store.put(self.keys, self.views)
            await bare.put()
            loads = await interleave_async(
                partial(self.read, plain),
                partial(self.read, checked),
                partial(self._look_and_read, checked),
                bare.get,
                num_rounds=num_rounds,
            )
            stores = await interleave_async(
                partial(self._write_after_look, plain),
                partial(self._write_after_look, checked),
                partial(self.write, checked),
                bare.put,
                num_rounds=num_rounds,
            )
            looks = await interleave_async(
                partial(self._look, plain), bare.head, num_rounds=num_rounds
            )
        name = f"{self.name} in a bucket"
        return [
            *self._rows(f"load {name}", loads),
            *self._rows(f"store {name}", stores),
            self._row(f"look up {self.num_pages} {name}", *looks, None),
        ]

    def _store(self, *, checksums: bool = True) -> ObjectStore:
        return ObjectStore(
            f"s3://{BUCKET}/{'checked' if checksums else 'plain'}",
            options=options(self._url),
            num_requests=NUM_REQUESTS,
            timeout_s=120,
            checksums=checksums,
        )

    def _rows(self, what: str, times: Sequence[float]) -> list[Row]:
        *ours, bare = times
        kinds = (
            (", no checksums", 1.1),
            (", checksums", None),
            (", checksums, not looked up before", None),
        )
        return [
            self._row(f"{what}{kind}", one, bare, bound)
            for one, (kind, bound) in zip(ours, kinds, strict=True)
        ]

    def _row(self, name: str, ours: float, bare: float, bound: float | None) -> Row:
        return Row(
            name=name,
            ours=1e3 * ours,
            unit="ms",
            baseline=1e3 * bare,
            against="bare obstore, an object a page",
            bound=bound,
        )

    async def _write_after_look(self, store: ObjectStore) -> float:
        """Write as a cache does: it has looked for the pages before it made them."""
        keys = self.new_keys(self.num_pages)
        assert not any(await store.contains(keys))
        return await self.write(store, keys)

    async def _look(self, store: ObjectStore) -> float:
        watch = Stopwatch()
        with watch:
            found = await store.contains(self.keys)
        assert all(found)
        return watch.seconds

    async def _look_and_read(self, store: ObjectStore) -> float:
        return await self._look(store) + await self.read(store)


class _Bare:
    """As little as works: obstore, and a bounded number of tasks."""

    def __init__(self, url: str, bench: _Bench) -> None:
        import obstore

        self._client = obstore
        given = options(url, unsigned_payload=True)
        self._store = obstore.store.S3Store(BUCKET, prefix="bare", **given)
        self._bench = bench
        self._names = [os.urandom(16).hex() for _ in bench.keys]
        self._targets = [
            [np.frombuffer(view, dtype=np.uint8) for view in page]
            for page in bench.views
        ]

    async def get(self) -> float:
        return await self._each(self._get)

    async def put(self) -> float:
        """Put all pages under names that are new, and remove the old ones untimed."""
        old = self._names
        self._names = [os.urandom(16).hex() for _ in old]
        seconds = await self._each(self._put)
        await self._client.delete_async(self._store, old)
        return seconds

    async def head(self) -> float:
        return await self._each(self._head)

    async def _get(self, number: int) -> None:
        reply = await self._client.get_async(self._store, self._names[number])
        data = np.frombuffer(await reply.bytes_async(), dtype=np.uint8)
        start = 0
        for target in self._targets[number]:
            np.copyto(target, data[start : start + len(target)])
            start += len(target)

    async def _put(self, number: int) -> None:
        await self._client.put_async(
            self._store,
            self._names[number],
            self._bench.views[number],
            use_multipart=False,
        )

    async def _head(self, number: int) -> None:
        await self._client.head_async(self._store, self._names[number])

    async def _each(self, job: Callable[[int], Awaitable[None]]) -> float:
        waiting = iter(range(len(self._names)))

        async def work() -> None:
            for number in waiting:
                await job(number)

        watch = Stopwatch()
        with watch:
            await asyncio.gather(*(work() for _ in range(NUM_REQUESTS)))
        return watch.seconds
