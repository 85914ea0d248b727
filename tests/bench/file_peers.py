"""SegmentStore and FileStore beside the file tiers of SGLang, vLLM and LMCache.

The same pages on the same file system in turns, all in the page cache: batches of up to
32, one after the other, each put until its bytes are in files, and under keys that are
new. Everyone has the threads of its engine's defaults. Ours is awaited; a call of
theirs blocks our loop until it is over, so that nothing is added to it. Where it can, a
peer reads into the very memory that we read into; LMCache's Python allocates its own,
and the copy from there is not counted. Our slots are there before a put, as they are in
use; its files a peer makes anew, as it always does. No peer has checksums, so our store
goes without where it is compared with each, and what they cost is in rows of their own.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asyncache.stores import FileStore, SegmentStore, Status, Store
from tests.bench.file_tiers import (
    FileTier,
    HiCacheFile,
    VllmFiles,
    VllmNativeFiles,
    rows,
)
from tests.bench.lmcache_tiers import LmcacheDisk, LmcacheFs, LmcacheNative
from tests.bench.measure import Row, Stopwatch, interleave_async
from tests.bench.pages import KIB, MIB, Pages

ROUND_BYTES = 64 * MIB
ROUND_PAGES = 512  # or less than those bytes: a new file is slow, however small
BATCH = 32  # pages
SIZES = (64 * KIB, 256 * KIB, 1 * MIB, 2 * MIB, 4 * MIB, 16 * MIB)
PLAIN = "SegmentStore"
TIERS: tuple[type[FileTier], ...] = (
    HiCacheFile,
    VllmFiles,
    LmcacheDisk,
    LmcacheFs,
    VllmNativeFiles,
    LmcacheNative,
)


class _Contestant(NamedTuple):
    name: str
    is_held_against: bool
    get: Callable[[], Awaitable[float]]
    put: Callable[[], Awaitable[float]]


def run(num_rounds: int) -> Iterator[Row]:
    """Put and get pages of several sizes."""
    tiers = [tier for tier in TIERS if tier.is_installed()]
    for tier in TIERS:
        if tier not in tiers:
            print(f"{tier.name} is not installed: make bench-peers", file=sys.stderr)
    if tiers:
        for page_bytes in SIZES:
            num_pages = min(ROUND_PAGES, ROUND_BYTES // page_bytes)
            with _Bench(page_bytes, num_pages) as bench:
                yield from asyncio.run(bench.compare(tiers, -(-num_rounds // 3)))


class _Bench(Pages):
    """Pages of one size, that all have stored."""

    def __init__(self, page_bytes: int, num_pages: int) -> None:
        super().__init__(page_bytes, num_pages)
        rows(self).random_()
        self._batches = [
            range(start, min(start + BATCH, num_pages))
            for start in range(0, num_pages, BATCH)
        ]

    async def compare(
        self, tiers: Sequence[type[FileTier]], num_rounds: int
    ) -> list[Row]:
        async with AsyncExitStack() as stack:
            contestants = [
                await self._ours(name, await stack.enter_async_context(store))
                for name, store in self._stores().items()
            ]
            contestants += [
                self._theirs(stack.enter_context(self._tier(tier))) for tier in tiers
            ]
            gets = await interleave_async(
                *(one.get for one in contestants), num_rounds=num_rounds
            )
            puts = await interleave_async(
                *(one.put for one in contestants), num_rounds=num_rounds
            )
        return [
            row
            for what, times in (("put", puts), ("get", gets))
            for row in self._rows(what, contestants, map(self.mib_per_s, times))
        ]

    def _rows(
        self, what: str, contestants: Sequence[_Contestant], rates: Iterator[float]
    ) -> Iterator[Row]:
        found = dict(zip((one.name for one in contestants), rates, strict=True))
        ours = {name: found.pop(name) for name in self._stores()}
        held = [one.name for one in contestants if one.is_held_against]
        new_row = partial(Row, unit="MiB/s", at_least=True)
        for name, rate in found.items():
            yield new_row(
                name=f"files: {what} {self.name}",
                ours=ours[PLAIN],
                baseline=rate,
                against=name,
                bound=1.0 if name in held else None,
            )
        fastest = max(held, key=found.__getitem__)
        for name in list(ours)[1:]:
            yield new_row(
                name=f"files: {what} {self.name}, {name}",
                ours=ours[name],
                baseline=found[fastest],
                against=fastest,
            )

    def _stores(self) -> dict[str, Store]:
        max_bytes = 4 * ROUND_BYTES
        return {
            PLAIN: SegmentStore(f"{self.folder}/plain", max_bytes, checksums=False),
            f"{PLAIN} with checksums": SegmentStore(f"{self.folder}/slots", max_bytes),
            "FileStore": FileStore(f"{self.folder}/files", checksums=False),
            "FileStore with checksums": FileStore(f"{self.folder}/checked"),
        }

    # What is timed.

    async def _ours(self, name: str, store: Store) -> _Contestant:
        keys = self.new_keys(self.num_pages)
        assert set(await store.put(keys, self.views)) == {Status.HIT}

        async def get() -> float:
            watch = Stopwatch()
            for at in map(_cut, self._batches):
                with watch:
                    statuses = await store.get_into(keys[at], self.views[at])
                assert set(statuses) == {Status.HIT}
            return watch.seconds

        async def put() -> float:
            new, watch = self.new_keys(self.num_pages), Stopwatch()
            for at in map(_cut, self._batches):
                with watch:
                    statuses = await store.put(new[at], self.views[at])
                assert set(statuses) == {Status.HIT}
            await store.remove(new)
            return watch.seconds

        return _Contestant(name, False, get, put)

    def _theirs(self, tier: FileTier) -> _Contestant:
        keys = self._keys_of(tier)
        for places in self._batches:
            tier.put(keys[_cut(places)], places)
        self._check(tier, keys)

        async def get() -> float:
            watch = Stopwatch()
            for places in self._batches:
                some = keys[_cut(places)]
                with watch:
                    tier.get(some, places)
            return watch.seconds

        async def put() -> float:
            new, watch = self._keys_of(tier), Stopwatch()
            for places in self._batches:
                some = new[_cut(places)]
                with watch:
                    tier.put(some, places)
            tier.remove(new)
            return watch.seconds

        return _Contestant(tier.name, not tier.is_native, get, put)

    def _keys_of(self, tier: FileTier) -> list[object]:
        return [tier.key(key.hash) for key in self.new_keys(self.num_pages)]

    def _check(self, tier: FileTier, keys: Sequence[object]) -> None:
        """See that what a peer reads is what it was given."""
        places = self._batches[-1]
        pages = rows(self)[places.start : places.stop].numpy()
        written = pages.copy()
        pages[:] = 0
        read = tier.read_back(keys[_cut(places)], places)
        assert np.array_equal(np.stack(read), written)
        pages[:] = written

    def _tier(self, kind: type[FileTier]) -> closing[FileTier]:
        folder = f"{self.folder}/{kind.__name__}"
        Path(folder).mkdir()
        return closing(kind(folder, self))


def _cut(places: range) -> slice:
    return slice(places.start, places.stop)
