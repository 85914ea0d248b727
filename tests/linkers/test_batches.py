from array import array

from asyncache import AttentionPool, CpuDevice, KVLayout, MemoryStore, StoreLinker
from asyncache.core import LoadPlan, Moved, OffloadPlan, PageHash, PageKey

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
    assert landed == [0, 1]
    assert (device.tensor("kv") == 9).all()

    await linker._store.remove([PageKey(HASHES[4], SPACE)])
    assert await linker.load(plan, landed.append) == 4
    assert landed == [0, 1]
    await linker.aclose()
    await device.aclose()
