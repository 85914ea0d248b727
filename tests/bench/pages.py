"""Pages in a device's memory, and a store that reads and writes them in place."""

from __future__ import annotations

import tempfile
from typing import Self

from asyncache.core import PageKey
from asyncache.devices import CpuDevice
from asyncache.stores import Status, Store
from tests.bench import inputs
from tests.bench.measure import Stopwatch

KIB, MIB = 2**10, 2**20
BATCH_BYTES = 32 * MIB  # what a StoreLinker moves at once
NUM_THREADS = 4
NUM_LAYERS = {
    16 * KIB: 4,
    64 * KIB: 4,
    256 * KIB: 8,
    1 * MIB: 16,
    2 * MIB: 32,
    4 * MIB: 64,
    16 * MIB: 64,
}


class Pages:
    """Pages of one size, their keys, and a folder for whatever keeps them."""

    def __init__(self, page_bytes: int, num_pages: int) -> None:
        layout = inputs.layout(page_bytes, NUM_LAYERS[page_bytes])
        self.page_bytes, self.num_pages = page_bytes, num_pages
        self.name = f"{page_bytes // KIB} KiB pages"
        self.device = device = CpuDevice(layout, num_pages=num_pages)
        device.tensor("kv").fill_(1.0)
        self.views = device.page_views("kv", range(num_pages))
        self._space = layout.space(layout.pools[0])
        self.keys = self.new_keys(num_pages)
        self._folder = tempfile.TemporaryDirectory(prefix="asyncache-bench-")
        self.folder = self._folder.name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def new_keys(self, count: int) -> list[PageKey]:
        return [PageKey(one, self._space) for one in inputs.new_hashes(count)]

    def mib_per_s(self, seconds: float) -> float:
        return self.num_pages * self.page_bytes / MIB / seconds

    async def read(self, store: Store) -> float:
        """Read all pages; return the seconds."""
        watch = Stopwatch()
        with watch:
            statuses = await store.get_into(self.keys, self.views)
        assert statuses == [Status.HIT] * self.num_pages
        return watch.seconds

    async def write(self, store: Store, keys: list[PageKey] | None = None) -> float:
        """Write all pages under names that are new, and remove them untimed."""
        keys = keys or self.new_keys(self.num_pages)
        watch = Stopwatch()
        with watch:
            statuses = await store.put(keys, self.views)
        assert statuses == [Status.HIT] * self.num_pages
        await store.remove(keys)
        return watch.seconds
