"""Loads of several ranks: what one of them lacks, none of them uses.

Scenarios S2, S3, S7, S8 and S16 of ``research/sglang.md``, the cases of
``research/review.md`` §B and §C on loads, and the stories of upstream's unit tests.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import anyio
import pytest

from asyncache.engine import StepReport
from asyncache.testing import Fault, FaultyStore, GateStore
from tests.engine.scene import PAGE, StubbornStore
from tests.engine.stories import (
    BY_MODE,
    LONG,
    A,
    B,
    C,
    agreed,
    arrived,
    begin_over,
    everywhere_stored,
    far_away,
    faulty,
    gated,
    gone,
    having,
    pages_of,
    pool,
    release,
)
from tests.engine.team import LIMITS, Rank, stored, team

pytestmark = pytest.mark.anyio
each_mode = pytest.mark.parametrize("mode", **BY_MODE)


@each_mode
@pytest.mark.parametrize("num_ranks", [2, 4])
async def test_what_one_rank_lost_is_short_at_once_and_quiet_when_all_are(
    num_ranks, mode
):
    """S3, B04, §B "failed here, pending there, DMA running", "abort chain".

    The request has computed over its load and committed: none of that enters the tree
    or a store, and the pages that are cut wait for the copy that still runs.
    """
    lost = faulty(num_ranks - 1, Fault.LOST, A, bad=pages_of(A, 2))
    async with team(num_ranks, stores=lost, devices=far_away(0), **mode) as ranks:
        seq = await begin_over(ranks, LONG)
        hits = [rank.hits[seq] for rank in ranks.ranks]
        await arrived(ranks.ranks[0].device.write_gate)
        reports: list[StepReport] = []
        while hits[0].num_tokens == 4 * PAGE:
            reports.append(await ranks.step(timeout_s=0.001))
        assert [hit.num_tokens for hit in hits] == [2 * PAGE] * num_ranks
        assert [r._state.seq for r in reports[-1].shortened] == [seq]
        assert not any(hit.settled for hit in hits)
        assert pool(ranks).quarantine == 2
        for _ in range(3):
            await ranks.step()
        assert pool(ranks).quarantine == 2
        ranks.ranks[0].device.write_gate.open()
        assert await ranks.settle(seq) == 2 * PAGE
        assert pool(ranks).quarantine == 0
        await ranks.drain()
        kept = everywhere_stored(ranks, LONG)
        assert [row[4:] for row in kept] == [[False, False]] * num_ranks
        ranks.ranks[-1].store.fault = None
        await ranks.compute(seq, LONG)
        await ranks.end(seq)
        await ranks.drain()
        assert everywhere_stored(ranks, LONG) == [[True] * 6] * num_ranks
        assert await ranks.serve(LONG) == 6 * PAGE


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.TORN, Fault.CORRUPT])
async def test_a_key_that_goes_between_lookup_and_load_costs_its_owner_alone(fault):
    """S8, B01: the other requests of the batch are unaffected."""
    stores = faulty(1, None, A, B, C, bad=pages_of(B, 0))
    async with team(2, stores=stores, num_pages=32) as ranks:
        seqs = [await ranks.begin(tokens) for tokens in (A, B, C)]
        # Contained it still is: only reads find it gone.
        ranks.ranks[1].store.fault = fault
        found = [await ranks.settle(seq) for seq in seqs]
        ranks.ranks[1].store.fault = None
        assert found == [4 * PAGE, 0, 4 * PAGE]
        for seq, tokens in zip(seqs, (A, B, C), strict=True):
            await ranks.compute(seq, tokens)
            await ranks.end(seq)
        assert await ranks.serve(B) == 4 * PAGE


@each_mode
@pytest.mark.parametrize("stage", ["contains", "get", "write"])
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_client_that_goes_in_the_middle_leaves_nothing(num_ranks, stage, mode):
    """S2, B26, §B "abort on one rank, finished on another": the last rank's transfer is
    over and the first's is held, or the other way round."""
    devices = far_away(0) if stage == "write" else None
    async with team(num_ranks, stores=gated(A), devices=devices, **mode) as ranks:
        first, last = ranks.ranks[0], ranks.ranks[-1]
        if stage == "write":
            release(ranks, "contains", "get", "put")
        elif stage == "get":
            release(ranks, "contains", "put")
        last.store.contains_gate.open()
        last.store.get_gate.open()
        if num_ranks == 1 and stage != "write":
            getattr(first.store, f"{stage}_gate").close()
        with suppress(EOFError), first.cache.request(A):
            [seq] = await ranks.admit(first.cache.waiting())
            await ranks.restore_nowait(seq)
            if stage != "contains":
                await agreed(ranks, seq)
            held = first.device if stage == "write" else first.store
            await arrived(getattr(held, f"{stage}_gate"))
            raise EOFError
        await gone(ranks, seq)
        assert pool(ranks).request == 0
        if stage == "write":
            # The copy that has begun goes on, and its pages wait for it.
            assert pool(ranks).quarantine == 4
            first.device.write_gate.open()
        await ranks.drain()
        assert pool(ranks).free == 16
        release(ranks, "contains", "get", "put")
        assert await ranks.serve(A) == 4 * PAGE


@each_mode
async def test_two_requests_for_one_prefix_make_one_transfer_on_every_rank(mode):
    """S7, B28, §C "interest": who leaves first, by whatever rank, hurts nobody."""
    async with team(2, stores=gated(A), **mode) as ranks:
        release(ranks, "contains", "put")
        stays = await ranks.begin(A)
        await agreed(ranks, stays)
        with suppress(EOFError), ranks.ranks[1].cache.request(LONG):
            [seq] = await ranks.admit(ranks.ranks[1].cache.waiting())
            await ranks.restore_nowait(seq)
            await agreed(ranks, seq)
            raise EOFError
        await gone(ranks, seq)
        release(ranks, "get")
        assert await ranks.settle(stays) == 4 * PAGE
        assert [r.store.get_gate.num_arrived for r in ranks.ranks] == [1, 1]
        await ranks.compute(stays, A)
        await ranks.end(stays)


@each_mode
async def test_the_deadline_of_one_waiter_on_one_rank_is_its_own(mode):
    """§C "one waiter's deadline", §B "deadlines": it sinks that wait, and no load."""
    async with team(2, stores=gated(A), **mode) as ranks:
        release(ranks, "contains", "put")
        patient, hasty = [await ranks.begin(tokens) for tokens in (A, LONG)]
        await agreed(ranks, patient)
        await agreed(ranks, hasty)
        runtime = ranks.ranks[1].cache._runtime
        state = ranks.ranks[1].requests[hasty]._state
        runtime._deadlines[hasty].cancel()
        runtime._deadline(state)
        assert await ranks.settle(hasty) == 0
        assert not ranks.ranks[0].hits[patient].settled
        release(ranks, "get")
        assert await ranks.settle(patient) == 4 * PAGE
        await ranks.compute(patient, A)
        await ranks.compute(hasty, LONG)
        await ranks.end(patient)
        await ranks.end(hasty)
        assert await ranks.serve(LONG) == 6 * PAGE


@each_mode
async def test_a_queued_load_that_is_cancelled_was_never_there(mode):
    """B03, upstream "cancel queued": exact rollback, though a longer prompt's load was
    to follow it, and one client goes on one rank only."""
    async with team(2, stores=gated(LONG), launch="batch", **mode) as ranks:
        release(ranks, "contains", "put")
        before = pool(ranks)
        with suppress(EOFError), ranks.ranks[1].cache.request(A):
            [short] = await ranks.admit(ranks.ranks[1].cache.waiting())
            await ranks.restore_nowait(short)
            await agreed(ranks, short)
            long = await ranks.begin(LONG)
            await agreed(ranks, long)
            assert pool(ranks).transit == 6
            raise EOFError
        await gone(ranks, short)
        # The other still stands on the first load, which nobody has started.
        assert pool(ranks).transit == 6
        await ranks.end(long, aborted=True)
        assert pool(ranks) == before
        assert ranks.ranks[0].cache.statistics().replica.num_nodes == 0
        assert [r.store.get_gate.num_arrived for r in ranks.ranks] == [0, 0]
        release(ranks, "get")
        seq = await ranks.begin(LONG)
        await agreed(ranks, seq)
        await ranks.everywhere(lambda rank: rank.cache.launch())
        assert await ranks.settle(seq) == 6 * PAGE
        await ranks.end(seq)


@each_mode
@pytest.mark.parametrize("lost", [None, 1, 3])
async def test_a_prefix_that_is_computed_while_it_loads_is_whole_in_the_end(mode, lost):
    """§C "B computes what A loads", "split of a LOADING node", upstream "rollback of
    split fragments": the fork splits what loads, and either part may fail."""
    fork = [*A[: 2 * PAGE], *range(9000, 9000 + 2 * PAGE + 1)]

    async def store(rank: int, num_ranks: int):
        inner = await stored(rank, num_ranks, A)
        bad = [] if lost is None or not rank else pages_of(A, lost)(rank, num_ranks)
        return GateStore(FaultyStore(inner, Fault.LOST, keys=bad))

    async with team(2, stores=store, **mode) as ranks:
        release(ranks, "contains", "put")
        loads = await ranks.begin(A)
        await agreed(ranks, loads)
        other = await ranks.open(fork)

        def compute(rank: Rank) -> int:
            request = rank.requests[other]
            request.extend(len(fork))
            with rank.cache.forward([request]):
                rank.compute(request, fork)
            return request.commit(len(fork))

        # What it shares stops at the first page that is still on its way.
        assert await ranks.everywhere(compute) == [0, 0]
        release(ranks, "get")
        hit = await ranks.settle(loads)
        assert hit == (4 if lost is None else lost) * PAGE
        await ranks.step()
        found = await ranks.everywhere(lambda r: r.cache.match_nowait(fork))
        assert found == [4 * PAGE] * 2
        await ranks.compute(loads, A)
        for seq in (loads, other):
            await ranks.end(seq)
        assert await ranks.serve(A) == 4 * PAGE
        assert await ranks.serve(fork) == 4 * PAGE


@each_mode
async def test_a_request_that_starts_over_is_not_served_by_its_first_attempt(mode):
    """S16, B51: the old load reads on to its end, into pages that nobody has."""

    async def store(rank: int, num_ranks: int):
        return StubbornStore(await stored(rank, num_ranks, A))

    async with team(2, stores=store, **mode) as ranks:
        release(ranks, "contains", "put")
        seq = await ranks.begin(A)
        await agreed(ranks, seq)
        for rank in ranks.ranks:
            await arrived(rank.store.get_gate)
        await ranks.call(seq, "suspend")
        old = {rank.number: rank.hits[seq] for rank in ranks.ranks}
        assert pool(ranks).quarantine == 4
        await ranks.restore_nowait(seq)
        await agreed(ranks, seq)
        assert pool(ranks).transit == 4
        for rank in ranks.ranks:
            await arrived(rank.store.get_gate, 2)
        release(ranks, "get")
        assert await ranks.settle(seq) == 4 * PAGE
        assert {hit.num_tokens for hit in old.values()} == {0}
        await ranks.compute(seq, A)
        await ranks.end(seq)


@each_mode
async def test_ranks_of_unequal_memory_use_the_same_prefix(mode):
    """S4, B16: room is what the smallest has, however much the others could take."""

    def device(rank: int):
        return far_away(num_pages=20 - 8 * rank)(rank)

    async with team(2, stores=having(A, B, C), devices=device, **mode) as ranks:
        assert pool(ranks).free == 12
        for tokens in (A, B, C, A):
            seq = await ranks.begin(tokens)
            assert await ranks.settle(seq) == 4 * PAGE
            await ranks.compute(seq, tokens)
            await ranks.end(seq)
        found = [[r.cache.match_nowait(t) for t in (A, B, C)] for r in ranks.ranks]
        assert found[0] == found[1]


@each_mode
async def test_lookups_that_end_at_different_steps_are_agreed_in_the_last_one(mode):
    """§B "lookups end at different steps": an answer is repeated at each step."""
    async with team(3, stores=gated(A), **mode) as ranks:
        release(ranks, "get", "put")
        seq = await ranks.begin(A)
        for rank in ranks.ranks:
            assert not ranks.ranks[0].hits[seq].agreed
            for _ in range(3):
                await ranks.step()
            await arrived(rank.store.contains_gate)
            rank.store.contains_gate.open()
        assert await ranks.settle(seq) == 4 * PAGE
        await ranks.end(seq)


@each_mode
async def test_more_loads_than_slots_take_their_turn_in_one_order(mode):
    """§B "more transactions than slots": in order, unstarted, on all ranks."""
    limits = replace(LIMITS, slots=2, offloads=1)
    stores = gated(A, B, C)
    async with team(2, stores=stores, limits=limits, num_pages=32, **mode) as ranks:
        release(ranks, "contains", "put")
        seqs = [await ranks.begin(tokens) for tokens in (A, B, C)]
        for seq in seqs:
            await agreed(ranks, seq)
        for rank in ranks.ranks:
            await arrived(rank.store.get_gate, 2)
        for _ in range(4):
            await ranks.step()
        assert [rank.store.get_gate.num_arrived for rank in ranks.ranks] == [2, 2]
        # The second rank finishes first: the places are free when both have.
        ranks.ranks[1].store.get_gate.open()
        await ranks.step()
        assert ranks.ranks[1].store.get_gate.num_arrived == 2
        release(ranks, "get")
        with anyio.fail_after(20):
            assert [await ranks.settle(seq) for seq in seqs] == [4 * PAGE] * 3
        for seq in seqs:
            await ranks.end(seq)
