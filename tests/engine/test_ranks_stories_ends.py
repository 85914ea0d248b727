"""Resets, detaches, closes and aborts of several ranks: who has stopped, and who not.

Scenario S9 of ``research/sglang.md``, the cases of ``research/review.md`` §B on aborts
and calls, and upstream's "attachment", "reset and close quiet before pins drop" and
"common verdict".
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import anyio
import pytest

from asyncache.core import AbortedError, OrderError, RankError
from asyncache.stores import MemoryStore
from asyncache.testing import GateStore
from tests.engine.scene import PAGE, StubbornStore, prompt, snapshot, turns
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
    gated,
    gone,
    having,
    pool,
    release,
    writing,
)
from tests.engine.team import LIMITS, Rank, Team, stored, team

pytestmark = pytest.mark.anyio
each_mode = pytest.mark.parametrize("mode", **BY_MODE)


async def stubborn(rank: int, num_ranks: int) -> StubbornStore:
    """Return a store whose reads go on to their end, whatever is cancelled."""
    return StubbornStore(await stored(rank, num_ranks, A, B))


class StubbornWriter(GateStore):
    """Writes to the end, whatever becomes of the caller: as a thread does."""

    async def put(self, keys, sources):
        with anyio.CancelScope(shield=True):
            return await super().put(keys, sources)


async def writer(rank: int, num_ranks: int) -> StubbornWriter:
    return StubbornWriter(MemoryStore(2**24))


async def reading(ranks: Team, tokens=A) -> int:
    """Begin a load, and step until every rank reads."""
    seq = await ranks.begin(tokens)
    await agreed(ranks, seq)
    for rank in ranks.ranks:
        await arrived(rank.store.get_gate)
    return seq


@each_mode
@pytest.mark.parametrize("revision", [None, "v2"])
async def test_a_reset_returns_at_once_while_one_rank_still_reads(mode, revision):
    """S9: the memory waits in quarantine for the slowest rank, and no late byte is
    anyone's."""
    async with team(2, stores=stubborn, **mode) as ranks:
        release(ranks, "contains", "put")
        seq = await reading(ranks)
        await ranks.everywhere(lambda rank: rank.cache.reset(revision=revision))
        assert await ranks.settle(seq) == 0
        assert pool(ranks).quarantine == 4
        first, second = ranks.ranks
        first.store.get_gate.open()
        for _ in range(4):
            await ranks.step()
            await turns(2)
        assert pool(ranks).quarantine == 4
        before = snapshot(second.device)
        other = await ranks.begin(C)
        assert await ranks.settle(other) == 0
        taken = await ranks.everywhere(lambda r: r.requests[other].extend(len(C)))
        assert taken == [5, 5]
        mine = set(second.requests[other].page_table["kv"])
        second.store.get_gate.open()
        await ranks.until(lambda: not pool(ranks).quarantine, "it is quiet")
        after = snapshot(second.device)
        assert [before[page] for page in mine] == [after[page] for page in mine]
        await ranks.end(other, aborted=True)
        await ranks.end(seq, aborted=True)


@each_mode
async def test_what_is_stored_is_found_after_a_reset_unless_the_weights_are_others(
    mode,
):
    """S9, F30: the same calls on every rank, and generations keep completions apart."""
    async with team(2, stores=having(A), **mode) as ranks:
        assert await ranks.serve(A) == 4 * PAGE
        await ranks.everywhere(lambda rank: rank.cache.reset())
        found = await ranks.everywhere(lambda rank: rank.cache.match_nowait(A))
        assert found == [0, 0]
        assert await ranks.serve(A) == 4 * PAGE
        await ranks.everywhere(lambda rank: rank.cache.reset(revision="v2"))
        seq = await ranks.begin(A)
        assert await ranks.settle(seq) == 0
        await ranks.end(seq)


@each_mode
async def test_a_reset_under_an_offload_drops_no_pin_before_all_are_quiet(mode):
    """Upstream "reset quiet before pins drop": one rank still writes what it reads."""
    async with team(2, stores=writer, num_pages=8, **mode) as ranks:
        release(ranks, "contains", "get")
        await ranks.serve(A)
        await writing(ranks)
        await ranks.everywhere(lambda rank: rank.cache.reset())
        assert pool(ranks).free == 4
        seq = await ranks.begin(B[: 4 * PAGE + 1] + [1] * PAGE)
        ranks.ranks[0].store.put_gate.open()
        for _ in range(4):
            await ranks.step()
            await turns(2)
        assert pool(ranks).free == 4
        assert not ranks.ranks[0].hits[seq].agreed
        release(ranks, "put")
        assert await ranks.settle(seq) == 0
        await ranks.end(seq)
        assert pool(ranks).free == 8
        # It ended without a trace: what the store has of it is nobody's belief.
        assert ranks.ranks[0].cache.statistics().counters.stored_pages == 0


@each_mode
async def test_a_store_that_goes_while_one_rank_reads_takes_its_pages_along(mode):
    """Upstream "attachment": detached on all ranks, without a trace, and attached
    again, empty, to be filled with what is resident."""
    async with team(2, stores=gated(A), **mode) as ranks:
        release(ranks, "contains", "put")
        assert await ranks.serve(B) == 0
        await ranks.drain()
        seq = await reading(ranks)
        ranks.ranks[1].store.get_gate.open()
        await turns(5)
        await ranks.everywhere(lambda rank: rank.cache.detach())
        assert await ranks.settle(seq) == 0
        await ranks.compute(seq, A)
        await ranks.end(seq)
        stores = [MemoryStore(2**24) for _ in ranks.ranks]
        await ranks.everywhere(lambda rank: rank.cache.attach(stores[rank.number]))
        await ranks.drain()
        assert [len(store._pages) for store in stores] == [8, 8]


@each_mode
async def test_a_close_on_one_rank_waits_for_what_it_reads_and_no_longer(mode):
    """Upstream "close quiet before pins drop", S9: the pages stay taken for as long as
    something may write them, and the others have their error meanwhile."""
    limits = replace(LIMITS, close_s=0.05)
    async with team(2, stores=stubborn, limits=limits, check=False, **mode) as ranks:
        release(ranks, "contains", "put")
        await reading(ranks)
        first, second = ranks.ranks
        with anyio.fail_after(10), pytest.raises(OrderError, match="did not stop"):
            await first.cache.aclose()
        pages = first.cache.statistics().replica.pools["kv"]
        assert pages.transit + pages.quarantine == 4
        errors = []
        while not errors:
            errors = await ranks.errors(
                lambda r: r.cache.step() if r is second else None
            )
        assert [type(error) for error in errors] == [RankError]
        release(ranks, "get")
        for rank in ranks.ranks:
            with anyio.fail_after(10):
                await rank.cache.aclose()
            assert rank.cache.statistics().transfers == 0


# Aborts.


@each_mode
@pytest.mark.parametrize("num_ranks", [2, 4])
async def test_every_rank_ends_a_request_in_the_same_step_whoever_gave_up(
    num_ranks, mode
):
    """Upstream "common verdict", B04 "all ranks abort the same", §B "close vs abort":
    one handler ends well, and a rank without one has no objection."""
    async with team(num_ranks, num_pages=32, **mode) as ranks:
        last = ranks.ranks[-1]
        good = ranks.ranks[0].cache.request(A)
        bad = last.cache.request(B)
        with suppress(EOFError), good, bad:
            prompts = [p for rank in ranks.ranks for p in rank.cache.waiting()]
            seqs = await ranks.admit(prompts)
            for seq, tokens in zip(seqs, (A, B), strict=True):
                await ranks.restore_nowait(seq)
                await ranks.settle(seq)
                await ranks.compute(seq, tokens)
            bad._finish(aborted=True)
        await ranks.dismiss()
        closed, aborted = [], []
        while len(closed) + len(aborted) < 2:
            if mode["aborts"] == "call":
                break
            report = await ranks.step()
            closed += [r._state.seq for r in report.closed]
            aborted += [r._state.seq for r in report.aborted]
        if mode["aborts"] == "vote":
            assert (closed, aborted) == ([seqs[0]], [seqs[1]])
        with pytest.raises(AbortedError):
            bad.extend(1)
        assert not good.is_open
        assert not ranks.ranks[0].replica.look.stages()


@each_mode
async def test_pages_of_an_aborted_request_wait_for_the_slowest_ranks_forward(mode):
    """F2, B49, §B "abort on one rank": its model still writes there."""
    async with team(2, num_pages=10, **mode) as ranks:
        with suppress(EOFError), ranks.ranks[0].cache.request(A):
            [seq] = await ranks.admit(ranks.ranks[0].cache.waiting())
            await ranks.restore_nowait(seq)
            await ranks.settle(seq)
            await ranks.call(seq, "extend", len(A))
            bracket = {}
            for rank in ranks.ranks:
                request = rank.requests[seq]
                bracket[rank.number] = rank.cache.forward([request])
                await rank.do(lambda r: bracket[r.number].__enter__())
            raise EOFError
        await gone(ranks, seq)
        assert pool(ranks).quarantine == 5
        await ranks.ranks[0].do(lambda r: bracket[0].__exit__(None, None, None))
        for _ in range(3):
            await ranks.step()
        assert pool(ranks).quarantine == 5
        other = await ranks.begin(prompt(6, seed=7))
        for _ in range(3):
            await ranks.step()
        assert not ranks.ranks[0].hits[other].agreed
        await ranks.ranks[1].do(lambda r: bracket[1].__exit__(None, None, None))
        assert await ranks.settle(other) == 0
        await ranks.end(other)


@each_mode
async def test_a_commit_over_a_load_outlives_its_scope_on_every_rank(mode):
    """F5: the scope has ended well, and what it computed is shared once the slowest
    rank's bytes are there; emission would have waited for ``settled``."""
    async with team(2, stores=gated(A), devices=far_away(1), **mode) as ranks:
        release(ranks, "contains", "get", "put")
        seq = await begin_over(ranks, LONG)
        await arrived(ranks.ranks[1].device.write_gate)
        settled = [rank.requests[seq].settled for rank in ranks.ranks]
        assert settled == [False, False]

        def leave(rank: Rank) -> None:
            rank.requests[seq]._finish(aborted=False)

        await ranks.everywhere(leave)
        await ranks.dismiss()
        for _ in range(4):
            await ranks.step()
        found = await ranks.everywhere(lambda r: r.cache.match_nowait(LONG))
        assert found == [0, 0]
        ranks.ranks[1].device.write_gate.open()
        await ranks.until(lambda: seq not in ranks.ranks[0].requests, "it ends")
        await ranks.drain()
        assert everywhere_stored(ranks, LONG) == [[True] * 6] * 2
        assert await ranks.serve(LONG) == 6 * PAGE


@each_mode
async def test_a_launch_is_one_batch_on_every_rank(mode):
    """§B "launch()": started loads are all ranks' or none's, and its gates open."""
    stores = gated(A, B)
    async with team(2, stores=stores, launch="batch", num_pages=32, **mode) as ranks:
        release(ranks, "contains", "put")
        seqs = [await ranks.begin(tokens) for tokens in (A, B)]
        for seq in seqs:
            await agreed(ranks, seq)
        for _ in range(3):
            await ranks.step()
        assert [rank.store.get_gate.num_arrived for rank in ranks.ranks] == [0, 0]
        batches = await ranks.everywhere(lambda rank: rank.cache.launch())
        assert [batch.num_loads for batch in batches] == [2, 2]
        release(ranks, "get")
        for batch in batches:
            with anyio.fail_after(20):
                await batch.gates.wait(1)
        assert [await ranks.settle(seq) for seq in seqs] == [4 * PAGE] * 2
        for seq, tokens in zip(seqs, (A, B), strict=True):
            await ranks.compute(seq, tokens)
            await ranks.end(seq)


async def test_looking_at_one_rank_changes_nothing_for_the_others():
    """§B "eviction, recency", F29: only calls and verdicts tick."""
    async with team(2, num_pages=12) as ranks:
        for tokens in (A, B):
            await ranks.serve(tokens)
        cache = ranks.ranks[1].cache
        for _ in range(5):
            assert cache.match_nowait(A) == 4 * PAGE
            cache.statistics()
            repr(cache)
            cache.check_invariants()
        # The older one is evicted on both, however often it was looked at on one.
        await ranks.serve(C)
        found = [[r.cache.match_nowait(t) for t in (A, B, C)] for r in ranks.ranks]
        assert found[0] == found[1]
        assert found[0][0] < 4 * PAGE


async def test_a_gate_store_of_one_rank_holds_no_other_ranks_gates():
    """Gates are local: each rank's forward goes on with its own bytes."""

    async def store(rank: int, num_ranks: int) -> GateStore:
        inner = GateStore(await stored(rank, num_ranks, A), is_open=True)
        if rank:
            inner.get_gate.close()
        return inner

    async with team(2, stores=store) as ranks:
        seq = await ranks.begin(A)
        await agreed(ranks, seq)
        first, second = ranks.ranks
        with anyio.fail_after(20):
            await first.hits[seq].gates.wait(1)
        await arrived(second.store.get_gate)
        assert not second.hits[seq].gates.is_open(1)
        assert not first.hits[seq].settled
        second.store.get_gate.open()
        assert await ranks.settle(seq) == 4 * PAGE
        await ranks.end(seq)
