"""What holds for every linker, whatever it links a device to."""

from __future__ import annotations

from array import array
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from asyncache.core import (
    Asked,
    AttentionPool,
    KVLayout,
    LoadPlan,
    LookupPlan,
    Moved,
    OffloadPlan,
    PageKey,
    StatePool,
)
from asyncache.engine import KVCache, Limits
from asyncache.linkers import Outcome
from tests.engine.scene import keys, read, write
from tests.linkers.plans import (
    HYBRID,
    KV,
    LAYOUT,
    PAGE,
    PAGE_BYTES,
    SWA,
    TOKENS,
    hashes,
    load_plan,
    make_device,
    meant,
    offload_plan,
)
from tests.linkers.worlds import StoreWorld

WAYS = {
    "store, pages": ("pages", {}),
    "store, layers": ("layers", {}),
    "store, staged": ("staged", {}),
    "store, in parts": ("pages", {"layer_groups": 2}),
    "store, staged in parts": ("staged", {"layer_groups": 2}),
    "mooncake, pages": ("pages", None),
    "mooncake, layers": ("layers", None),
}


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def kind(way):
    """How pages lie in memory."""
    return WAYS[way][0]


@pytest.fixture
def world(way, request):
    options = WAYS[way][1]
    if options is None:
        return request.getfixturevalue("mooncake")
    return StoreWorld(**options)


@asynccontextmanager
async def linked(world, device, **options):
    linker = world.link(device, **options)
    await linker.open()
    try:
        yield linker
    finally:
        await linker.aclose()


async def store_pages(world, layout=LAYOUT, count=5, **options):
    """Have another device offload the leading pages of a prompt, in all pools."""
    device, pages = make_device("pages", layout), array("i", range(count))
    for pool in layout.pools:
        for page in pages:
            write(device, page, meant(page, pool, layout), pool.name)
    names = hashes(layout)[:count]
    pieces = tuple(Moved(at, 0, pages, names) for at in range(len(layout.pools)))
    async with linked(world, device, **options) as linker:
        plan = OffloadPlan(1, 0, count, pieces, None)
        assert await linker.offload(plan) is Outcome.STORED


@pytest.mark.parametrize("pages_a_batch", [1, 2, 100])
async def test_what_is_offloaded_is_loaded_into_other_pages_and_no_other(
    world, kind, pages_a_batch
):
    batch = {"batch_bytes": pages_a_batch * PAGE_BYTES}
    device, pages = make_device(kind), [9, 2, 5, 1, 14]
    for position, page in enumerate(pages):
        write(device, page, meant(position))
    async with linked(world, device, **batch) as linker:
        assert await linker.offload(offload_plan(pages)) is Outcome.STORED
    back, landed, pages = make_device(kind), [], [11, 3, 7, 0, 12]
    async with linked(world, back, **batch) as linker:
        assert await linker.load(load_plan(pages), landed.append) == 5
    assert landed == sorted(landed)
    assert landed[-1] == KV.num_layers - 1
    for page in range(16):
        wanted = meant(pages.index(page)) if page in pages else b"\xff" * PAGE_BYTES
        assert read(back, page) == wanted, page


@pytest.mark.parametrize("bad", range(5))
async def test_a_page_that_is_lost_ends_the_load_before_it(world, kind, bad):
    await store_pages(world)
    await world.lose(keys(TOKENS, None, KV, LAYOUT)[bad : bad + 1])
    device, landed = make_device(kind), []
    async with linked(world, device, batch_bytes=2 * PAGE_BYTES) as linker:
        assert await linker.load(load_plan([8, 9, 10, 11, 12]), landed.append) == bad
    assert landed == []
    for position in range(bad):
        assert read(device, 8 + position) == meant(position)


@pytest.mark.parametrize("bad", [(1, 3), (3, 1)])
async def test_a_load_of_two_pools_is_as_good_as_the_first_lost_page_of_either(
    world, kind, bad
):
    layout = replace(LAYOUT, pools=(KV, replace(KV, name="other")))
    await store_pages(world, layout)
    names = hashes(layout)
    await world.lose(
        [
            PageKey(names[at], layout.space(pool))
            for at, pool in zip(bad, layout.pools, strict=True)
        ]
    )
    device, landed = make_device(kind, layout), []
    pieces = tuple(Moved(at, 0, array("i", range(8, 13)), names) for at in range(2))
    async with linked(world, device) as linker:
        assert await linker.load(LoadPlan(1, 0, 5, pieces), landed.append) == 1
    assert landed == []


async def test_an_offload_below_a_page_that_is_gone_is_not_begun(world, kind):
    async with linked(world, make_device(kind)) as linker:
        plan = offload_plan([3, 4], start=1, parent=hashes()[0])
        names = keys(TOKENS, None, KV, LAYOUT)[:3]
        assert await linker.offload(plan) is Outcome.PARENT_MISSING
        assert await world.holds(names) == [False] * 3
        await linker.offload(offload_plan([2]))
        assert await linker.offload(plan) is Outcome.STORED
        assert await world.holds(names) == [True] * 3


async def test_what_is_there_already_is_stored_and_stays_as_it_is(world, kind):
    await store_pages(world)
    device = make_device(kind)
    async with linked(world, device) as linker:
        assert await linker.offload(offload_plan(range(5))) is Outcome.STORED
        assert await linker.load(load_plan(range(8, 13)), lambda layer: None) == 5
    assert [read(device, 8 + position) for position in range(5)] == [
        meant(position) for position in range(5)
    ]


async def test_a_lookup_tells_each_page_of_each_pool(world, kind):
    await store_pages(world, HYBRID)
    names = hashes(HYBRID)
    full, window = HYBRID.space(KV), HYBRID.space(SWA)
    await world.lose([PageKey(names[3], full), PageKey(names[2], window)])
    async with linked(world, make_device(kind, HYBRID)) as linker:
        asks = (Asked(0, 0, names[:4]), Asked(1, 1, names[1:4]), Asked(1, 0, []))
        present = await linker.lookup(LookupPlan(1, 0, 4, asks))
        assert present == [[True, True, True, False], [True, False, True], []]
        assert await linker.lookup(LookupPlan(2, 0, 0, ())) == []


async def test_shards_of_a_page_have_keys_of_their_own(world, kind):
    devices = [make_device(kind), make_device(kind)]
    for rank, device in enumerate(devices):
        device.tensor("kv").fill_(rank)
        async with linked(world, device, rank=rank, num_ranks=2) as linker:
            await linker.offload(offload_plan([0, 1]))
    for rank in (0, 1):
        device = make_device(kind)
        async with linked(world, device, rank=rank, num_ranks=2) as linker:
            assert await linker.load(load_plan([2, 3]), lambda layer: None) == 2
        assert torch.equal(
            device.tensor("kv")[2:4], torch.full_like(device.tensor("kv")[2:4], rank)
        )


async def test_one_rank_writes_what_every_rank_holds_and_all_can_read_it(world, kind):
    """Guards replicated pools, as of latent attention: one copy, under one name."""
    latent = AttentionPool(
        num_layers=4, num_kv_heads=1, head_dim=4, dtype="uint8", replicated=True
    )
    layout = KVLayout(model="linked", page_tokens=PAGE, pools=(latent, SWA))
    devices = [make_device(kind, layout) for _ in range(2)]
    names = hashes(layout)[:2]
    for device in devices:
        for page in range(2):
            write(device, page, meant(page, latent, layout), "kv")
            write(device, page, meant(page, SWA, layout), "swa")
    pages = array("i", range(2))
    pieces = (Moved(0, 0, pages, names), Moved(1, 0, pages, names))
    plan = OffloadPlan(1, 0, 2, pieces, None)
    both = [PageKey(name, layout.space(latent)) for name in names]
    own = [PageKey(name, layout.space(SWA, rank=1, num_ranks=2)) for name in names]
    async with linked(world, devices[1], rank=1, num_ranks=2) as second:
        assert await second.offload(plan) is Outcome.STORED
        assert not any(await world.holds(both)), "the first rank writes it"
        assert all(await world.holds(own)), "each rank writes its shard"
        async with linked(world, devices[0], rank=0, num_ranks=2) as first:
            assert await first.offload(plan) is Outcome.STORED
        assert all(await world.holds(both))
        fills = (Moved(0, 0, array("i", [4, 5]), names),)
        assert await second.load(LoadPlan(2, 0, 2, fills), lambda layer: None) == 2
    assert read(devices[1], 5) == meant(1, latent, layout)


async def test_two_pools_come_back_with_the_window_only(world, kind):
    tokens = [*TOKENS, 0]

    def cache(device):
        link = world.link(device, batch_bytes=HYBRID.space(KV).page_bytes)
        return KVCache(HYBRID, device=device, linker=link, limits=Limits(close_s=5))

    device = make_device(kind, HYBRID)
    async with cache(device) as one:
        with one.request(tokens) as request:
            request.extend(len(tokens))
            for pool in (KV, SWA):
                for position in range(5):
                    page = request.page_table[pool.name][position]
                    write(device, page, meant(position, pool, HYBRID), pool.name)
            request.commit(len(tokens))
        await one.drain()
    device = make_device(kind, HYBRID)
    async with cache(device) as two:
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


async def test_a_state_comes_back_where_its_prefix_ends(world, kind):
    state = StatePool(name="state", num_layers=2, shape=(8,), dtype="uint8")
    layout = KVLayout(model="linked", page_tokens=PAGE, pools=(KV, state))
    tokens, held = [*TOKENS, 0], bytes(range(16))

    def cache(device):
        link = world.link(device)
        return KVCache(layout, device=device, linker=link, limits=Limits(close_s=5))

    device = make_device(kind, layout)
    async with cache(device) as one:
        with one.request(tokens) as request:
            request.extend(len(tokens))
            for position in range(5):
                page = request.page_table["kv"][position]
                write(device, page, meant(position, KV, layout))
            with one.forward([request]):
                write(device, request.state_slot["state"], held, "state")
                assert request.checkpoint(5 * PAGE)
            request.commit(len(tokens))
        await one.drain()
    device = make_device(kind, layout)
    async with cache(device) as two:
        with two.request(tokens) as again:
            hit = await (await again.restore()).wait()
            assert hit.num_tokens == 5 * PAGE
            again.extend(len(tokens))
            with two.forward([again]):
                assert read(device, again.state_slot["state"], "state") == held
        two.check_invariants()
