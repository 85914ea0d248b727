"""Pools of which a prefix needs the trailing pages: what each rank can restore is a set
of boundaries with holes, and all ranks use the longest that is in every set.

Scenarios S1, S12 and S13 of ``research/sglang.md``, the masks of ``research/review.md``
§B, and upstream's "sparse intersection" and "adopted pages only".
"""

from __future__ import annotations

import random

import pytest

from asyncache.core import KVLayout, PageKey, WindowPool, hash_pages, root_hash
from asyncache.devices import CpuDevice
from asyncache.stores import MemoryStore
from tests.core.cluster import FULL, Cluster, layout_of, window_pool
from tests.engine.scene import KV, PAGE, content, prompt, read, write
from tests.engine.team import MODES, Rank, Team, team

pytestmark = pytest.mark.anyio
WINDOW = WindowPool(
    name="window",
    num_layers=1,
    num_kv_heads=1,
    head_dim=4,
    dtype="uint8",
    window_tokens=2 * PAGE,
)
LAYOUT = KVLayout(model="hybrid", page_tokens=PAGE, pools=(KV, WINDOW))
A = prompt(8, seed=1)
each_mode = pytest.mark.parametrize(
    "mode", MODES, ids=["-".join(mode.values()) for mode in MODES]
)


def layout_with(window_tokens: int, page_tokens: int) -> KVLayout:
    """Return a hybrid layout of other sizes."""
    pool = WindowPool(
        name="window",
        num_layers=1,
        num_kv_heads=1,
        head_dim=4,
        dtype="uint8",
        window_tokens=window_tokens,
    )
    return KVLayout(model="hybrid", page_tokens=page_tokens, pools=(KV, pool))


def page_of(rank: int, tokens, position: int, pool, *, layout=LAYOUT, namespace=None):
    """Return the bytes of a page of a pool, on one rank."""
    data = content(tokens, position, pool, layout, namespace)
    return bytes(byte ^ (37 * rank) for byte in data)


def name_of(rank: int, num_ranks: int, tokens, position: int, pool) -> PageKey:
    packed = b"".join(t.to_bytes(4, "little") for t in tokens)
    root = root_hash(LAYOUT)
    names = hash_pages(packed, page_tokens=PAGE, parent=root)
    return PageKey(names[position], LAYOUT.space(pool, rank=rank, num_ranks=num_ranks))


async def keep(store: MemoryStore, rank: int, num_ranks: int, tokens, held) -> None:
    """Put what a rank has of a prompt: (pool, position)."""
    for pool, position in held:
        name = name_of(rank, num_ranks, tokens, position, pool)
        await store.put([name], [[memoryview(page_of(rank, tokens, position, pool))]])


def legal(held, end: int) -> set[int]:
    """Return the boundaries that a rank can restore, from the definition alone."""
    return {
        boundary
        for boundary in range(1, end + 1)
        if all((KV, at) in held for at in range(boundary))
        and all((WINDOW, at) in held for at in range(max(0, boundary - 2), boundary))
    }


async def serve(ranks: Team, tokens, layout=LAYOUT, **arguments) -> int:
    """Serve a prompt, checking and computing the pages of both pools."""
    seq = await ranks.begin(tokens, **arguments)
    num_hit = await ranks.settle(seq)
    namespace = arguments.get("namespace")
    await ranks.everywhere(
        lambda rank: compute(
            rank, seq, tokens, num_hit, layout=layout, namespace=namespace
        )
    )
    await ranks.end(seq)
    return num_hit


def compute(rank: Rank, seq: int, tokens, num_hit: int, **whose) -> None:
    request, layout = rank.requests[seq], whose["layout"]
    size = layout.page_tokens
    check(rank, request, tokens, num_hit // size, **whose)
    request.extend(len(tokens))
    with rank.cache.forward([request]):
        for index, pool in enumerate(layout.pools):
            own, table = request._state.own[index], request.page_table[pool.name]
            for position in range(len(tokens) // size):
                if own[position]:
                    data = page_of(rank.number, tokens, position, pool, **whose)
                    write(rank.device, table[position], data, pool.name)
    request.commit(len(tokens))


def check(rank: Rank, request, tokens, boundary: int, **whose) -> None:
    """Raise unless the pages that a hit needs hold what they mean on this rank."""
    layout = whose["layout"]
    size = layout.page_tokens
    window = -(-layout.pools[1].window_tokens // size)
    for pool, first in ((layout.pools[0], 0), (layout.pools[1], boundary - window)):
        table = request.page_table[pool.name]
        for position in range(max(0, first), boundary):
            wanted = page_of(rank.number, tokens, position, pool, **whose)
            assert read(rank.device, table[position], pool.name) == wanted, position


def device(_: int) -> CpuDevice:
    return CpuDevice(LAYOUT, {"kv": 24, "window": 20})


@each_mode
@pytest.mark.parametrize(("num_ranks", "seed"), [(1, 0), (2, 1), (2, 2), (4, 3)])
async def test_ranks_restore_the_longest_boundary_that_all_of_them_can(
    mode, num_ranks, seed
):
    """S1, B42, upstream "sparse intersection": sets with holes, lost at random."""
    draw = random.Random(seed)
    everything = [(pool, at) for pool in (KV, WINDOW) for at in range(8)]
    held = [
        {page for page in everything if page[0] is KV or draw.random() < 0.75}
        for _ in range(num_ranks)
    ]
    sets = [legal(pages, 8) for pages in held]
    best = max(set.intersection(*sets), default=0)

    async def store(rank: int, num: int):
        inner = MemoryStore(2**20)
        await keep(inner, rank, num, A, held[rank])
        return inner

    async with team(num_ranks, stores=store, devices=device, **mode) as ranks:
        assert await serve(ranks, A) == best * PAGE
        await ranks.drain()
        assert await serve(ranks, A) == 8 * PAGE


@each_mode
async def test_the_minimum_of_the_longest_is_no_boundary_of_all(mode):
    """S1, B42: one rank could restore 8 pages and the other 7, and both of them 3."""
    lost = [{4, 5}, {3, 4, 7}]
    held = [
        {(KV, at) for at in range(8)}
        | {(WINDOW, at) for at in range(8) if at not in lost[rank]}
        for rank in range(2)
    ]
    sets = [legal(pages, 8) for pages in held]
    assert sets == [{1, 2, 3, 4, 8}, {1, 2, 3, 7}]
    best = max(set.intersection(*sets))

    async def store(rank: int, num: int):
        inner = MemoryStore(2**20)
        await keep(inner, rank, num, A, held[rank])
        return inner

    async with team(2, stores=store, devices=device, **mode) as ranks:
        assert await serve(ranks, A) == best * PAGE


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", range(12))
def test_random_losses_on_many_ranks_are_agreed_as_defined(num_ranks, seed):
    """S1 in the core, for ranks by the dozen, with masks of every stride."""
    draw = random.Random(100 * num_ranks + seed)
    layout = layout_of(FULL, window_pool(4))
    cluster = Cluster(
        layout, 64, num_ranks=num_ranks, requests=2, mask_ints=draw.choice([6, 64])
    )
    tokens = [draw.randrange(3) for _ in range(25)]
    cluster.fill_stores(tokens)
    names = cluster.learn(
        bytes(b for t in tokens for b in t.to_bytes(4, "little")), None
    )
    for rank in cluster.ranks:
        for at, name in enumerate(names):
            if draw.random() < 0.15:
                rank.store.discard((1, name))
            if at > 9 and draw.random() < 0.1:
                rank.store.discard((0, name))
    seq = cluster.open(tokens)
    cluster.do("restore", seq)
    ballot = cluster.replica.ballot()
    lookup = cluster.request(seq).lookup
    offered = set(ballot.shares[lookup.seq].boundaries)
    legal_everywhere = set(offered)
    for rank in cluster.ranks:
        full = next(
            (at for at, name in enumerate(names) if (0, name) not in rank.store), 12
        )
        has = [(1, name) in rank.store for name in names]
        legal_everywhere &= {
            b for b in range(1, full + 1) if all(has[max(0, b - 2) : b])
        }
    best = max(legal_everywhere, default=0)
    assert cluster.run_restored(seq) == 2 * best


@each_mode
async def test_namespaces_share_nothing_on_any_rank(mode):
    """S12, B50: the same tokens, the same ranks, other tenants."""

    async def store(rank: int, num: int):
        return MemoryStore(2**20)

    async with team(2, stores=store, devices=device, **mode) as ranks:
        tokens = prompt(4, seed=3)
        for namespace in (None, "", "tenant-1", ("a", "bc"), ("ab", "c")):
            assert await serve(ranks, tokens, namespace=namespace) == 0
            await ranks.drain()
        assert await serve(ranks, tokens, namespace=("a", "bc")) == 4 * PAGE
        names = [set(rank.store._pages) for rank in ranks.ranks]
        assert [len(found) for found in names] == [5 * 2 * 4] * 2
        assert not names[0] & names[1]


@pytest.mark.parametrize("page_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("window_tokens", [1, 3, 4, 9])
async def test_what_was_inserted_is_matched_for_every_page_and_window(
    page_tokens, window_tokens
):
    """S13, B34, B35: however a prompt's length falls on pages and windows."""
    layout = layout_with(window_tokens, page_tokens)

    async def store(rank: int, num: int):
        return MemoryStore(2**20)

    def own(_: int) -> CpuDevice:
        return CpuDevice(layout, 48)

    async with team(2, stores=store, devices=own, barrier="pipelined") as ranks:
        for num_tokens in (2, 7, 12):
            tokens = [1000 * num_tokens + place for place in range(num_tokens)]
            whole = (num_tokens - 1) // page_tokens * page_tokens
            assert await serve(ranks, tokens, layout) == 0
            assert await serve(ranks, tokens, layout) == whole
        await ranks.drain()
        await ranks.everywhere(lambda rank: rank.cache.reset())
        for num_tokens in (2, 7, 12):
            tokens = [1000 * num_tokens + place for place in range(num_tokens)]
            whole = (num_tokens - 1) // page_tokens * page_tokens
            assert await serve(ranks, tokens, layout) == whole


@each_mode
async def test_only_the_pages_that_a_node_lacked_are_adopted(mode):
    """Upstream "adopted pages only": full pages of a prefix stay the tree's, its window
    pages are those of whoever computed them last, and duplicates go back."""

    def small(_: int) -> CpuDevice:
        return CpuDevice(LAYOUT, {"kv": 40, "window": 12})

    def full_pages(rank: Rank) -> set[int]:
        found = [r for r in rank.replica.look.residents() if r.pool == 0]
        return {page for resident in found for page in resident.pages}

    async with team(2, devices=small, **mode) as ranks:
        prompts = [prompt(4, seed=seed) for seed in range(30, 35)]
        for tokens in prompts:
            assert await serve(ranks, tokens) == 0
        # Five prompts have twenty window pages, and there is room for twelve.
        found = [rank.cache.match_nowait(prompts[0]) for rank in ranks.ranks]
        assert found == [0, 0]
        before = [full_pages(rank) for rank in ranks.ranks]
        assert len(before[0]) == 20
        assert await serve(ranks, prompts[0]) == 0
        assert [full_pages(rank) for rank in ranks.ranks] == before
        assert await serve(ranks, prompts[0]) == 4 * PAGE
