from array import array
from dataclasses import replace

import pytest

from asyncache import AttentionPool, CpuDevice, KVLayout, MemoryStore, StoreLinker
from asyncache.core import LoadPlan, Moved, OffloadPlan, PageHash, PageKey
from asyncache.testing import FailPoint, Fault, FaultyStore

POOL = AttentionPool(num_layers=2, num_kv_heads=1, head_dim=4, dtype="uint8")
LAYOUT = KVLayout(model="m", page_tokens=2, pools=(POOL,))
SPACE = LAYOUT.space(POOL)
HASHES = [PageHash(bytes([page]) * 32) for page in range(7)]


def moved(pages):
    return (Moved(0, 3, array("i", pages), HASHES),)


async def test_a_load_of_many_batches_is_as_good_as_its_first_bad_page():
    device = CpuDevice(LAYOUT, 14)
    linker = StoreLinker(MemoryStore(2**20), device, batch_bytes=2 * SPACE.page_bytes)
    await linker.open()
    device.tensor("kv")[:7] = 9
    await linker.offload(OffloadPlan(1, 3, 10, moved(range(7)), None))

    landed = []
    plan = LoadPlan(2, 3, 10, moved(range(7, 14)))
    assert await linker.load(plan, landed.append) == 7
    assert landed == [1]
    assert (device.tensor("kv") == 9).all()

    await linker._store.remove([PageKey(HASHES[4], SPACE)])
    assert await linker.load(plan, landed.append) == 4
    assert landed == [1]
    await linker.aclose()
    await device.aclose()


@pytest.mark.parametrize("bad", [(2, 5), (5, 2)])
async def test_a_load_of_two_pools_is_as_good_as_the_first_bad_page_of_either(bad):
    pools = (POOL, replace(POOL, name="other"))
    layout = KVLayout(model="m", page_tokens=2, pools=pools)
    device, store = CpuDevice(layout, 14), MemoryStore(2**20)
    linker = StoreLinker(store, device)
    await linker.open()
    written = tuple(Moved(at, 3, array("i", range(7)), HASHES) for at in range(2))
    await linker.offload(OffloadPlan(1, 3, 10, written, None))
    spaces = map(layout.space, pools)
    await store.remove(
        [PageKey(HASHES[at], space) for at, space in zip(bad, spaces, strict=True)]
    )
    read = tuple(Moved(at, 3, array("i", range(7, 14)), HASHES) for at in range(2))
    landed = []
    assert await linker.load(LoadPlan(2, 3, 10, read), landed.append) == 2
    assert landed == []
    await linker.aclose()
    await device.aclose()


@pytest.mark.parametrize("bad", [(2, 5), (5, 2)])
async def test_a_load_in_parts_is_as_good_as_the_first_bad_page_of_any_part(bad):
    device, inner = CpuDevice(LAYOUT, 14), MemoryStore(2**20)
    store = inner
    for nth, at in enumerate(bad, 1):
        key, point = PageKey(HASHES[at], SPACE), FailPoint(nth)
        store = FaultyStore(store, Fault.MISSING, keys=[key], point=point)
    await StoreLinker(inner, device).offload(
        OffloadPlan(1, 3, 10, moved(range(7)), None)
    )
    linker = StoreLinker(store, device, layer_groups=2)
    landed = []
    plan = LoadPlan(2, 3, 10, moved(range(7, 14)))
    assert await linker.load(plan, landed.append) == 2
    assert landed == []
    await linker.aclose()
    await device.aclose()
