"""Two ranks on two GPUs: what one of them loses, both do without, and nothing leaks."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from asyncache.core import DeviceError, RankError
from tests.cuda.rig import ILLEGAL_ADDRESS, Injection, gpu, model
from tests.engine.scene import PAGE, prompt
from tests.engine.team import MODES, shard, shard_keys, stored, team
from tests.softcuda import Direction

TOKENS, SHORT, NEW = prompt(3), prompt(2), prompt(3, seed=1)
PATIENCE_S = 20.0
MAX_RUNS = 100


@asynccontextmanager
async def ranks(softcuda, *, check=True, **arguments):
    """Open a cache on each of two GPUs, over stores that hold a prompt."""
    softcuda.set_devices(2)
    async with AsyncExitStack() as stack:
        devices = [
            await stack.enter_async_context(gpu(softcuda, ordinal=ordinal))
            for ordinal in range(2)
        ]
        view = await stack.enter_async_context(
            team(
                stores=lambda rank, num_ranks: stored(rank, num_ranks, TOKENS),
                devices=devices.__getitem__,
                check=check,
                **arguments,
            )
        )
        yield view


async def check_stores(view) -> None:
    """Raise if a page in a store is not its rank's shard."""
    for rank in view.ranks:
        for tokens in (TOKENS, NEW):
            names = shard_keys(rank.number, len(view), tokens)
            for position, name in enumerate(names):
                page = rank.store._pages.get(name)
                assert page in {None, shard(rank.number, tokens, position)}


@pytest.mark.asyncio(loop_factories=["asyncio"])  # many runs, each the same on both
@pytest.mark.parametrize("mode", MODES[::3], ids=str)
async def test_what_is_refused_to_one_rank_no_rank_takes_for_loaded(mode, softcuda):
    for nth in range(1, MAX_RUNS):
        async with ranks(softcuda, **mode) as view:
            await view.serve(SHORT)
            call = Injection(softcuda, "cuMemcpyBatchAsync", nth)
            call.refuse()
            hits = [await view.serve(tokens) for tokens in (TOKENS, NEW)]
            await view.drain()
            call.remove()
            assert hits[0] == (2 * PAGE if nth <= 2 else 3 * PAGE)
            assert hits[1] == 0
            assert await view.serve(TOKENS) == 3 * PAGE
            await check_stores(view)
        if not call.has_come:
            break
    assert 3 <= nth < MAX_RUNS


async def test_pages_of_one_rank_that_copies_are_in_quarantine_on_both(softcuda):
    async with ranks(softcuda) as view:
        with softcuda.gate(Direction.HOST_TO_DEVICE) as gate:
            seq = await view.begin(TOKENS)
            await view.until(lambda: gate.num_held == 2, "both copy")
            gate.let_pass()
            await view.end(seq, aborted=True)
            for rank in view.ranks:
                assert rank.cache.statistics().replica.pools["kv"].quarantine == 3
            gate.open()
            await view.until(lambda: quarantine(view) == [0, 0], "they go back")


def quarantine(view) -> list[int]:
    pools = [rank.cache.statistics().replica.pools["kv"] for rank in view.ranks]
    return [pool.quarantine for pool in pools]


async def test_a_forward_that_runs_on_one_rank_alone_keeps_pages_on_both(softcuda):
    async with ranks(softcuda) as view:
        shut = softcuda.gate(Direction.OTHER)
        with model(softcuda, ordinal=1) as stream, shut as gate:
            seq = await view.open(NEW)

            def forward(rank) -> None:
                request = rank.requests[seq]
                request.extend(len(NEW))
                handle = stream.stream if rank.number == 1 else None
                with rank.cache.forward([request], stream=handle):
                    if rank.number == 1:
                        page = request.page_table["kv"][0]
                        stream.write(rank.device.tensor("kv")[page], b"\xee" * 64)

            await view.everywhere(forward)
            await view.end(seq, aborted=True)
            assert quarantine(view) == [4, 4]
            gate.open()
            await view.until(lambda: quarantine(view) == [0, 0], "they go back")


async def step_on(rank) -> None:
    while True:
        await rank.cache.step()


@pytest.mark.parametrize("nth", [1, 2])
async def test_a_rank_that_lost_its_gpu_is_told_and_the_other_does_without(
    nth, softcuda
):
    async with ranks(softcuda, check=False) as view:
        softcuda.poison("cuMemcpyBatchAsync", ILLEGAL_ADDRESS, nth=nth)
        seq = await view.begin(TOKENS)
        assert await view.settle(seq) == 0
        [lost] = [rank for rank in view.ranks if rank.device.failure is not None]
        [other] = [rank for rank in view.ranks if rank is not lost]

        def forward(rank) -> None:
            rank.requests[seq].extend(len(TOKENS))
            with rank.cache.forward([rank.requests[seq]]):
                pass

        with pytest.raises(DeviceError, match=f"GPU {lost.number} is lost"):
            await lost.do(forward)
        await other.do(forward)
        await lost.do(lambda rank: rank.cache.aclose())
        with anyio.fail_after(PATIENCE_S), pytest.raises(RankError):
            await other.do(step_on)
        await other.do(lambda rank: rank.cache.aclose())
        for rank in view.ranks:
            pool = rank.cache.statistics().replica.pools["kv"]
            assert pool.transit == 0
