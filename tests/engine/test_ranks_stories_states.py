"""Recurrent states with several ranks: a prefix goes on where every rank has its state.

Scenario S1 of ``research/sglang.md`` and its reports B10, B25 and B26, for pools that
have a slot a boundary, beside a window and full attention.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from asyncache.core import PageKey, hash_pages, root_hash
from asyncache.stores import MemoryStore
from tests.engine.stories import BY_MODE, agreed, gone
from tests.engine.team import Rank, Team, team
from tests.engine.test_states import LAYOUT, PROMPT, Model, expected, make_device

pytestmark = pytest.mark.anyio
each_mode = pytest.mark.parametrize("mode", **BY_MODE)
LONGER = [*PROMPT, 5, 6]


async def empty(rank: int, num_ranks: int) -> MemoryStore:
    return MemoryStore(2**24)


def device(_: int):
    return make_device()


async def serve(ranks: Team, tokens, keep=()) -> int:
    """Restore, compute and commit; every rank has to answer as without a cache."""
    seq = await ranks.begin(tokens)
    num_hit = await ranks.settle(seq)
    await run(ranks, seq, tokens, keep)
    await ranks.end(seq)
    return num_hit


async def run(ranks: Team, seq: int, tokens, keep=()) -> None:
    def act(rank: Rank) -> float:
        request, start = rank.requests[seq], rank.hits[seq].num_tokens
        model = Model(rank.cache, rank.device)
        answer = model.run(request, tokens, start, len(tokens), keep)
        request.commit(len(tokens))
        return answer

    assert await ranks.everywhere(act) == [expected(tokens)] * len(ranks)


@each_mode
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
async def test_every_rank_goes_on_from_its_own_state(mode, num_ranks):
    async with team(num_ranks, devices=device, stores=empty, **mode) as ranks:
        assert await serve(ranks, PROMPT, {8, 16}) == 0
        assert await serve(ranks, LONGER) == 16
        assert await serve(ranks, [*PROMPT[:11], 5, 6]) == 8
        await ranks.drain()
        await ranks.everywhere(lambda rank: rank.cache.reset())
        assert await serve(ranks, LONGER) == 16


@each_mode
async def test_a_state_that_one_rank_lost_is_no_boundary_of_any(mode):
    """S1: the last state that all ranks have, not the least of the last ones."""
    async with team(2, devices=device, stores=empty, **mode) as ranks:
        assert await serve(ranks, PROMPT, {4, 8, 16}) == 0
        await ranks.drain()
        await ranks.everywhere(lambda rank: rank.cache.reset())
        for rank, boundary in zip(ranks.ranks, (16, 8), strict=True):
            await lose(rank, len(ranks), boundary)
        assert await serve(ranks, LONGER) == 4


async def lose(rank: Rank, num_ranks: int, boundary: int) -> None:
    """Take the state after so many tokens out of a rank's store."""
    space = LAYOUT.space(LAYOUT.pools[0], rank=rank.number, num_ranks=num_ranks)
    name = PageKey(hash_at(boundary), space)
    assert name in rank.store._pages
    await rank.store.remove([name])


def hash_at(boundary: int) -> bytes:
    packed = b"".join(token.to_bytes(4, "little") for token in PROMPT[:boundary])
    size = LAYOUT.page_tokens
    return hash_pages(packed, page_tokens=size, parent=root_hash(LAYOUT))[-1]


@each_mode
async def test_an_abort_on_one_rank_keeps_no_slot_on_any(mode):
    """B26: whoever goes, and at what moment, the slots are all there again."""
    async with team(2, devices=device, stores=empty, **mode) as ranks:
        assert await serve(ranks, PROMPT, {16}) == 0
        await ranks.drain()
        free = ranks.ranks[0].cache.statistics().replica.pools["state"].free
        for stage in ("opened", "agreed", "computed"):
            with suppress(EOFError), ranks.ranks[1].cache.request(LONGER):
                [seq] = await ranks.admit(ranks.ranks[1].cache.waiting())
                await ranks.restore_nowait(seq)
                if stage != "opened":
                    await agreed(ranks, seq)
                    await ranks.settle(seq)
                if stage == "computed":
                    await run(ranks, seq, LONGER)
                raise EOFError
            await gone(ranks, seq)
            await ranks.drain()
            pools = [rank.cache.statistics().replica.pools for rank in ranks.ranks]
            assert [own["state"].free for own in pools] == [free] * 2
        assert await serve(ranks, LONGER) == 16
