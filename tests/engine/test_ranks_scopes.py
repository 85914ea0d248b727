"""Handlers on one rank, loops on all: how scopes come in, and go out."""

from __future__ import annotations

import pickle

import anyio
import pytest

from asyncache.core import (
    AbortedError,
    ClosedError,
    OrderError,
    OutOfPagesError,
    RankError,
    TooManyRequestsError,
)
from asyncache.engine import Limits
from tests.engine.scene import PAGE, prompt, turns
from tests.engine.team import MODES, stored, team

pytestmark = pytest.mark.anyio
A, B = prompt(4, seed=1), prompt(4, seed=2)


@pytest.fixture(params=MODES, ids=lambda mode: "-".join(mode.values()))
def mode(request) -> dict[str, str]:
    return request.param


class Handler:
    """A client's handler on one rank: holds a scope until it is told to leave."""

    def __init__(self, group, rank, tokens, **arguments) -> None:
        self.scope = anyio.CancelScope()
        self.may_leave = anyio.Event()
        self.error: BaseException | None = None
        self.over = anyio.Event()
        self.request = rank.cache.request(tokens, **arguments)
        group.start_soon(self._run)

    async def _run(self) -> None:
        with self.scope:
            try:
                with self.request as request:
                    await request.admitted()
                    await self.may_leave.wait()
            except Exception as error:  # noqa: BLE001 - told to the test
                self.error = error
            finally:
                self.over.set()


async def admit_waiting(ranks) -> list[int]:
    """Do what a loop does once a step: gather, send, admit."""
    prompts = [p for rank in ranks.ranks for p in rank.cache.waiting()]
    return await ranks.admit(pickle.loads(pickle.dumps(prompts)))


async def gone(ranks, seq) -> None:
    await ranks.dismiss()
    await ranks.until(lambda: seq not in ranks.ranks[0].requests, "it ends")


@pytest.mark.parametrize("where", [0, 1])
async def test_a_scope_waits_is_admitted_and_closed_on_every_rank(mode, where):
    async with team(2, **mode) as ranks, anyio.create_task_group() as group:
        handler = Handler(group, ranks.ranks[where], A)
        await turns(3)
        with pytest.raises(OrderError, match="yet to admit"):
            handler.request.extend(1)
        [seq] = await admit_waiting(ranks)
        assert ranks.ranks[where].requests[seq] is handler.request
        assert ranks.ranks[1 - where].requests[seq] is not handler.request
        assert [rank.cache.waiting() for rank in ranks.ranks] == [[], []]
        await ranks.restore_nowait(seq)
        assert await ranks.settle(seq) == 0
        await ranks.compute(seq, A)
        reports = [await ranks.step() for _ in range(3)]
        assert not any(report.closed for report in reports)
        handler.may_leave.set()
        await turns(3)
        assert handler.over.is_set()
        await gone(ranks, seq)
        assert await ranks.serve(A) == 4 * PAGE


@pytest.mark.parametrize("how", ["scope", "raise"])
@pytest.mark.parametrize("where", [0, 1])
async def test_a_client_that_goes_ends_its_request_on_every_rank(mode, where, how):
    async with team(2, **mode) as ranks, anyio.create_task_group() as group:
        handler = Handler(group, ranks.ranks[where], A)
        await turns(3)
        [seq] = await admit_waiting(ranks)
        await ranks.restore_nowait(seq)
        await ranks.settle(seq)
        await ranks.compute(seq, A[: 2 * PAGE])
        if how == "scope":
            handler.scope.cancel()
        else:
            handler.request._finish(aborted=True)
            handler.may_leave.set()
        await turns(3)
        # Until the verdict it is open everywhere, and calls on it are made everywhere.
        await ranks.compute(seq, A)
        await ranks.dismiss()
        aborted = []
        while seq in ranks.ranks[0].requests:
            aborted += [r._state.seq for r in (await ranks.step()).aborted]
        if mode["aborts"] == "vote":
            assert aborted == [seq]
        with pytest.raises(AbortedError):
            handler.request.extend(1)


async def test_a_scope_that_ends_before_it_is_admitted_was_never_there(mode):
    async with team(2, **mode) as ranks, anyio.create_task_group() as group:
        handler = Handler(group, ranks.ranks[0], A)
        await turns(3)
        assert len(ranks.ranks[0].cache.waiting()) == 1
        handler.scope.cancel()
        await turns(3)
        assert ranks.ranks[0].cache.waiting() == []
        assert await admit_waiting(ranks) == []


async def test_a_scope_that_ends_on_its_way_to_the_ranks_is_over_at_once(mode):
    """Its prompt was sent: the others open it, so this rank has to as well."""
    async with team(2, **mode) as ranks, anyio.create_task_group() as group:
        handler = Handler(group, ranks.ranks[0], A)
        await turns(3)
        prompts = ranks.ranks[0].cache.waiting()
        handler.scope.cancel()
        await turns(3)
        seqs = await ranks.admit(prompts)
        await ranks.dismiss()
        await ranks.until(lambda: not ranks.ranks[1].requests, "it ends")
        assert seqs


async def test_what_does_not_fit_is_refused_on_every_rank_and_tells_its_handler(mode):
    async with team(2, num_pages=8, **mode) as ranks:
        async with anyio.create_task_group() as group:
            handler = Handler(group, ranks.ranks[0], prompt(9))
            await turns(3)
            assert await admit_waiting(ranks) == []
            await turns(3)
            assert isinstance(handler.error, OutOfPagesError)
            assert handler.error.needed == 10
            assert not handler.request.is_open
        with pytest.raises(OutOfPagesError, match="cannot fit a pool of 8"):
            handler.request.extend(1)


async def test_more_than_may_be_open_are_refused_on_every_rank(mode):
    limits = Limits(requests=1, barrier_s=20.0)
    async with team(2, limits=limits, **mode) as ranks:
        first = await ranks.open(A)
        assert await ranks.admit([ranks.ranks[0].cache.prompt(B)]) == []
        await ranks.end(first)
        second = await ranks.open(B)
        await ranks.end(second)


async def test_a_refused_scope_says_why(mode):
    limits = Limits(requests=1, barrier_s=20.0)
    async with team(2, limits=limits, **mode) as ranks:
        first = await ranks.open(A)
        async with anyio.create_task_group() as group:
            handler = Handler(group, ranks.ranks[1], B)
            await turns(3)
            assert await admit_waiting(ranks) == []
            await turns(3)
        assert isinstance(handler.error, TooManyRequestsError)
        await ranks.end(first)


async def test_nobody_waits_for_a_loop_that_does_not_step():
    limits = Limits(step_s=0.02, barrier_s=20.0)
    async with team(2, limits=limits) as ranks, anyio.create_task_group() as group:
        handler = Handler(group, ranks.ranks[0], A)
        with anyio.fail_after(10):
            await handler.over.wait()
        assert isinstance(handler.error, RankError)
        assert str(handler.error) == "no step() for 0.02 s"


async def test_a_restore_that_nobody_steps_for_ends_locally(mode):
    limits = Limits(step_s=0.02, barrier_s=20.0)

    async def store(rank, num_ranks):
        return await stored(rank, num_ranks, A)

    async with team(2, limits=limits, stores=store, **mode) as ranks:
        seq = await ranks.open(A)
        await ranks.restore_nowait(seq, deadline_s=0.01)
        hit = ranks.ranks[0].hits[seq]
        with anyio.fail_after(10), pytest.raises(RankError, match=r"no step\(\) for"):
            await hit.wait()
        await ranks.settle(seq)
        await ranks.end(seq)


async def test_a_closed_cache_tells_those_who_wait_to_be_admitted():
    async with team(2, check=False) as ranks, anyio.create_task_group() as group:
        handler = Handler(group, ranks.ranks[0], A)
        await turns(3)
        await ranks.everywhere(lambda rank: rank.cache.aclose())
        await turns(3)
        assert isinstance(handler.error, ClosedError)


async def test_calls_come_from_one_task(mode):
    async with team(2, **mode) as ranks:
        seq = await ranks.open(A)
        rank = ranks.ranks[0]
        for call in (
            lambda: rank.requests[seq].extend(4),
            lambda: rank.cache.admit([rank.cache.prompt(B)]),
            lambda: rank.cache.abort(rank.requests[seq]),
            rank.cache.reset,
        ):
            with pytest.raises(OrderError, match="calls come from one task, the loop"):
                call()
        with pytest.raises(OrderError, match="calls come from one task, the loop"):
            await rank.cache.step()
        ranks.check()
        await ranks.end(seq)


async def test_a_loop_that_has_ended_has_a_successor():
    async with team(1) as ranks:
        await ranks.everywhere(lambda rank: rank.cache.reset())
        [rank] = ranks.ranks
        rank.cache._ranked().barrier._loop_task = None
        resets: list[int] = []

        async def successor() -> None:
            rank.cache.reset()
            resets.append(rank.cache.statistics().counters.resets)

        for _ in range(2):
            async with anyio.create_task_group() as group:
                group.start_soon(successor)
        assert resets == [2, 3]


async def test_awaiting_a_restore_in_the_loop_is_refused_for_it_would_never_end(mode):
    async with team(2, **mode) as ranks:
        seq = await ranks.open(A)
        with pytest.raises(OrderError, match=r"restore_nowait\(\), then step"):
            await ranks.everywhere(lambda rank: rank.requests[seq].restore())
        await ranks.end(seq)


async def test_a_loop_aborts_on_every_rank_by_a_call(mode):
    async with team(2, **mode) as ranks, anyio.create_task_group() as group:
        handler = Handler(group, ranks.ranks[0], A)
        await turns(3)
        [seq] = await admit_waiting(ranks)
        await ranks.everywhere(lambda rank: rank.cache.abort(rank.requests[seq]))
        ranks.check()
        assert not handler.request.is_open
        with pytest.raises(AbortedError):
            handler.request.extend(1)
        handler.may_leave.set()
        await ranks.dismiss()


async def test_an_open_request_costs_no_collective_where_calls_end_it():
    async with team(2, aborts="call") as ranks:
        rounds = []
        group = ranks.ranks[0].cache._group
        all_min = group.all_min

        async def counted(vector) -> None:
            rounds.append(len(vector))
            await all_min(vector)

        group.all_min = counted
        seq = await ranks.open(A)
        await ranks.restore_nowait(seq, deadline_s=0)
        await ranks.settle(seq)
        await ranks.compute(seq, A)
        before = len(rounds)
        for _ in range(20):
            await ranks.step()
        assert len(rounds) == before
        await ranks.end(seq)
        assert len(rounds) <= before + 2


async def test_an_idle_group_has_no_collective(mode):
    async with team(2, **mode) as ranks:
        group = ranks.ranks[0].cache._group
        before = group._num_calls
        for _ in range(10):
            await ranks.step()
        assert group._num_calls == before


async def test_a_prompt_that_is_admitted_twice_is_its_handlers_once(mode):
    """The second one nobody waits for: it is over as soon as all ranks know."""
    async with team(2, **mode) as ranks, anyio.create_task_group() as group:
        handler = Handler(group, ranks.ranks[1], A)
        await turns(3)
        prompts = ranks.ranks[1].cache.waiting()
        first, second = await ranks.admit(prompts * 2)
        assert ranks.ranks[1].requests[first] is handler.request
        await gone(ranks, second)
        assert handler.request.is_open
        assert first in ranks.ranks[0].requests
        handler.may_leave.set()
        await turns(3)
        await gone(ranks, first)
