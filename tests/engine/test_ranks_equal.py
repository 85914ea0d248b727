"""What a loop sees of its requests is the same on all ranks, whatever one knows."""

from __future__ import annotations

import pytest

from asyncache.core import OrderError, RankError, TooManyRequestsError
from asyncache.engine import Limits
from asyncache.ranks import LocalGroup
from asyncache.stores import MemoryStore
from asyncache.testing import Gate, GateStore
from tests.engine.scene import prompt
from tests.engine.team import MODES, stored, team

pytestmark = pytest.mark.anyio
A, B = prompt(4, seed=1), prompt(4, seed=2)


@pytest.fixture(params=MODES, ids=lambda mode: "-".join(mode.values()))
def mode(request) -> dict[str, str]:
    return request.param


async def gated(rank: int, num_ranks: int) -> GateStore:
    """Return a store of A that answers nothing until it is opened."""
    return GateStore(await stored(rank, num_ranks, A))


async def test_a_hit_is_agreed_on_every_rank_at_once_though_its_handler_has_gone(mode):
    """A loop that goes by it would else make calls that the others do not."""
    async with team(2, stores=gated, **mode) as ranks:
        request = ranks.ranks[0].cache.request(A)
        request.__enter__()
        prompts = ranks.ranks[0].cache.waiting()
        [seq] = await ranks.admit(prompts)
        await ranks.restore_nowait(seq)
        request._finish(aborted=True)
        hits = [rank.hits[seq] for rank in ranks.ranks]
        assert [(hit.agreed, hit.settled) for hit in hits] == [(False, False)] * 2
        await ranks.dismiss()
        for rank in ranks.ranks:
            rank.store.contains_gate.open()
            rank.store.get_gate.open()
        while seq in ranks.ranks[0].requests:
            await ranks.step()
            assert len({(hit.agreed, hit.settled) for hit in hits}) == 1
        assert hits[1].settled


async def test_a_clock_that_misses_steps_tells_who_waits_and_settles_nothing(mode):
    limits = Limits(step_s=0.02, close_s=5.0)
    async with team(2, stores=gated, limits=limits, **mode) as ranks:
        seq = await ranks.open(A)
        await ranks.restore_nowait(seq, deadline_s=0.01)
        hits = [rank.hits[seq] for rank in ranks.ranks]
        with pytest.raises(RankError, match="no step"):
            await hits[0].wait()
        assert not hits[0].settled
        assert not hits[0].agreed
        assert await ranks.settle(seq) == 0
        # By now it has, and is as good as any.
        assert [(await hit.wait()).num_tokens for hit in hits] == [0, 0]
        await ranks.end(seq)


async def test_what_was_refused_on_every_rank_does_not_wait_to_be_admitted(mode):
    limits = Limits(requests=1, close_s=5.0)
    async with team(2, limits=limits, **mode) as ranks:
        first = await ranks.open(A)
        prompts = [ranks.ranks[0].cache.prompt(B)]

        def refused(rank):
            [request] = rank.cache.admit(prompts)
            with pytest.raises(TooManyRequestsError), request:
                pass
            return rank.cache.waiting()

        assert await ranks.everywhere(refused) == [[], []]
        await ranks.end(first)


class SlowToClose(MemoryStore):
    """Is closed once the test lets it."""

    def __init__(self) -> None:
        super().__init__(2**24)
        self.gate = Gate()

    async def aclose(self) -> None:
        await self.gate.pass_through()


async def test_a_detach_that_is_called_again_to_wait_on_is_no_second_call(mode):
    """The other rank, whose store was fast, makes one call too."""

    async def store(rank: int, num_ranks: int) -> MemoryStore:
        return MemoryStore(2**24) if rank else SlowToClose()

    limits = Limits(close_s=0.02)
    async with team(2, stores=store, limits=limits, **mode) as ranks:
        slow, fast = ranks.ranks
        await fast.do(lambda rank: rank.cache.detach())
        with pytest.raises(OrderError, match="did not close"):
            await slow.do(lambda rank: rank.cache.detach())
        slow.store.gate.open()
        await slow.do(lambda rank: rank.cache.detach())
        ranks.check()
        assert await ranks.serve(A) == 0


async def test_what_is_said_of_no_request_is_not_kept(mode):
    """A rank without its scope has nothing against its end, which is a call's there."""
    async with team(2, **mode) as ranks:
        request = ranks.ranks[0].cache.request(A)
        with request:
            [seq] = await ranks.admit(ranks.ranks[0].cache.waiting())
            said = ranks.ranks[1].cache._runtime.driver._votes.said()
            assert said == ({seq} if mode["aborts"] == "vote" else set())
        await ranks.dismiss()
        await ranks.until(lambda: not ranks.ranks[0].requests, "it ends")


class Counted(LocalGroup):
    """Counts its calls."""

    num_calls = 0

    async def all_min(self, vector):
        self.num_calls += 1
        await super().all_min(vector)


async def test_ranks_that_differ_reduce_nothing_more_not_even_to_attach_a_store():
    joined: list[Counted] = []

    def join(num_ranks):
        joined[:] = Counted.of(num_ranks)
        return joined

    async with team(2, groups=join, barrier="pipelined", check=False) as ranks:
        await ranks.open(A)
        await ranks.ranks[1].do(lambda rank: rank.cache.reset())
        await ranks.everywhere(lambda rank: rank.cache.step())
        num_calls = [group.num_calls for group in joined]
        errors = await ranks.errors(lambda r: r.cache.attach(MemoryStore(2**24)))
        assert ["ranks differ" in str(error) for error in errors] == [True, True]
        assert [group.num_calls for group in joined] == num_calls
