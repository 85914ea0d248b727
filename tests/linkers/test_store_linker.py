"""A store and a device, linked: which bytes move where, and what is said of them."""

from __future__ import annotations

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from asyncache.devices import CpuDevice
from asyncache.linkers import Outcome, StoreLinker
from asyncache.stores import FileStore, MemoryStore
from asyncache.testing import Fault, FaultyStore, GateStore
from tests.engine.scene import keys, read, store_pages, turns, write
from tests.linkers.plans import (
    KV,
    LAYOUT,
    PAGE_BYTES,
    TOKENS,
    load_plan,
    make_device,
    meant,
    offload_plan,
)

KINDS = ["pages", "layers", "staged"]


async def stored(store=None):
    store = store or MemoryStore(2**20)
    await store_pages(store, TOKENS, layout=LAYOUT, pool=KV)
    return store


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
