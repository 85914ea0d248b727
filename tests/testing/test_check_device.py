"""The kit finds what is wrong with a device."""

from __future__ import annotations

import asyncio

import pytest

from asyncache.core import AttentionPool, KVLayout
from asyncache.devices import CpuDevice
from asyncache.testing import check_device

LAYOUT = KVLayout(
    model="m",
    page_tokens=2,
    pools=(AttentionPool(num_layers=3, num_kv_heads=1, head_dim=2, dtype="int8"),),
)


class WritesAllLayers(CpuDevice):
    def start_write(self, pool, pages, source, layers=None):
        copy = super().start_write(pool, pages, source, layers)
        if layers == range(1, 2):
            self.tensor(pool)[pages[0], 0] = 0
        return copy


class ForgetsToCopy(CpuDevice):
    def copy_pages(self, pool, sources, targets, *, stream=None):
        super().copy_pages(pool, sources[:1], targets[:1], stream=stream)


class HandsOutCopies(CpuDevice):
    def page_views(self, pool, pages, layers=None):
        views = super().page_views(pool, pages, layers)
        return [[memoryview(bytearray(view)) for view in page] for page in views]


class HandsOutACopyOfTheTensor(CpuDevice):
    def tensor(self, pool):
        return super().tensor(pool).clone()


class TakesAnyPage(CpuDevice):
    def start_write(self, pool, pages, source, layers=None):
        in_pool = [page % self.num_pages[pool] for page in pages]
        return super().start_write(pool, in_pool, source, layers)


class WritesLate(CpuDevice):
    """As a thread does whose caller was cancelled."""

    late = None

    async def write_pages(self, pool, pages, source, layers=None):
        try:
            await super().write_pages(pool, pages, source, layers)
        except asyncio.CancelledError:
            self.late = (pool, pages, source, layers)
            raise

    async def read_pages(self, pool, pages, target, layers=None):
        if self.late is not None:
            await super().write_pages(*self.late)
        await super().read_pages(pool, pages, target, layers)


class NeverTells(CpuDevice):
    """As one that only whoever waits hears from: staging would never come back."""

    def start_write(self, pool, pages, source, layers=None):
        copy = super().start_write(pool, pages, source, layers)
        copy.when_over = lambda call: None
        return copy


class CutsStaging(CpuDevice):
    async def allocate_staging(self, num_bytes):
        memory = await super().allocate_staging(num_bytes)
        return memory[: num_bytes - 1]


class CannotBeClosedTwice(CpuDevice):
    async def aclose(self):
        assert self._pools, "closed twice"
        await super().aclose()


@pytest.mark.parametrize(
    ("broken", "match"),
    [
        (WritesAllLayers, "nothing else is written"),
        (ForgetsToCopy, "pages are copied, no others"),
        (HandsOutCopies, "views write through"),
        (HandsOutACopyOfTheTensor, "the pages themselves"),
        (TakesAnyPage, "ValueError was not raised"),
        (NeverTells, "each copy tells once"),
        (CutsStaging, "bytes as asked"),
        (WritesLate, "no write after the return"),
        (CannotBeClosedTwice, "closed twice"),
    ],
)
async def test_a_broken_device_is_found(broken, match):
    with pytest.raises(AssertionError, match=match) as caught:
        await check_device(lambda: broken(LAYOUT, 4))
    assert caught.value.__notes__


async def test_a_pool_that_is_too_small_cannot_be_checked():
    with pytest.raises(AssertionError, match="needs 4 pages"):
        await check_device(lambda: CpuDevice(LAYOUT, 3))
