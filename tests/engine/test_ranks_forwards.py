"""Forwards of several ranks: what they hold, and when all agree that they are over."""

from __future__ import annotations

import pytest

from tests.engine.scene import PAGE
from tests.engine.stories import BY_MODE, LONG, A, B, C, having
from tests.engine.team import Rank, team

pytestmark = pytest.mark.anyio
each_mode = pytest.mark.parametrize("mode", **BY_MODE)


@each_mode
@pytest.mark.parametrize("ends", ["closes", "aborts", "suspends", "reset"])
async def test_what_a_finished_forward_pinned_is_free_after_a_step(mode, ends):
    """With ``aborts="call"`` nothing else is voted on: the pins of the forward would
    have stayed, and no room been found however often the loop stepped."""
    short, long = list(range(4 * PAGE)), list(range(500, 500 + 8 * PAGE))
    async with team(2, num_pages=8, **mode) as ranks:
        seq = await ranks.open(short)
        await ranks.call(seq, "extend", len(short))

        def run(rank: Rank) -> None:
            with rank.cache.forward([rank.requests[seq]]):
                rank.compute(rank.requests[seq], short)
                rank.requests[seq].commit(len(short))

        await ranks.everywhere(run)
        if ends == "suspends":
            await ranks.call(seq, "suspend")
        elif ends == "reset":
            await ranks.everywhere(lambda rank: rank.cache.reset())
        if ends != "suspends":
            await ranks.everywhere(
                lambda r: r.requests[seq]._finish(aborted=ends == "aborts")
            )
            await ranks.dismiss()
        for _ in range(3):
            await ranks.step()
        other = await ranks.open(long)
        assert await ranks.call(other, "extend", len(long)) == 8
        await ranks.end(other)
        if ends == "suspends":
            await ranks.end(seq)


@pytest.mark.parametrize("barrier", ["sync", "pipelined"])
async def test_a_decode_costs_no_collective_where_calls_end_requests(barrier):
    """F19: what its forwards pin, its request pins too, so nobody waits for them."""
    async with team(2, barrier=barrier, aborts="call") as ranks:
        seq = await ranks.begin(A)
        await ranks.settle(seq)
        await ranks.compute(seq, A)
        tokens = list(A)
        group, before = ranks.ranks[0].cache._group, None
        for token in range(3 * PAGE):
            await ranks.step()
            before = group._num_calls if before is None else before
            tokens.append(token)
            await ranks.call(seq, "append", [token])

            def decode(rank: Rank) -> None:
                request = rank.requests[seq]
                request.extend(len(tokens))
                with rank.cache.forward([request]):
                    rank.compute(request, tokens)
                request.commit(len(tokens))

            await ranks.everywhere(decode)
        assert group._num_calls == before
        await ranks.end(seq)


@each_mode
async def test_one_rank_that_is_observed_decides_as_the_others(mode):
    """An observer is no setting of all ranks: being told of pages changes nothing."""
    async with team(2, stores=having(A), num_pages=12, **mode) as ranks:
        ranks.ranks[1].replica._state.news.is_told = False
        for tokens in (A, B, C, LONG):
            await ranks.serve(tokens)
        told, untold = (len(rank.log.events) for rank in ranks.ranks)
        assert told > untold
