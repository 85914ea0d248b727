"""What ends a group, and what must not: never a hang, never a silent shift."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

import anyio
import pytest

from asyncache.core import ClosedError, OrderError, RankError, StoreError, lfu
from asyncache.devices import CpuDevice
from asyncache.engine import KVCache, ReadOnly, _handshake
from asyncache.linkers import StoreLinker
from asyncache.ranks import LocalGroup
from asyncache.stores import MemoryStore
from asyncache.testing import GateStore
from tests.engine.scene import LAYOUT, PAGE, prompt, turns
from tests.engine.team import LIMITS, MODES, Rank, stored, team

pytestmark = pytest.mark.anyio
A, B = prompt(4, seed=1), prompt(4, seed=2)


@pytest.fixture(params=MODES, ids=lambda mode: "-".join(mode.values()))
def mode(request) -> dict[str, str]:
    return request.param


@pytest.fixture(params=["sync", "pipelined"])
def barrier(request) -> str:
    return request.param


# At open.


async def open_pair(
    *arguments: dict, stores=(None, None)
) -> list[BaseException | None]:
    """Open two caches at once, each with arguments of its own; return their errors."""
    errors: list[Exception | None] = [None, None]
    caches = []
    for group, own, store in zip(LocalGroup.of(2), arguments, stores, strict=True):
        given = {"layout": LAYOUT, "limits": LIMITS} | own
        layout = given.pop("layout")
        device = CpuDevice(layout, 8)
        caches.append(KVCache(layout, device=device, group=group, store=store, **given))

    async def one(number: int) -> None:
        try:
            await caches[number].open()
        except Exception as error:  # noqa: BLE001 - told to the test
            errors[number] = error

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one, 0)
        tasks.start_soon(one, 1)
    for cache in caches:
        await cache.aclose()
    return errors


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"layout": replace(LAYOUT, revision="v2")}, "layout"),
        ({"limits": replace(LIMITS, slots=63)}, "limits"),
        ({"limits": replace(LIMITS, gate_s=1.0)}, "limits"),
        ({"policy": lfu}, "policy"),
        ({"writes": ReadOnly()}, "writes"),
        ({"launch": "batch"}, "launch"),
        ({"barrier": "pipelined"}, "barrier"),
        ({"aborts": "call"}, "aborts"),
        ({"barrier": "pipelined", "aborts": "call"}, "barrier, aborts"),
    ],
)
async def test_ranks_that_mean_different_caches_open_none(other, name):
    for first, second in (({}, other), (other, {})):
        errors = await open_pair(first, second)
        assert [type(error) for error in errors] == [RankError, RankError]
        assert {str(error) for error in errors} == {f"ranks differ in {name}"}


async def test_ranks_of_different_releases_open_none(monkeypatch):
    """What a core decides may change with any release: replicas would part later."""
    releases = iter(["0.1.0", "0.2.0"])

    class Release(str):
        """Another for each rank that looks."""

        __slots__ = ()

        def __repr__(self) -> str:
            return repr(next(releases))

    monkeypatch.setattr(_handshake, "VERSION", Release())
    errors = await open_pair({}, {})
    assert {str(error) for error in errors} == {"ranks differ in version"}


async def test_equal_ranks_open_and_use_the_pages_that_all_have():
    assert await open_pair({}, {}) == [None, None]

    async with team(2, devices=lambda n: CpuDevice(LAYOUT, 12 - 4 * n)) as ranks:
        for rank in ranks.ranks:
            pools = rank.cache.statistics().replica.pools
            assert pools["kv"].free == 8


async def test_a_store_on_one_rank_alone_is_refused():
    errors = await open_pair({}, {}, stores=(MemoryStore(2**20), None))
    assert {str(error) for error in errors} == {"ranks differ in having a store"}


class NoStore(MemoryStore):
    """Cannot be opened."""

    def __init__(self) -> None:
        super().__init__(2**20)

    async def open(self) -> None:
        raise StoreError("the disk is gone")


async def test_a_store_that_one_rank_cannot_open_opens_no_cache():
    errors = await open_pair({}, {}, stores=(MemoryStore(2**20), NoStore()))
    assert [type(error) for error in errors] == [StoreError, StoreError]
    assert [str(e) for e in errors] == [
        "another rank could not open its store",
        "the disk is gone",
    ]


async def test_an_open_that_is_cancelled_is_an_end_for_the_others():
    groups = LocalGroup.of(2)
    caches = [
        KVCache(LAYOUT, device=CpuDevice(LAYOUT, 8), group=g, limits=LIMITS)
        for g in groups
    ]
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(caches[0].open)
            await turns(3)
            scope.cancel()
    with pytest.raises(RankError, match="rank 0 has left"):
        await caches[1].open()
    for cache in caches:
        with pytest.raises(OrderError, match="opened once"):
            await cache.open()
        await cache.aclose()


async def test_a_rank_that_does_not_open_is_given_up():
    limits = replace(LIMITS, barrier_s=0.02)
    [group, _] = LocalGroup.of(2)
    cache = KVCache(LAYOUT, device=CpuDevice(LAYOUT, 8), group=group, limits=limits)
    with (
        anyio.fail_after(10),
        pytest.raises(RankError, match=r"no minimum within 0.02"),
    ):
        await cache.open()


# While it runs.


async def busy(rank: int, num_ranks: int) -> GateStore:
    """Return a store that never answers: there is always something to agree on."""
    return GateStore(await stored(rank, num_ranks, A))


async def step_on(rank: Rank) -> None:
    """Step until that raises."""
    with anyio.fail_after(10):
        while True:
            await rank.do(lambda r: r.cache.step())


async def all_over(ranks, seq=None) -> None:
    """Check that a broken cache does nothing more, and closes in time."""
    for rank in ranks.ranks:
        with pytest.raises(RankError):
            rank.cache.reset()
        with pytest.raises(RankError):
            rank.cache.waiting()
        if seq is not None and seq in rank.requests:
            assert not rank.requests[seq].is_open
    errors = await ranks.errors(lambda rank: rank.cache.step())
    assert {type(error) for error in errors} == {RankError}
    assert len(errors) == len(ranks)
    with anyio.fail_after(10):
        assert await ranks.errors(lambda rank: rank.cache.aclose()) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda cache, request: request.suspend(),
        lambda cache, request: request.extend(PAGE),
        lambda cache, request: request.append([1]),
        lambda cache, request: cache.abort(request),
        lambda cache, request: cache.admit([cache.prompt([1, 2])]),
        lambda cache, request: request.restore_nowait(),
        lambda cache, request: cache.dismiss({request.id: False}),
    ],
)
async def test_a_call_on_one_rank_alone_ends_the_group_at_that_step(mode, call):
    async with team(2, check=False, stores=busy, **mode) as ranks:
        keep = await ranks.begin(B)
        seq = await ranks.open(A)
        # Whatever it returns is held, for a request that is lost would warn.
        _held = await ranks.ranks[0].do(lambda r: call(r.cache, r.requests[seq]))
        errors = []
        for _ in range(2):
            errors += await ranks.errors(lambda rank: rank.cache.step())
        assert {type(error) for error in errors} == {RankError}
        assert "ranks differ: digests" in str(errors[0])
        await all_over(ranks, keep)


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_silent_rank_ends_the_group_in_time(mode, victim):
    limits = replace(LIMITS, barrier_s=0.05)
    async with team(2, check=False, stores=busy, limits=limits, **mode) as ranks:
        seq = await ranks.begin(A)
        other = ranks.ranks[1 - victim]
        with pytest.raises(RankError):
            await step_on(other)
        # The one that was silent finds out when it speaks.
        with pytest.raises(RankError):
            await step_on(ranks.ranks[victim])
        await all_over(ranks, seq)


async def test_a_rank_that_closes_ends_the_group(mode):
    async with team(3, check=False, stores=busy, **mode) as ranks:
        await ranks.begin(A)
        await ranks.ranks[2].do(lambda rank: rank.cache.aclose())
        for rank in ranks.ranks[:2]:
            with pytest.raises(RankError, match="rank 2 has left"):
                await step_on(rank)


async def test_a_bug_on_one_rank_is_an_end_for_all_and_tells_why(mode):
    from asyncache.core import InvariantError

    async with team(2, check=False, stores=busy, **mode) as ranks:
        await ranks.begin(A)
        ranks.ranks[0].cache._runtime.driver.fail(InvariantError("two and two"))
        with pytest.raises(InvariantError, match="two and two"):
            await ranks.ranks[0].do(lambda rank: rank.cache.step())
        with pytest.raises(RankError, match="rank 0 has left"):
            await step_on(ranks.ranks[1])


async def test_a_broken_cache_stops_its_transfers_and_tells_who_waits(mode):
    async with team(2, check=False, stores=busy, **mode) as ranks:
        seq = await ranks.begin(A)
        for rank in ranks.ranks:
            rank.store.contains_gate.open()
        hit = ranks.ranks[0].hits[seq]
        await ranks.until(lambda: hit.agreed, "agreed")
        await ranks.ranks[0].do(lambda rank: rank.cache.reset())
        waits = []

        async def wait() -> None:
            try:
                await ranks.ranks[1].hits[seq].wait()
            except RankError as error:
                waits.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await turns(3)
            for _ in range(2):
                await ranks.errors(lambda rank: rank.cache.step())
        assert len(waits) == 1
        await all_over(ranks, seq)
        for rank in ranks.ranks:
            assert rank.cache.statistics().transfers == 0


# Steps that are cut short.


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["scope", "native"])
async def test_a_cancelled_step_is_owed_and_loses_nothing(mode, victim, how):
    async with team(2, **mode) as ranks:
        seq = await ranks.begin(A)
        rank, other = ranks.ranks[victim], ranks.ranks[1 - victim]

        async def cut_short(rank) -> None:
            if how == "scope":
                with anyio.CancelScope() as scope:
                    asyncio.get_running_loop().call_soon(scope.cancel)
                    await rank.cache.step()
                assert scope.cancelled_caught
            else:
                task = asyncio.current_task()
                asyncio.get_running_loop().call_soon(task.cancel)
                with pytest.raises(asyncio.CancelledError):
                    await rank.cache.step()
                task.uncancel()

        if mode["barrier"] == "pipelined":
            # A step is under way that the other has not taken part in.
            await rank.do(lambda r: r.cache.step())
        await rank.do(cut_short)
        with pytest.raises(OrderError, match="was cut short"):
            await rank.do(lambda r: r.requests[seq].extend(PAGE))
        with pytest.raises(OrderError, match="was cut short"):
            await rank.do(lambda r: r.cache.drain())
        async with anyio.create_task_group() as tasks:
            if mode["barrier"] == "pipelined":
                await other.do(lambda r: r.cache.step())
            tasks.start_soon(other.do, lambda r: r.cache.step())
            tasks.start_soon(rank.do, lambda r: r.cache.step())
        await ranks.settle(seq)
        await ranks.end(seq)


async def test_two_steps_at_once_are_refused(barrier):
    async with team(1, barrier=barrier) as ranks:
        seq = await ranks.begin(A)
        [rank] = ranks.ranks
        b = rank.cache._ranked().barrier
        b._is_stepping = True
        with pytest.raises(OrderError, match="under way already"):
            await rank.do(lambda r: r.cache.step())
        b._is_stepping = False
        await ranks.settle(seq)
        await ranks.end(seq)


async def test_a_reduce_that_a_stranger_cancels_ends_the_group():
    async with team(2, check=False, stores=busy) as ranks:
        await ranks.begin(A)
        rank = ranks.ranks[0]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ranks.errors, lambda r: r.cache.step() if r is rank else 0)
            await turns(12)
            [reduce] = [
                t for t in asyncio.all_tasks() if t.get_name() == "asyncache reduce"
            ]
            reduce.cancel()
        with pytest.raises(RankError, match="cancelled by a stranger"):
            rank.cache.waiting()


class Broken(LocalGroup):
    """Raises what no group should."""

    async def all_min(self, vector: array[int]) -> None:
        if len(vector) > 100:
            raise OSError("no route to host")
        await super().all_min(vector)


async def test_what_a_group_raises_is_a_rank_error(mode):
    async with team(2, groups=Broken.of, check=False, stores=busy, **mode) as ranks:
        await ranks.begin(A)
        errors = []
        for _ in range(2):
            errors += await ranks.errors(lambda rank: rank.cache.step())
        assert "no route to host" in str(errors[0])
        await all_over(ranks)


# Drains, attaches.


async def test_a_drain_ends_on_every_rank_at_the_first_ones_deadline(mode):
    async def store(rank, num_ranks):
        return GateStore(MemoryStore(2**24))

    async with team(2, stores=store, **mode) as ranks:
        for rank in ranks.ranks:
            rank.store.contains_gate.open()
        await ranks.serve(A)
        with anyio.fail_after(10):
            left = await ranks.everywhere(
                lambda r: r.cache.drain(deadline_s=0.02 if r.number else 60)
            )
        assert left[0] == left[1] > 0
        # The flag was of that drain, and not of the next.
        for rank in ranks.ranks:
            rank.store.put_gate.open()
        await ranks.drain()


async def test_stores_are_attached_on_every_rank_or_on_none(mode):
    async with team(2, **mode) as ranks:
        await ranks.serve(A)

        def one_fails(rank):
            store = NoStore() if rank.number else MemoryStore(2**24)
            return rank.cache.attach(store)

        errors = await ranks.errors(one_fails)
        assert sorted(str(error) for error in errors) == [
            "another rank could not open its store",
            "the disk is gone",
        ]
        ranks.check()
        await ranks.everywhere(lambda r: r.cache.attach(MemoryStore(2**24)))
        await ranks.drain()
        stored_pages = [r.cache.statistics().counters.stored_pages for r in ranks.ranks]
        assert stored_pages == [4, 4]
        await ranks.everywhere(lambda r: r.cache.detach())
        ranks.check()
        assert await ranks.serve(A) == 4 * PAGE


@pytest.mark.parametrize("victim", [0, 1])
async def test_an_attach_that_one_rank_cancels_attaches_none(mode, victim):
    async with team(2, **mode) as ranks:
        gates = [GateStore(MemoryStore(2**24), is_open=True) for _ in range(2)]

        async def attach(rank):
            with anyio.CancelScope() as scope:
                if rank.number == victim:
                    asyncio.get_running_loop().call_soon(scope.cancel)
                await rank.cache.attach(gates[rank.number])
            return scope.cancelled_caught

        errors = await ranks.errors(attach)
        attached = [r.cache._runtime.transfers is not None for r in ranks.ranks]
        assert attached[0] == attached[1]
        assert len(errors) in {0, 1}
        ranks.check()
        await ranks.serve(A)


async def test_prefetch_brings_a_prompt_to_every_rank(mode, monkeypatch):
    kinds, load = [], StoreLinker.load

    async def noted(self, plan, landed):
        kinds.append(plan.is_prefetch)
        return await load(self, plan, landed)

    monkeypatch.setattr(StoreLinker, "load", noted)

    async def store(rank, num_ranks):
        return await stored(rank, num_ranks, A)

    async with team(2, stores=store, **mode) as ranks:
        found = await ranks.everywhere(lambda r: r.cache.prefetch(A))
        assert found == [4 * PAGE] * 2
        assert kinds == [True, True]
        await ranks.until(lambda: not ranks.ranks[0].replica.look.needs_verdict, "end")
        assert await ranks.everywhere(lambda r: r.cache.match_nowait(A)) == [16, 16]


async def test_a_closed_cache_is_closed_to_its_loop(mode):
    async with team(2, check=False, **mode) as ranks:
        await ranks.begin(A)
        await ranks.everywhere(lambda rank: rank.cache.aclose())
        errors = await ranks.errors(lambda rank: rank.cache.step())
        assert [type(error) for error in errors] == [ClosedError] * 2
