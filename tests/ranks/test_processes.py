"""Ranks in processes of their own: one dies, stops, leaves, or is cancelled."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyncache.core import ClosedError, RankError
from asyncache.testing import check_group
from tests.ranks.processes import make_group, processes
from tests.ranks.rounds import minimum, play

pytestmark = pytest.mark.slow  # the first process loads torch

ROOT = Path(__file__).parents[2]
# Nothing here takes as long unless it hangs.
PATIENCE_S = 20.0
LONG_S, SHORT_S = 60.0, 0.5


@asynccontextmanager
async def ranks(num_ranks, folder, *, timeout_s=LONG_S):
    async with asyncio.timeout(PATIENCE_S), processes(num_ranks, folder) as groups:
        await make_group(groups, timeout_s=timeout_s)
        yield groups


async def have_begun(groups):
    """Return once the processes have taken up what they were told before."""
    await asyncio.sleep(0)  # the calls that were started here
    await asyncio.gather(*(group.tell("turn") for group in groups))


def assert_over(outcomes):
    assert [type(outcome) for outcome in outcomes] == [RankError] * len(outcomes)


@pytest.mark.parametrize("num_ranks", [2, 3])
async def test_the_kit_passes(num_ranks, tmp_path):
    async with processes(num_ranks, tmp_path) as groups:

        @asynccontextmanager
        async def make():
            await make_group(groups, timeout_s=SHORT_S)
            try:
                yield groups
            finally:
                await asyncio.gather(*(group.aclose() for group in groups))

        await check_group(make, patience_s=PATIENCE_S)


@pytest.mark.parametrize("num_ranks", [2, 3])
async def test_a_rank_that_is_killed_is_missed_at_once(num_ranks, tmp_path):
    async with ranks(num_ranks, tmp_path) as (victim, *others):
        assert await play([victim, *others], *[[1]] * num_ranks) == [[1]] * num_ranks
        calls = [asyncio.create_task(minimum(other, 1)) for other in others]
        await have_begun(others)
        victim.signal(signal.SIGKILL)
        assert_over(await asyncio.gather(*calls, return_exceptions=True))
        assert_over(await play(others, *[[1]] * len(others)))


async def test_a_rank_that_stops_is_waited_for_no_longer_than_was_said(tmp_path):
    async with ranks(3, tmp_path, timeout_s=SHORT_S) as groups:
        groups[1].signal(signal.SIGSTOP)
        assert_over(await play([groups[0], groups[2]], [1], [2]))
        groups[1].signal(signal.SIGCONT)
        assert_over(await play(groups, [1], [2], [3]))


async def test_unequal_lengths_are_refused_and_no_process_aborts(tmp_path):
    async with ranks(2, tmp_path) as groups:
        outcomes = await play(groups, [1] * 4368, [2] * 2832)
        assert list(map(str, outcomes)) == [
            "this rank sent 4368 items, others 2832 to 4368",
            "this rank sent 2832 items, others 2832 to 4368",
        ]
        assert_over(await play(groups, [1], [1]))
        assert all(group.process.is_alive() for group in groups)


async def test_a_cancelled_call_has_been_its_part(tmp_path):
    async with ranks(2, tmp_path) as (victim, other):
        cancelled = asyncio.create_task(minimum(victim, 0, 9))
        await have_begun([victim])
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        later = asyncio.create_task(minimum(victim, 6))
        assert await minimum(other, 1, 1) == [0, 1]
        assert await minimum(other, 7) == await later == [6]


async def test_a_rank_leaves_while_its_own_call_and_the_others_wait(tmp_path):
    async with ranks(3, tmp_path, timeout_s=SHORT_S) as groups:
        waiting = [asyncio.create_task(minimum(group, 1)) for group in groups[:2]]
        await have_begun(groups)
        await groups[0].aclose()
        with pytest.raises(ClosedError, match="rank 0 has left its group"):
            await waiting[0]
        with pytest.raises(RankError):
            await waiting[1]
        assert_over(await play(groups[1:], [1], [1]))


async def test_replicas_do_not_meet_each_other_and_may_be_made_again(tmp_path):
    async with asyncio.timeout(PATIENCE_S), processes(4, tmp_path) as groups:
        replicas = {(0, 1): groups[:2], (2, 3): groups[2:]}
        for _ in range(3):
            for members, replica in replicas.items():
                await make_group(replica, ranks=members, timeout_s=LONG_S)
            outcomes = await play(groups, *[[place] for place in range(4)])
            assert outcomes == [[0], [0], [2], [2]]
            assert [group.rank for group in groups] == [0, 1, 0, 1]
            await asyncio.gather(*(group.aclose() for group in groups))
        await make_group(groups, timeout_s=LONG_S)
        assert await play(groups, [3], [2], [1], [0]) == [[0]] * 4


async def test_who_does_not_come_is_named(tmp_path):
    async with asyncio.timeout(PATIENCE_S), processes(3, tmp_path) as groups:
        missed = r"ranks \[0, 2\] did not meet within 0.1 s, \[2\] are missing"
        with pytest.raises(RankError, match=missed):
            await groups[0].make([2, 0], 0.1)


async def test_the_owner_may_destroy_all_process_groups_first(tmp_path):
    async with ranks(2, tmp_path) as groups:
        await asyncio.gather(*(group.tell("destroy_all_groups") for group in groups))
        assert await play(groups, [1], [2]) == [[1], [1]]
        await asyncio.gather(*(group.aclose() for group in groups))


OPEN_AT_EXIT = """
import array, asyncio, sys
import anyio, torch.distributed as dist
from asyncache.ranks import TorchGroup

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2
)
group = TorchGroup(timeout_s=0.5)

async def main():
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.all_min, array.array("i", [1]))
            await anyio.lowlevel.checkpoint()
            scope.cancel()

if rank == 0:
    asyncio.run(main())  # and ends while its thread waits for rank 1
else:
    sys.stdin.read()  # until rank 0 has ended; and ends with an idle thread
"""


def test_a_group_that_is_never_closed_keeps_no_process_and_crashes_none(tmp_path):
    command = [sys.executable, "-c", OPEN_AT_EXIT]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([*command, str(rank), f"{tmp_path}/store"], cwd=ROOT, **pipes)
        for rank in range(2)
    ]
    try:
        for process in started:
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode, errors) == (0, "")
    finally:
        for process in started:
            process.kill()
            process.communicate()
