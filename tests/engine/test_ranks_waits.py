"""What one rank waits for, and for how long; what a loop may go by, and what not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import anyio
import pytest

from asyncache.core import AbortedError, ClosedError, OrderError, RankError
from asyncache.engine import Limits
from asyncache.stores import MemoryStore
from asyncache.testing import GateStore
from asyncache.testing._nth import noting
from tests.engine.scene import PAGE, StubbornStore, prompt, turns
from tests.engine.team import LIMITS, MODES, Rank, Team, stored, team

pytestmark = pytest.mark.anyio
A, B = prompt(4, seed=1), prompt(4, seed=2)


@pytest.fixture(params=MODES, ids=lambda mode: "-".join(mode.values()))
def mode(request) -> dict[str, str]:
    return request.param


async def having(rank: int, num_ranks: int) -> MemoryStore:
    return await stored(rank, num_ranks, A)


async def gated(rank: int, num_ranks: int) -> GateStore:
    return GateStore(await stored(rank, num_ranks, A))


def release(ranks: Team, *gates: str) -> None:
    for rank in ranks.ranks:
        for name in gates:
            getattr(rank.store, f"{name}_gate").open()


# What a loop goes by is the same on every rank.


@pytest.mark.parametrize("where", [0, 1])
async def test_a_hit_is_not_settled_for_one_rank_alone_where_its_client_goes(
    mode, where
):
    """Until the verdict the loops serve on: were one told that the hit is agreed, it
    would extend while the others still wait."""
    async with team(2, stores=gated, **mode) as ranks:
        with suppress(EOFError), ranks.ranks[where].cache.request(A):
            [seq] = await ranks.admit(ranks.ranks[where].cache.waiting())
            await ranks.restore_nowait(seq)
            raise EOFError
        hits = [rank.hits[seq] for rank in ranks.ranks]
        assert [(hit.agreed, hit.settled) for hit in hits] == [(False, False)] * 2
        for rank in ranks.ranks:
            with pytest.raises(OrderError, match="while a restore is open"):
                await rank.do(lambda r: r.requests[seq].extend(PAGE))
        await ranks.dismiss()
        await ranks.until(lambda: not ranks.ranks[0].requests, "it ends")
        assert [(hit.agreed, hit.settled) for hit in hits] == [(True, True)] * 2
        release(ranks, "contains", "get")


async def test_a_clock_settles_no_hit(mode):
    limits = Limits(step_s=0.02, barrier_s=20.0)
    async with team(2, limits=limits, stores=having, **mode) as ranks:
        seq = await ranks.open(A)
        await ranks.everywhere(
            lambda r: r.hits.update(
                {seq: r.requests[seq].restore_nowait(deadline_s=9 * r.number + 0.01)}
            )
        )
        first, second = (rank.hits[seq] for rank in ranks.ranks)
        with anyio.fail_after(10), pytest.raises(RankError, match=r"no step\(\) for"):
            await first.wait()
        assert (first.agreed, first.settled) == (second.agreed, second.settled)
        assert not first.settled
        with pytest.raises(RankError, match=r"no step\(\) for"):
            await first.wait()
        await ranks.settle(seq)
        # The loop was late, and has come: whoever asks now has a hit.
        await first.wait()
        await second.wait()
        assert first.num_tokens == second.num_tokens
        await ranks.end(seq)


@pytest.mark.parametrize("deadline_s", [0, 0.005])
async def test_nobody_waits_for_ever_for_a_loop_whatever_the_deadline(mode, deadline_s):
    limits = Limits(step_s=0.02, barrier_s=20.0)
    async with team(2, num_pages=8, limits=limits, **mode) as ranks:
        # There is no room for the second, which has to wait, or to be given up.
        first = await ranks.begin(B)
        await ranks.settle(first)
        seq = await ranks.open(A)
        await ranks.restore_nowait(seq, deadline_s=deadline_s)
        hit = ranks.ranks[1].hits[seq]
        with anyio.fail_after(10), pytest.raises(RankError, match=r"no step\(\) for"):
            await hit.wait()
        assert await ranks.settle(seq) == 0
        await ranks.end(seq)
        await ranks.end(first)


async def test_what_was_left_is_told_until_it_is_dismissed():
    """A loop that is cancelled between the two has lost nothing."""
    async with team(2, aborts="call") as ranks:
        rank = ranks.ranks[0]
        with rank.cache.request(A), suppress(EOFError), rank.cache.request(B):
            first, second = await ranks.admit(rank.cache.waiting())
            raise EOFError
        assert rank.cache.left() == {first: False, second: True}
        assert rank.cache.left() == {first: False, second: True}
        await ranks.everywhere(lambda r: r.cache.dismiss({first: False}))
        assert rank.cache.left() == {second: True}
        await ranks.everywhere(lambda r: r.cache.abort(r.requests[second]))
        assert rank.cache.left() == {}
        await ranks.step()


# How long a step waits.


@asynccontextmanager
async def stepping(rank: Rank, timeout_s: float) -> AsyncIterator[anyio.Event]:
    """Step on one rank meanwhile; the event is set when the step is over."""
    over = anyio.Event()

    async def step() -> None:
        await rank.do(lambda r: r.cache.step(timeout_s=timeout_s))
        over.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(step)
        await turns(20)
        yield over
        with anyio.fail_after(10):
            await over.wait()


async def test_a_step_waits_for_news_though_a_forward_has_ended(mode):
    """With ``aborts="call"`` no ballot takes the end of a forward along: an idle loop
    would have spun."""
    async with team(2, **mode) as ranks:
        assert await ranks.serve(A) == 0

        def run(rank: Rank) -> None:
            with rank.cache.forward([]):
                pass

        await ranks.everywhere(run)
        for _ in range(3):
            await ranks.step()
        for rank in ranks.ranks:
            async with stepping(rank, 9.0) as over:
                assert not over.is_set()
                with rank.cache.request(A):
                    with anyio.fail_after(5):
                        await over.wait()


async def test_a_scope_that_comes_while_a_minimum_is_awaited_keeps_no_step_waiting():
    """Pipelined, a step first awaits the minimum of the one before."""
    async with team(2, stores=gated, barrier="pipelined") as ranks:
        seq = await ranks.begin(A)
        first, second = ranks.ranks
        await first.do(lambda r: r.cache.step())
        async with stepping(first, 9.0) as over:
            with first.cache.request(B):
                await second.do(lambda r: r.cache.step())
                with anyio.fail_after(5):
                    await over.wait()
        release(ranks, "contains", "get", "put")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(second.do, lambda r: r.cache.step())
        await ranks.settle(seq)
        await ranks.end(seq)


async def test_a_rank_with_nothing_to_say_does_not_keep_the_others_until_they_give_up(
    mode,
):
    limits = replace(LIMITS, barrier_s=0.2)
    async with team(2, stores=gated, limits=limits, **mode) as ranks:
        seq = await ranks.begin(A)
        first = ranks.ranks[0]
        first.store.contains_gate.open()
        for _ in range(2):
            # The first one has an answer to tell, the second waits for its own.
            await ranks.step(timeout_s=30.0)
        release(ranks, "contains", "get")
        await ranks.settle(seq)
        await ranks.end(seq)


# Drains and prefetches.


async def test_a_drain_ends_where_only_a_call_could_go_on(mode):
    """B44: the node to be stored cannot be pinned, for all that is free is promised.
    With ``aborts="call"`` nothing is voted on then, no deadline either."""
    async with team(2, num_pages=10, **mode) as ranks:
        await ranks.serve(A)
        seq = await ranks.begin(prompt(9, seed=5))
        await ranks.settle(seq)
        await ranks.everywhere(lambda r: r.cache.attach(MemoryStore(2**24)))
        with anyio.fail_after(10):
            left = await ranks.everywhere(lambda r: r.cache.drain(deadline_s=0.05))
        assert left == [1, 1]
        await ranks.end(seq)
        await ranks.drain()
        counters = [rank.cache.statistics().counters for rank in ranks.ranks]
        assert [c.stored_pages for c in counters] == [4, 4]


async def test_a_prefetch_starts_what_waits_for_a_launch(mode):
    async with team(2, stores=having, launch="batch", **mode) as ranks:
        with anyio.fail_after(10):
            found = await ranks.everywhere(lambda r: r.cache.prefetch(A))
        assert found == [4 * PAGE] * 2


async def test_a_prefetch_that_one_rank_cancels_tells_the_others(mode):
    async with team(2, stores=gated, **mode) as ranks:
        first, second = ranks.ranks
        errors = []

        async def cut(rank: Rank) -> None:
            with anyio.CancelScope() as scope:
                asyncio.get_running_loop().call_soon(scope.cancel)
                await rank.cache.prefetch(A)
            errors.append(scope.cancelled_caught)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.do, cut)
            with pytest.raises(AbortedError, match="another rank was cancelled"):
                await second.do(lambda rank: rank.cache.prefetch(A))
        assert errors == [True]
        release(ranks, "contains", "get", "put")
        ranks.check()
        assert await ranks.serve(A) == 4 * PAGE


# Coming to an end.


async def test_a_detach_that_has_to_wait_again_is_one_call_all_the_same(mode):
    limits = replace(LIMITS, close_s=0.02)

    async def store(rank: int, num_ranks: int) -> StubbornStore:
        inner = StubbornStore(await stored(rank, num_ranks, A), is_open=True)
        if rank:
            inner.get_gate.close()
        return inner

    async with team(2, stores=store, limits=limits, **mode) as ranks:
        seq = await ranks.begin(A)
        hit = ranks.ranks[0].hits[seq]
        await ranks.until(lambda: hit.agreed, "agreed")
        second = ranks.ranks[1]
        with anyio.fail_after(10):
            await second.store.get_gate.wait_arrived()
        errors = await ranks.errors(lambda rank: rank.cache.detach())
        assert [str(error) for error in errors] == [
            "1 transfers did not stop within 0.02 s"
        ]
        second.store.get_gate.open()
        await second.do(lambda rank: rank.cache.detach())
        ranks.check()
        assert await ranks.settle(seq) == 0
        await ranks.end(seq)
        await ranks.everywhere(lambda r: r.cache.attach(MemoryStore(2**24)))
        assert await ranks.serve(B) == 0


async def test_a_step_that_the_cache_is_closed_under_says_so(barrier_mode):
    async with team(2, stores=gated, check=False, **barrier_mode) as ranks:
        await ranks.begin(A)
        first, second = ranks.ranks
        if barrier_mode["barrier"] == "pipelined":
            await first.do(lambda r: r.cache.step())

        async def step() -> None:
            with pytest.raises(ClosedError, match="the cache is closed"):
                await first.do(lambda r: r.cache.step())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step)
            await turns(10)
            await first.cache.aclose()
        assert first.cache._runtime.driver.failure is None
        errors = []
        while not errors:
            errors = await ranks.errors(
                lambda r: r.cache.step() if r is second else None
            )
        assert str(errors[0]) == "rank 0 has left"


@pytest.fixture(params=["sync", "pipelined"])
def barrier_mode(request) -> dict[str, str]:
    return {"barrier": request.param}


async def test_a_rank_that_closes_tells_the_others_before_its_transfers_have_stopped():
    async def store(rank: int, num_ranks: int) -> StubbornStore:
        return StubbornStore(await stored(rank, num_ranks, A))

    async with team(2, stores=store, check=False) as ranks:
        seq = await ranks.begin(A)
        first, second = ranks.ranks
        release(ranks, "contains", "put")
        hit = first.hits[seq]
        await ranks.until(lambda: hit.agreed, "agreed")
        await first.store.get_gate.wait_arrived()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.cache.aclose)
            with pytest.raises(RankError, match="rank 0 has left"):
                await second.do(lambda r: r.cache.step())
            assert first.cache.statistics().transfers == 1
            release(ranks, "get")


async def test_no_rank_takes_its_own_votes_for_a_verdict_when_another_goes():
    """An attach first takes the minimum that is under way, if there is one."""

    async def attach(rank: Rank) -> None:
        if rank.number == 0:
            await rank.cache.attach(MemoryStore(9))

    for turn in range(24):
        with noting(f"gone in turn {turn}"):
            async with team(2, check=False, barrier="pipelined") as ranks:
                seq = await ranks.open(A)
                first, second = ranks.ranks
                first.requests[seq]._finish(aborted=True)
                await first.do(lambda r: r.cache.step())
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(ranks.errors, attach)
                    await turns(turn)
                    await second.cache.aclose()
                assert first.replica.look.is_open(seq)


async def test_an_observer_makes_no_call_in_a_step(mode):
    async with team(2, stores=having, **mode) as ranks:
        refused = []

        class Caller:
            def __init__(self, rank: Rank) -> None:
                self.rank = rank

            def on_event(self, event) -> None:
                try:
                    self.rank.cache.reset()
                except OrderError as error:
                    refused.append(str(error))

        for rank in ranks.ranks:
            rank.cache._runtime._teller._observer = Caller(rank)
        seq = await ranks.begin(A)
        await ranks.settle(seq)
        await ranks.end(seq)
        for rank in ranks.ranks:
            rank.cache._runtime._teller._observer = rank.log
        assert refused
        told = {text for text in refused if "calls come from one task" not in text}
        assert told <= {"a step() is under way: call before it, or after"}
        assert told
