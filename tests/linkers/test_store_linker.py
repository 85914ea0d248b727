"""A store and a device, linked: which bytes move where, and what is said of them."""

from __future__ import annotations

from array import array

import anyio
import pytest
import torch
from anyio import wait_all_tasks_blocked

from asyncache.core import (
    Asked,
    AttentionPool,
    KVLayout,
    LoadPlan,
    LookupPlan,
    Moved,
    OffloadPlan,
    PageKey,
    WindowPool,
)
from asyncache.devices import CpuDevice, PageOrder
from asyncache.engine import KVCache, Limits
from asyncache.linkers import Outcome, StoreLinker
from asyncache.stores import FileStore, MemoryStore
from asyncache.testing import Fault, FaultyStore, GateDevice, GateStore
from tests.engine.scene import content, keys, read, store_pages, turns, write

PAGE = 4
KV = AttentionPool(num_layers=4, num_kv_heads=1, head_dim=4, dtype="uint8")
SWA = WindowPool(
    name="swa",
    num_layers=2,
    num_kv_heads=1,
    head_dim=4,
    dtype="uint8",
    window_tokens=2 * PAGE,
)
LAYOUT = KVLayout(model="linked", page_tokens=PAGE, pools=(KV,))
HYBRID = KVLayout(model="linked", page_tokens=PAGE, pools=(KV, SWA))
TOKENS = list(range(5 * PAGE))
PAGE_BYTES = LAYOUT.space(KV).page_bytes


def make_device(kind, layout=LAYOUT, num_pages=16):
    """Return a poisoned device: in place, in two orders of memory, or far away."""
    order = PageOrder.LAYER_FIRST if kind == "layers" else PageOrder.PAGE_FIRST
    device = CpuDevice(layout, num_pages, order=order)
    for pool in layout.pools:
        device.tensor(pool.name).fill_(0xFF)
    return GateDevice(device, is_open=True) if kind == "staged" else device


KINDS = ["pages", "layers", "staged"]


def hashes(layout=LAYOUT):
    return [key.hash for key in keys(TOKENS, None, KV, layout)]


def load_plan(pages, start=0):
    names = hashes()[start : start + len(pages)]
    piece = Moved(0, start, array("i", pages), names)
    return LoadPlan(1, start, start + len(pages), (piece,))


def offload_plan(pages, start=0, parent=None):
    names = hashes()[start : start + len(pages)]
    piece = Moved(0, start, array("i", pages), names)
    return OffloadPlan(1, start, start + len(pages), (piece,), parent)


async def stored(store=None):
    store = store or MemoryStore(2**20)
    await store_pages(store, TOKENS, layout=LAYOUT, pool=KV)
    return store


def meant(position, pool=KV, layout=LAYOUT):
    return content(TOKENS, position, pool, layout)


async def linked(store, device, **options):
    linker = StoreLinker(store, device, **options)
    await linker.open()
    return linker


@pytest.mark.parametrize("layer_groups", [1, 2, 3, 4])
@pytest.mark.parametrize("pages_a_batch", [1, 2, 100])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_load_brings_each_page_to_its_number_and_touches_no_other(
    kind, pages_a_batch, layer_groups
):
    device, landed = make_device(kind), []
    linker = await linked(
        await stored(),
        device,
        layer_groups=layer_groups,
        batch_bytes=pages_a_batch * PAGE_BYTES,
    )
    pages = [11, 3, 7, 0, 12]
    assert await linker.load(load_plan(pages), landed.append) == 5
    # Layers that land together are told of by their last.
    assert landed == {1: [3], 2: [1, 3], 3: [0, 1, 3], 4: [0, 1, 2, 3]}[layer_groups]
    for page in range(16):
        wanted = meant(pages.index(page)) if page in pages else b"\xff" * PAGE_BYTES
        assert read(device, page) == wanted, page


@pytest.mark.parametrize("kind", KINDS)
async def test_layers_land_in_order_and_only_once_all_pages_have_them(kind):
    device, landed = make_device(kind), []
    store = GateStore(await stored(), is_open=True)
    linker = await linked(store, device, layer_groups=2, batch_bytes=2 * PAGE_BYTES)

    def note(last):
        size = LAYOUT.space(KV).layer_bytes
        for position, page in enumerate([4, 5, 6]):
            for layer in range(last + 1):
                have = device.tensor("kv")[page, layer].contiguous().numpy().tobytes()
                assert have == meant(position)[layer * size : (layer + 1) * size]
        landed.append(last)

    store.get_gate.close()
    async with anyio.create_task_group() as group:
        group.start_soon(linker.load, load_plan([4, 5, 6]), note)
        for count, expected in ((1, []), (2, []), (3, [1]), (4, [1])):
            await store.get_gate.wait_arrived(count)
            await wait_all_tasks_blocked()  # what was copied meanwhile is there
            assert landed == expected
            store.get_gate.open()
            store.get_gate.close()
        store.get_gate.open()
    assert landed == [1, 3]


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.CORRUPT, Fault.TORN])
@pytest.mark.parametrize("bad", range(5))
@pytest.mark.parametrize("kind", KINDS)
async def test_a_bad_page_ends_the_load_before_it_and_no_layer_lands(kind, bad, fault):
    device, landed = make_device(kind), []
    inner = await stored()
    store = FaultyStore(
        inner, fault, keys=keys(TOKENS, None, KV, LAYOUT)[bad : bad + 1]
    )
    linker = await linked(store, device, layer_groups=2, batch_bytes=2 * PAGE_BYTES)
    assert await linker.load(load_plan([8, 9, 10, 11, 12]), landed.append) == bad
    assert landed == []
    for position in range(bad):
        assert read(device, 8 + position) == meant(position)


async def test_one_corrupt_layer_slice_on_disk_ends_the_load_before_its_page(tmp_path):
    store = FileStore(tmp_path)
    await store.open()
    await stored(store)
    device, landed = make_device("pages"), []
    linker = StoreLinker(store, device, layer_groups=4)
    [path] = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and meant(2)[-16:] in path.read_bytes()
    ]
    data = bytearray(path.read_bytes())
    place = data.index(meant(2)[-16:])
    data[place] ^= 1  # the last layer of the third page
    path.write_bytes(data)
    assert await linker.load(load_plan([0, 1, 2, 3, 4]), landed.append) == 2
    # Layers that were whole had landed: what ran on them is undone by the claim.
    assert landed == [0, 1, 2]
    await linker.aclose()


@pytest.mark.parametrize("pages_a_batch", [1, 2, 100])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_offload_stores_each_page_under_its_key(kind, pages_a_batch):
    device, store = make_device(kind), MemoryStore(2**20)
    linker = await linked(store, device, batch_bytes=pages_a_batch * PAGE_BYTES)
    pages = [9, 2, 5, 1, 14]
    for position, page in enumerate(pages):
        write(device, page, meant(position))
    assert await linker.offload(offload_plan(pages)) is Outcome.STORED
    back = make_device(kind)
    again = await linked(store, back)
    assert await again.load(load_plan([0, 1, 2, 3, 4]), lambda layer: None) == 5
    assert [read(back, page) for page in range(5)] == [meant(p) for p in range(5)]


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (None, Outcome.STORED),
        (Fault.REJECTED, Outcome.REJECTED),
        (Fault.UNAVAILABLE, Outcome.FAILED),
        (Fault.UNREPORTED, Outcome.FAILED),
    ],
)
@pytest.mark.parametrize("bad", [0, 3])
async def test_what_became_of_an_offload_is_what_became_of_its_worst_page(
    bad, fault, outcome
):
    names = keys(TOKENS, None, KV, LAYOUT)[bad : bad + 1]
    store = FaultyStore(MemoryStore(2**20), fault, keys=names)
    linker = await linked(store, make_device("pages"), batch_bytes=2 * PAGE_BYTES)
    assert await linker.offload(offload_plan([0, 1, 2, 3, 4])) is outcome


async def test_an_offload_below_a_page_that_is_gone_is_not_begun():
    store = MemoryStore(2**20)
    linker = await linked(store, make_device("pages"))
    plan = offload_plan([3, 4], start=1, parent=hashes()[0])
    assert await linker.offload(plan) is Outcome.PARENT_MISSING
    assert store.num_pages == 0
    await linker.offload(offload_plan([2]))
    assert await linker.offload(plan) is Outcome.STORED
    assert store.num_pages == 3


async def test_a_lookup_tells_each_page_of_each_pool():
    store = MemoryStore(2**20)
    names = hashes(HYBRID)
    linker = await linked(store, make_device("pages", HYBRID))
    full, window = HYBRID.space(KV), HYBRID.space(SWA)
    for space, positions in ((full, (0, 1, 2)), (window, (1, 3))):
        for position in positions:
            key = PageKey(names[position], space)
            await store.put([key], [[memoryview(bytes(space.page_bytes))]])
    asks = (Asked(0, 0, names[:4]), Asked(1, 1, names[1:4]), Asked(1, 0, []))
    plan = LookupPlan(1, 0, 4, asks)
    present = await linker.lookup(plan)
    assert present == [[True, True, True, False], [True, False, True], []]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer_groups", [1, 4])
async def test_two_pools_come_back_with_the_window_only(kind, layer_groups):
    store = MemoryStore(2**20)
    tokens = [*TOKENS, 0]

    def cache(device, kept):
        link = StoreLinker(
            kept,
            device,
            layer_groups=layer_groups,
            batch_bytes=HYBRID.space(KV).page_bytes,
        )
        return KVCache(HYBRID, device=device, linker=link, limits=Limits(close_s=5))

    class Kept(MemoryStore):
        async def aclose(self):
            return

    store = Kept(2**20)
    device = make_device(kind, HYBRID)
    async with cache(device, store) as one:
        with one.request(tokens) as request:
            request.extend(len(tokens))
            for pool in (KV, SWA):
                for position in range(5):
                    page = request.page_table[pool.name][position]
                    write(device, page, meant(position, pool, HYBRID), pool.name)
            request.commit(len(tokens))
        await one.drain()
    device = make_device(kind, HYBRID)
    async with cache(device, store) as two:
        with two.request(list(range(100, 106))) as other, two.request(tokens) as again:
            other.extend(6)  # other page numbers than before
            hit = await (await again.restore()).wait()
            assert hit.num_tokens == 5 * PAGE
            table = again.page_table
            assert list(table["swa"])[:3] == [-1, -1, -1]
            for position in range(5):
                page = table["kv"][position]
                assert read(device, page) == meant(position, KV, HYBRID)
            for position in (3, 4):
                page = table["swa"][position]
                assert read(device, page, "swa") == meant(position, SWA, HYBRID)
        two.check_invariants()


async def test_a_hung_put_leaves_a_buffer_to_reads_and_buffers_are_bounded():
    store = GateStore(await stored(), is_open=True)
    device = make_device("staged")
    linker = await linked(store, device, num_batches=2)
    store.put_gate.close()
    async with anyio.create_task_group() as group:
        for page in range(3):
            group.start_soon(linker.offload, offload_plan([page]))
        await store.put_gate.wait_arrived()
        await turns(5)
        assert store.put_gate.num_waiting == 1
        assert await linker.load(load_plan([8]), lambda layer: None) == 1
        store.put_gate.open()
    assert len(linker._staging._free) == 2


async def test_a_linker_that_is_opened_twice_has_its_buffers_once():
    class Counting(CpuDevice):
        num_allocated = 0

        async def allocate_staging(self, num_bytes):
            self.num_allocated += 1
            return await super().allocate_staging(num_bytes)

    device = Counting(LAYOUT, 16, host_addressable=False)
    linker = await linked(await stored(), device, num_batches=1)
    await linker.open()
    assert device.num_allocated == 1
    assert await linker.load(load_plan([8]), lambda layer: None) == 1


async def test_one_buffer_serves_all_in_turn():
    store = await stored()
    linker = await linked(store, make_device("staged"), num_batches=1)
    async with anyio.create_task_group() as group:
        for page in range(4):
            group.start_soon(linker.offload, offload_plan([page]))
            group.start_soon(linker.load, load_plan([8 + page]), lambda layer: None)
    assert len(linker._staging._free) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"layer_groups": 0}, r"layer_groups must be in \[1, 4\], not 0"),
        ({"layer_groups": 5}, r"layer_groups must be in \[1, 4\], not 5"),
        ({"batch_bytes": PAGE_BYTES - 1}, f"hold a page, {PAGE_BYTES}: "),
        ({"num_batches": 0}, "num_batches must be at least 1, not 0"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        StoreLinker(MemoryStore(1), CpuDevice(LAYOUT, 4), **arguments)


async def test_shards_of_a_page_have_keys_of_their_own():
    store = MemoryStore(2**20)
    devices = [make_device("pages"), make_device("pages")]
    for rank, device in enumerate(devices):
        device.tensor("kv").fill_(rank)
        linker = await linked(store, device, rank=rank, num_ranks=2)
        await linker.offload(offload_plan([0, 1]))
    assert store.num_pages == 4
    for rank in (0, 1):
        device = make_device("pages")
        linker = await linked(store, device, rank=rank, num_ranks=2)
        assert await linker.load(load_plan([2, 3]), lambda layer: None) == 2
        assert torch.equal(
            device.tensor("kv")[2:4], torch.full_like(device.tensor("kv")[2:4], rank)
        )


async def test_one_rank_writes_what_every_rank_holds_and_all_can_read_it():
    """Guards replicated pools, as of latent attention: one copy, under one name."""
    latent = AttentionPool(
        num_layers=4, num_kv_heads=1, head_dim=4, dtype="uint8", replicated=True
    )
    layout = KVLayout(model="linked", page_tokens=PAGE, pools=(latent, SWA))
    store = MemoryStore(2**20)
    devices = [make_device("pages", layout) for _ in range(2)]
    ranks = [
        StoreLinker(store, device, rank=rank, num_ranks=2)
        for rank, device in enumerate(devices)
    ]
    names = hashes(layout)[:2]
    for device in devices:
        for page in range(2):
            write(device, page, meant(page, latent, layout), "kv")
            write(device, page, meant(page, SWA, layout), "swa")
    pages = array("i", range(2))
    pieces = (Moved(0, 0, pages, names), Moved(1, 0, pages, names))
    plan = OffloadPlan(1, 0, 2, pieces, None)
    assert await ranks[1].offload(plan) is Outcome.STORED
    both = [PageKey(name, layout.space(latent)) for name in names]
    assert not any(await store.contains(both)), "the first rank writes it"
    own = [PageKey(name, layout.space(SWA, rank=1, num_ranks=2)) for name in names]
    assert all(await store.contains(own)), "each rank writes its shard"
    assert await ranks[0].offload(plan) is Outcome.STORED
    assert all(await store.contains(both))
    fills = (Moved(0, 0, array("i", [4, 5]), names),)
    assert await ranks[1].load(LoadPlan(2, 0, 2, fills), lambda layer: None) == 2
    assert read(devices[1], 5) == meant(1, latent, layout)
