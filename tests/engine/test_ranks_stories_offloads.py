"""Offloads of several ranks: what one of them does not store, none of them has.

Scenarios S5, S6, S10, S11, S14 and S15 of ``research/sglang.md``, the cases of
``research/review.md`` §B on offloads, and the stories of upstream's unit tests.
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace

import anyio
import pytest

from asyncache.core import AttentionPool, FactKind, KVLayout
from asyncache.devices import CpuDevice
from asyncache.engine import WriteBack
from asyncache.stores import FileStore, MemoryStore
from asyncache.testing import Fault, FaultyStore
from tests.engine.scene import LAYOUT, PAGE, content, prompt, read, turns, write
from tests.engine.stories import (
    BY_MODE,
    LONG,
    A,
    B,
    C,
    D,
    bottom,
    everywhere_stored,
    faulty,
    gated,
    having,
    pages_of,
    pool,
    release,
    writing,
)
from tests.engine.team import LIMITS, Rank, Team, shard_keys, stored, team

pytestmark = pytest.mark.anyio
each_mode = pytest.mark.parametrize("mode", **BY_MODE)
ONCE = replace(LIMITS, offload_attempts=1)
REFUSALS = [Fault.UNAVAILABLE, Fault.REJECTED, Fault.RAISES, Fault.UNREPORTED]


def stored_flags(rank: Rank, *prompts) -> list[bool]:
    """Return of which prompts a rank believes that all ranks have stored them."""
    tree = rank.replica._state.tree
    [root] = tree.roots.values()
    nodes = {child.edge: child for child in root.children.values()}
    flags = []
    for tokens in prompts:
        edge = tokens[: 4 * PAGE]
        flags.append(nodes[b"".join(t.to_bytes(4, "little") for t in edge)].stored)
    return flags


@each_mode
@pytest.mark.parametrize("victim", [0, 1])
async def test_what_one_rank_refuses_counts_as_stored_on_none_and_shifts_nothing(
    mode, victim
):
    """S5, B12, B13: completions are told apart by identity, whoever refuses one."""
    bad = pages_of(B, 0, 1, 2, 3)
    stores = faulty(victim, Fault.UNAVAILABLE, bad=bad)
    async with team(2, stores=stores, num_pages=32, limits=ONCE, **mode) as ranks:
        for tokens in (A, B, C):
            await ranks.serve(tokens)
        await ranks.drain()
        assert stored_flags(ranks.ranks[0], A, B, C) == [True, False, True]
        assert stored_flags(ranks.ranks[1], A, B, C) == [True, False, True]
        kept = everywhere_stored(ranks, B)
        assert kept[victim] == [False] * 4
        ranks.ranks[victim].store.fault = None
        # The next commit that walks it offers it again.
        await ranks.serve(B)
        await ranks.drain()
        assert stored_flags(ranks.ranks[0], A, B, C) == [True] * 3
        assert everywhere_stored(ranks, B) == [[True] * 4] * 2


@each_mode
@pytest.mark.parametrize("fault", REFUSALS)
async def test_a_store_that_fails_on_one_rank_is_tried_again_by_all(mode, fault):
    """S5, B38, B39, §B "retry, backoff", "breaker": when to try is a vote."""
    stores = faulty(1, fault)
    async with team(2, stores=stores, num_pages=32, **mode) as ranks:
        await ranks.serve(A)
        failed = lambda: ranks.ranks[0].cache.statistics().counters.offloads_failed  # noqa: E731
        await ranks.until(lambda: failed() >= 1, "an offload fails")
        ranks.ranks[1].store.fault = None
        await ranks.serve(A)
        await ranks.until(
            lambda: stored_flags(ranks.ranks[0], A) == [True], "it is stored"
        )
        assert everywhere_stored(ranks, A) == [[True] * 4] * 2


@each_mode
async def test_a_node_that_is_split_while_it_is_written_is_published_whole(mode):
    """S6, B21-B23, upstream "split retargeting", "offload pin": each fragment stays
    pinned, and counts as stored when all ranks have written, once."""
    long = prompt(6, seed=8)
    forks = [
        [*long[: at * PAGE], *range(5000 + 50 * at, 5000 + 50 * at + PAGE + 1)]
        for at in range(1, 6)
    ]
    async with team(2, stores=gated(), num_pages=40, **mode) as ranks:
        release(ranks, "contains", "get")
        await ranks.serve(long)
        await writing(ranks)
        ranks.ranks[1].store.put_gate.open()
        for fork in forks:
            await ranks.serve(fork)
        told = ranks.ranks[0].log
        assert ranks.ranks[0].cache.statistics().counters.stored_pages == 0
        release(ranks, "put")
        await ranks.drain()
        facts = [e for e in told.events if getattr(e, "kind", 0) is FactKind.STORED]
        names = [name for fact in facts for name in fact.hashes]
        assert len(names) == len(set(names)) == 6 + len(forks)
        wanted = {key for tokens in (long, *forks) for key in shard_keys(0, 2, tokens)}
        assert set(bottom(ranks.ranks[0].store)._pages) == wanted
        for tokens in (long, *forks):
            assert all(map(all, everywhere_stored(ranks, tokens)))


@each_mode
async def test_pages_that_one_rank_still_writes_are_no_ones_on_any(mode):
    """Upstream "offload pin", B27, B31: room comes when the slowest rank has read."""
    async with team(2, stores=gated(), num_pages=8, **mode) as ranks:
        release(ranks, "contains", "get")
        await ranks.serve(A)
        await writing(ranks)
        ranks.ranks[0].store.put_gate.open()
        seq = await ranks.begin(prompt(5, seed=9))
        for _ in range(4):
            await ranks.step()
            await turns(2)
        assert not ranks.ranks[0].hits[seq].agreed
        assert pool(ranks).tree == 4
        release(ranks, "put")
        assert await ranks.settle(seq) == 0
        await ranks.compute(seq, prompt(5, seed=9))
        assert everywhere_stored(ranks, A) == [[True] * 4] * 2
        await ranks.end(seq)


@each_mode
async def test_a_parent_that_one_ranks_store_dropped_goes_before_its_child(mode):
    """B29, B42, F18, §B "eviction is local": stored is a claim about the past."""
    async with team(2, stores=having(), num_pages=32, **mode) as ranks:
        await ranks.serve(A)
        await ranks.drain()
        await ranks.ranks[1].store.remove(pages_of(A, 3)(1, 2))
        assert everywhere_stored(ranks, A)[1] == [True, True, True, False]
        await ranks.serve(LONG)
        await ranks.drain()
        assert everywhere_stored(ranks, LONG) == [[True] * 6] * 2


@each_mode
async def test_an_idle_loop_brings_everything_to_its_end(mode):
    """S10, B45: no request is open, and steps alone are made."""
    async with team(2, stores=having(), **mode) as ranks:
        await ranks.serve(A)
        await ranks.serve(B)
        replica = ranks.ranks[1].replica
        await ranks.until(lambda: not replica.look.num_moving, "all is stored")
        assert everywhere_stored(ranks, B) == [[True] * 4] * 2
        for _ in range(3):
            await ranks.step()
        assert not replica.look.needs_verdict


class SlowStore(MemoryStore):
    """Takes its time on each call."""

    async def put(self, keys, sources):
        await turns(40)
        return await super().put(keys, sources)

    async def get_into(self, keys, targets, layers=None):
        await turns(40)
        return await super().get_into(keys, targets, layers)


@pytest.mark.parametrize("mode", BY_MODE["argvalues"][::3], ids=str)
async def test_a_small_pool_and_a_slow_store_make_progress(mode):
    """S11, S15, B31, B44, B46, B54: one rank's store is slow, the loop never idles,
    and all that is open at once needs twice the pool."""
    prompts = [prompt(4, seed=seed) for seed in range(20, 26)]

    async def store(rank: int, num_ranks: int):
        return SlowStore(2**20) if rank else MemoryStore(2**20)

    async with team(2, stores=store, num_pages=15, **mode) as ranks:
        for _ in range(3):
            # What had to go before it could be saved is computed again.
            saved = [all(map(all, everywhere_stored(ranks, t))) for t in prompts]
            seqs = [await ranks.begin(tokens) for tokens in prompts]
            for seq, tokens, is_saved in zip(seqs, prompts, saved, strict=True):
                hit = await ranks.settle(seq)
                assert hit == 4 * PAGE or not is_saved
                await ranks.compute(seq, tokens)
                await ranks.end(seq)
            await ranks.drain()
        assert any(saved)


def census() -> Counter[str]:
    """Count what the core keeps of transactions and prefixes."""
    gc.collect()
    kinds = ("Load", "Lookup", "Wait", "Offload", "Ready", "Request", "Node")
    found = Counter(type(thing).__name__ for thing in gc.get_objects())
    return Counter({kind: found[kind] for kind in kinds})


async def serve_or_abort(ranks: Team, tokens, *, aborted: bool) -> None:
    seq = await ranks.begin(tokens)
    await ranks.settle(seq)
    if not aborted and ranks.ranks[0].requests[seq].reserved:
        await ranks.compute(seq, tokens)
    await ranks.end(seq, aborted=aborted)
    for rank in ranks.ranks:
        del rank.hits[seq]
        rank.log.events.clear()


async def test_any_number_of_faults_leaves_nothing():
    """S14, B52: what is kept does not grow, whichever rank fails, and how."""
    faults = [Fault.LOST, Fault.TORN, Fault.UNAVAILABLE, Fault.REJECTED, Fault.RAISES]

    async def store(rank: int, num_ranks: int):
        return FaultyStore(await stored(rank, num_ranks, A, B))

    async with team(2, stores=store, num_pages=9) as ranks:
        counts = []
        for number in range(50):
            victim = ranks.ranks[number % 2]
            victim.store.fault = faults[number % len(faults)]
            for tokens in (A, D, B, LONG):
                await serve_or_abort(ranks, tokens, aborted=not number % 3)
            victim.store.fault = None
            if number in {9, 49}:
                await ranks.drain()
                counts.append(census())
        before, after = counts
        assert {k: n for k, n in after.items() if n > before[k] + 8} == {}


@each_mode
async def test_the_coldest_are_saved_alike_on_all_ranks_when_room_is_short(mode):
    """§B "write_back": what one rank could not save, no rank drops first."""
    stores = faulty(1, Fault.UNAVAILABLE, bad=pages_of(A, 3))
    arguments = {"writes": WriteBack(low_water=10), "limits": ONCE}
    async with team(2, stores=stores, num_pages=16, **arguments, **mode) as ranks:
        await ranks.serve(A)
        await ranks.drain()
        assert everywhere_stored(ranks, A)[0] == [False] * 4
        await ranks.serve(B)
        await ranks.drain()
        flags = [stored_flags(rank, A, B) for rank in ranks.ranks]
        # The first is the coldest; one rank cannot save it, and the second is next.
        assert flags == [[False, True]] * 2
        await ranks.serve(C)
        await ranks.serve(D)
        found = [[r.cache.match_nowait(t) for t in (A, B, C, D)] for r in ranks.ranks]
        assert found[0] == found[1]
        assert found[0][2:] == [4 * PAGE] * 2


# Pools that all ranks hold the same bytes of.

LATENT = KVLayout(
    model="scene",
    page_tokens=PAGE,
    pools=(
        AttentionPool(
            num_layers=2, num_kv_heads=1, head_dim=4, dtype="uint8", replicated=True
        ),
    ),
)


async def serve_latent(ranks: Team, tokens) -> int:
    """Serve a prompt of which every rank computes the same bytes."""
    seq = await ranks.begin(tokens)
    num_hit = await ranks.settle(seq)

    def compute(rank: Rank) -> None:
        request = rank.requests[seq]
        request.extend(len(tokens))
        table = request.page_table["kv"]
        with rank.cache.forward([request]):
            for position in range(len(tokens) // PAGE):
                data = content(tokens, position, LATENT.pools[0], LATENT)
                if position < num_hit // PAGE:
                    assert read(rank.device, table[position]) == data
                else:
                    write(rank.device, table[position], data)
        request.commit(len(tokens))

    await ranks.everywhere(compute)
    await ranks.end(seq)
    return num_hit


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("barrier", ["sync", "pipelined"])
async def test_one_rank_writes_what_all_read_from_one_directory(
    tmp_path, num_ranks, barrier
):
    """Replicated pools have no shard: eight ranks would put the same bytes eight times,
    and all of them have to see them before they count as stored."""

    async def store(rank: int, _: int):
        return FileStore(tmp_path)

    def opened():
        return team(
            num_ranks,
            stores=store,
            devices=lambda _: CpuDevice(LATENT, 16),
            barrier=barrier,
        )

    async with opened() as ranks:
        assert await serve_latent(ranks, A) == 0
        await ranks.drain()
        assert await serve_latent(ranks, LONG) == 4 * PAGE
        await ranks.drain()
        counters = [rank.cache.statistics().counters for rank in ranks.ranks]
        assert [c.offloads_failed for c in counters] == [0] * num_ranks
    async with opened() as ranks:
        with anyio.fail_after(20):
            assert await serve_latent(ranks, LONG) == 6 * PAGE
    assert LATENT.space(LATENT.pools[0], rank=1, num_ranks=2).shard == "all"
    assert LAYOUT.space(LAYOUT.pools[0], rank=1, num_ranks=2).shard == "1of2"
