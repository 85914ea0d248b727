"""Whatever is cut short on one rank, in whatever way, at whatever await.

Nothing is lost and nothing hangs: the ranks stay equal and serve on, or all of them
have a RankError in time. The others run the same calls, and are left in peace.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import anyio
import pytest

from asyncache.core import (
    AbortedError,
    AsyncacheError,
    ClosedError,
    RankError,
    StoreError,
)
from asyncache.devices import CpuDevice
from asyncache.engine import KVCache
from asyncache.ranks import LocalGroup
from asyncache.stores import MemoryStore
from asyncache.testing import CancelStyle, GateDevice
from asyncache.testing._cancel import Cancellation, cancel_after
from asyncache.testing._nth import Canceller, noting
from tests.engine.scene import LAYOUT, PAGE, prompt, turns
from tests.engine.team import LIMITS, MODES, Rank, Team, stored, team

pytestmark = pytest.mark.anyio
A, B, C, D = (prompt(3, seed=seed) for seed in range(1, 5))
MOST = 60


@pytest.fixture(params=MODES, ids=lambda mode: "-".join(mode.values()))
def mode(request) -> dict[str, str]:
    return request.param


@pytest.fixture(params=CancelStyle, ids=lambda style: style.name)
def style(request) -> CancelStyle:
    return request.param


async def having(rank: int, num_ranks: int) -> MemoryStore:
    return await stored(rank, num_ranks, A, B, C)


def staging(_: int) -> GateDevice:
    return GateDevice(CpuDevice(LAYOUT, 24), is_open=True)


async def drain(rank: Rank) -> None:
    await rank.cache.drain()


async def prefetch(rank: Rank) -> None:
    await rank.cache.prefetch(C)


async def detach(rank: Rank) -> None:
    await rank.cache.detach()


async def attach(rank: Rank) -> None:
    await rank.cache.attach(MemoryStore(2**20))


async def many_steps(rank: Rank) -> None:
    for _ in range(4):
        await rank.cache.step(timeout_s=0.0001)


CALLS = [many_steps, drain, prefetch, detach, attach]


async def busy(ranks: Team) -> list[int]:
    """Have a load and an offload under way, and in pipelined mode a ballot."""
    seq = await ranks.begin(A)
    other = await ranks.begin(D)
    await ranks.settle(other)
    await ranks.compute(other, D)
    await ranks.step()
    return [seq, other]


async def cut_short(
    ranks: Team, victim: int, call: Callable[[Rank], Awaitable[None]], nth: int, style
) -> bool:
    """Make a call on every rank, and cancel one at its n-th suspension."""
    was_cancelled = False

    async def act(rank: Rank) -> None:
        nonlocal was_cancelled
        if rank.number == victim:
            was_cancelled = await Canceller(call(rank), nth, style).run()
        else:
            # That another rank was cancelled in it.
            with suppress(AbortedError, StoreError):
                await call(rank)

    await ranks.everywhere(act)
    return was_cancelled


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("mode", MODES[::3], ids=lambda mode: "-".join(mode.values()))
async def test_ranks_stay_equal_where_one_is_cancelled_at_each_await(mode, style, call):
    """Steps of a script are the same number on all; what steps by itself ends alike."""
    for nth in range(1, MOST):
        with noting(f"cancelled at suspension {nth}"), anyio.fail_after(30):
            async with team(2, stores=having, devices=staging, **mode) as ranks:
                if call is attach:
                    await ranks.everywhere(detach)
                seqs = await busy(ranks)
                if call is many_steps:
                    was_cancelled = await cut_in_script(ranks, nth, style)
                else:
                    was_cancelled = await cut_short(ranks, nth % 2, call, nth, style)
                ranks.check()
                assert len({r.cache._linker is None for r in ranks.ranks}) == 1
                for seq in seqs:
                    await ranks.settle(seq)
                    await ranks.end(seq)
                assert await ranks.serve(D) == 3 * PAGE
        if not was_cancelled:
            break
    assert 1 < nth < MOST


async def cut_in_script(ranks: Team, nth: int, style) -> bool:
    """Cancel one rank's script of steps, which goes on where it was."""
    was_cancelled, left = False, [4, 4]

    async def steps(rank: Rank) -> None:
        while left[rank.number]:
            await rank.cache.step(timeout_s=0.0001)
            left[rank.number] -= 1

    async def act(rank: Rank) -> None:
        nonlocal was_cancelled
        if rank.number == nth % 2:
            was_cancelled = await Canceller(steps(rank), nth, style).run()
        await steps(rank)

    await ranks.everywhere(act)
    return was_cancelled


TWICE = [Cancellation.TASK_TWICE, Cancellation.SCOPE_AND_TASK]


@pytest.mark.parametrize("how", TWICE, ids=lambda how: how.name)
@pytest.mark.parametrize("call", CALLS[1:], ids=lambda call: call.__name__)
async def test_ranks_stay_equal_where_one_is_cancelled_twice_in_each_turn(how, call):
    """Once, and again while it cleans up."""
    mode, turn, was_cancelled = MODES[3 * TWICE.index(how)], 0, True
    while was_cancelled:
        turn += 1
        with noting(f"cancelled in turn {turn}"), anyio.fail_after(30):
            async with team(2, stores=having, **mode) as ranks:
                if call is attach:
                    await ranks.everywhere(detach)
                seqs = await busy(ranks)
                was_cancelled = await cut_in_turn(ranks, call, turn, how)
                ranks.check()
                for seq in seqs:
                    await ranks.settle(seq)
                    await ranks.end(seq)
    assert turn > 1


async def cut_in_turn(ranks: Team, call, turn: int, how: Cancellation) -> bool:
    """Make a call on both ranks, in tasks that are their loops for so long."""
    first, second = ranks.ranks
    for rank in ranks.ranks:
        rank.cache._runtime.barrier._loop_task = None
    was_cancelled = False

    async def victim() -> None:
        nonlocal was_cancelled
        was_cancelled = await cancel_after(turn, lambda: call(first), how)

    async def other() -> None:
        with suppress(AbortedError, StoreError):
            await call(second)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(victim)
        tasks.start_soon(other)
    return was_cancelled


# Opening and closing.


def caches(**arguments) -> list[KVCache]:
    return [
        KVCache(
            LAYOUT,
            device=CpuDevice(LAYOUT, 8),
            store=MemoryStore(2**20),
            group=group,
            limits=LIMITS,
            **arguments,
        )
        for group in LocalGroup.of(2)
    ]


async def outcome(call: Awaitable[object]) -> BaseException | None:
    try:
        await call
    except AsyncacheError as error:
        return error
    return None


@pytest.mark.parametrize("with_store", [False, True])
async def test_an_open_that_is_cancelled_leaves_nothing_open_and_nobody_waits(
    style, with_store
):
    before = asyncio.all_tasks()
    for nth in range(1, MOST):
        with noting(f"cancelled at suspension {nth}"), anyio.fail_after(30):
            first, second = caches()
            if not with_store:
                first._linker = second._linker = None
            found: list[BaseException | None] = []

            async def other(cache=second, found=found) -> None:
                found.append(await outcome(cache.open()))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other)
                was_cancelled = await Canceller(first.open(), nth, style).run()
            if was_cancelled and first._is_closed:
                # Its part may have been the last: then the other hears of it later.
                if found == [None]:
                    _held = second.admit([second.prompt(A)])
                    found = [await outcome(second.step())]
                assert len(found) == 1
                assert isinstance(found[0], RankError | StoreError)
            else:
                assert found == [None]
            for cache in (first, second):
                await cache.aclose()
            assert asyncio.all_tasks() == before
        if not was_cancelled:
            break
    assert 1 < nth < MOST


async def test_a_cache_that_is_closed_while_it_opens_is_not_opened():
    before, was_open, turn = asyncio.all_tasks(), False, 0
    while not was_open:
        with noting(f"closed in turn {turn}"), anyio.fail_after(30):
            first, second = caches()
            found: dict[KVCache, BaseException | None] = {}

            async def one(cache: KVCache, found=found) -> None:
                found[cache] = await outcome(cache.open())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one, first)
                tasks.start_soon(one, second)
                await turns(turn)
                was_open = first in found
                await first.aclose()
            assert was_open == (found[first] is None)
            await second.aclose()
            assert asyncio.all_tasks() == before
        turn += 1
    assert turn > 3


@pytest.mark.parametrize("how", Cancellation, ids=lambda how: how.name)
async def test_a_close_that_is_cancelled_closes_all_the_same(how):
    mode = MODES[list(Cancellation).index(how)]
    for turn in range(1, 9):
        with noting(f"cancelled in turn {turn}"), anyio.fail_after(30):
            async with team(2, stores=having, check=False, **mode) as ranks:
                await busy(ranks)
                first, second = ranks.ranks
                await cancel_after(turn, first.cache.aclose, how)
                assert first.cache.statistics().transfers == 0
                with pytest.raises(RankError, match="rank 0 has left"):
                    await second.do(many_steps)
                await second.do(lambda rank: rank.cache.aclose())


# Handlers.


@pytest.mark.parametrize("how", Cancellation, ids=lambda how: how.name)
async def test_a_handler_is_cancelled_in_each_turn_of_its_waits(how):
    mode, turn, was_cancelled = MODES[list(Cancellation).index(how)], 0, True
    while was_cancelled:
        turn += 1
        with noting(f"cancelled in turn {turn}"), anyio.fail_after(30):
            async with team(2, stores=having, **mode) as ranks:
                was_cancelled = await leave_in_turn(ranks, turn, how)
                await ranks.dismiss()
                await ranks.until(lambda r=ranks: not r.ranks[1].requests, "it ends")
                assert await ranks.serve(A) == 3 * PAGE
    assert turn > 1


async def leave_in_turn(ranks: Team, turn: int, how: Cancellation) -> bool:
    """Let a loop serve a handler that is cancelled in a turn of what it waits for."""
    rank, is_over, was_cancelled = ranks.ranks[0], False, False

    async def handle() -> None:
        with rank.cache.request(A) as request:
            await request.admitted()
            while request.id not in rank.hits:
                await turns(1)
            await rank.hits[request.id].wait()

    async def client() -> None:
        nonlocal is_over, was_cancelled
        was_cancelled = await cancel_after(turn, handle, how)
        is_over = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client)
        while not is_over:
            for seq in await ranks.admit(rank.cache.waiting()):
                await ranks.restore_nowait(seq)
            await ranks.step()
            await turns(1)
    return was_cancelled


async def test_a_group_that_is_over_leaves_no_task(mode):
    """Whoever found out first, and however: closed, all is gone, the reduce too."""
    before = asyncio.all_tasks()
    for breaks in ("call", "close", "cancel"):
        limits = replace(LIMITS, barrier_s=0.3)
        async with team(2, stores=having, check=False, limits=limits, **mode) as ranks:
            await busy(ranks)
            first = ranks.ranks[0]
            if breaks == "call":
                await first.do(lambda rank: rank.cache.reset())
            elif breaks == "close":
                await first.cache.aclose()
            else:
                first.cache._runtime.barrier._reduce(array("i", [1]))
                first.cache._runtime.barrier._reducing.cancel()
            errors: list[Exception] = []
            while len(errors) < 2:
                errors += await ranks.errors(lambda rank: rank.cache.step())
            assert {type(error) for error in errors} <= {RankError, ClosedError}
            for rank in ranks.ranks:
                await rank.do(lambda r: r.cache.aclose())
        assert asyncio.all_tasks() == before
