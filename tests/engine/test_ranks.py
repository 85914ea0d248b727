"""Several ranks: the same calls in the same gaps, and equal replicas."""

from __future__ import annotations

import pytest

from tests.engine.scene import PAGE, prompt
from tests.engine.team import MODES, stored, team

pytestmark = pytest.mark.anyio
A, B = prompt(4, seed=1), prompt(4, seed=2)


@pytest.fixture(params=[1, 2, 4])
def num_ranks(request) -> int:
    return request.param


@pytest.fixture(params=MODES, ids=lambda mode: "-".join(mode.values()))
def mode(request) -> dict[str, str]:
    return request.param


def having(*prompts):
    async def store(rank: int, num_ranks: int):
        return await stored(rank, num_ranks, *prompts)

    return store


async def test_a_prompt_is_loaded_computed_and_stored_on_every_rank(num_ranks, mode):
    async with team(num_ranks, stores=having(A), **mode) as ranks:
        assert await ranks.serve(A) == 4 * PAGE
        assert await ranks.serve(B) == 0
        await ranks.drain()
        assert await ranks.serve(B) == 4 * PAGE
