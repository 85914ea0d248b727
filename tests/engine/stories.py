"""What stories of several ranks are told with: stores and devices, held and broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio

from asyncache.core import PageKey
from asyncache.devices import CpuDevice
from asyncache.stores import MemoryStore, Store
from asyncache.testing import Fault, FaultyStore, GateDevice, GateStore
from tests.engine.scene import LAYOUT, PAGE, prompt
from tests.engine.team import MODES, Rank, Stores, Team, shard_keys, stored

A, B, C, D = (prompt(4, seed=seed) for seed in range(1, 5))
LONG = [*A, *range(7000, 7000 + 2 * PAGE)]
"""A and two pages more."""
BY_MODE = {"argvalues": MODES, "ids": ["-".join(mode.values()) for mode in MODES]}


def having(*prompts: Sequence[int]) -> Stores:
    """Return what makes stores that hold each rank's shard of some prompts."""

    async def store(rank: int, num_ranks: int) -> Store:
        return await stored(rank, num_ranks, *prompts)

    return store


def gated(*prompts: Sequence[int], is_open: bool = False) -> Stores:
    """Return what makes such stores, each call of which is held."""

    async def store(rank: int, num_ranks: int) -> Store:
        inner = await stored(rank, num_ranks, *prompts)
        return GateStore(inner, is_open=is_open)

    return store


def faulty(
    victim: int,
    fault: Fault | None,
    *prompts: Sequence[int],
    bad: Callable[[int, int], Sequence[PageKey]] | None = None,
) -> Stores:
    """Return what makes stores of which one rank's fails, for some keys or for all."""

    async def store(rank: int, num_ranks: int) -> Store:
        inner = await stored(rank, num_ranks, *prompts)
        if rank != victim:
            return inner
        names = None if bad is None else bad(rank, num_ranks)
        return FaultyStore(inner, fault, keys=names)

    return store


def pages_of(
    tokens: Sequence[int], *positions: int
) -> Callable[[int, int], list[PageKey]]:
    """Return what names some pages of a prompt, on any rank."""

    def name(rank: int, num_ranks: int) -> list[PageKey]:
        names = shard_keys(rank, num_ranks, tokens)
        return [names[position] for position in positions]

    return name


def far_away(*held: int, num_pages: int = 16) -> Callable[[int], GateDevice]:
    """Return what makes devices like accelerators; writes to the held ranks' hang."""

    def device(rank: int) -> GateDevice:
        gate = GateDevice(CpuDevice(LAYOUT, num_pages), is_open=True)
        if rank in held:
            gate.write_gate.close()
        return gate

    return device


def bottom(store: Store) -> MemoryStore:
    """Return the store that keeps the pages, below whatever holds or breaks it."""
    while not isinstance(store, MemoryStore):
        store = store._inner
    return store


def in_store(rank: Rank, num_ranks: int, tokens: Sequence[int]) -> list[bool]:
    """Return which pages of a prompt a rank's store really keeps."""
    kept = bottom(rank.store)._pages
    return [name in kept for name in shard_keys(rank.number, num_ranks, tokens)]


def everywhere_stored(ranks: Team, tokens: Sequence[int]) -> list[list[bool]]:
    """Return for each rank which pages of a prompt it keeps in its store."""
    return [in_store(rank, len(ranks), tokens) for rank in ranks.ranks]


def release(ranks: Team, *gates: str) -> None:
    """Open gates of every rank's store."""
    for rank in ranks.ranks:
        for name in gates:
            getattr(rank.store, f"{name}_gate").open()


def pool(ranks: Team, name: str = "kv"):
    """Return the page counts of a pool; they are the same on every rank."""
    return ranks.ranks[0].cache.statistics().replica.pools[name]


async def agreed(ranks: Team, seq: int) -> None:
    hit = ranks.ranks[0].hits[seq]
    await ranks.until(lambda: hit.agreed, "a restore is agreed")


async def arrived(gate, count: int = 1) -> None:
    with anyio.fail_after(20):
        await gate.wait_arrived(count)


async def writing(ranks: Team) -> None:
    """Step until every rank has an offload at the gate of its store."""
    gates = [rank.store.put_gate for rank in ranks.ranks]
    await ranks.until(
        lambda: all(gate.num_waiting or gate.is_open for gate in gates), "writes"
    )


async def gone(ranks: Team, seq: int) -> None:
    """Step until a request whose scopes have ended is gone."""
    await ranks.dismiss()
    await ranks.until(lambda: seq not in ranks.ranks[0].requests, "it ends")


async def begin_over(ranks: Team, tokens: Sequence[int]) -> int:
    """Begin a request, and compute and commit all of it over its open load."""
    seq = await ranks.begin(tokens)
    await agreed(ranks, seq)

    def compute(rank: Rank) -> None:
        request = rank.requests[seq]
        request.extend(len(tokens))
        with rank.cache.forward([request]):
            rank.compute(request, tokens)
        request.commit(len(tokens))

    await ranks.everywhere(compute)
    return seq
