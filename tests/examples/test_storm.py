"""The storm, small and without a clock: every wait is so many turns of the loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import anyio.lowlevel
import pytest

from asyncache import CpuDevice, FileStore, KVCache, MemoryStore, Store
from examples.storm.storm import Plan, State, Storm, Tally
from examples.storm.toy import LAYOUT, PAGE_TOKENS, Text, ToyModel, Work
from examples.storm.weather import WeatherStore

pytestmark = pytest.mark.slow
NUM_PAGES = 200
POISON = 0xA5


async def turns(seconds: float) -> None:
    """Wait a turn a millisecond, at least one."""
    for _ in range(int(1e3 * seconds) + 1):
        await anyio.lowlevel.checkpoint()


class TurnModel(ToyModel):
    """A model on the loop, which takes turns instead of time."""

    async def run(self, batch) -> None:
        self.read(batch)
        await turns(0.004)
        self.write(batch)


async def storm(seed: int, store: Store, num_requests=150) -> tuple[Tally, ToyModel]:
    """Run a small storm; raise unless nothing is left of it."""
    # It would note for each future where it was made, for half of the time.
    asyncio.get_running_loop().set_debug(False)
    device = CpuDevice(LAYOUT, num_pages=NUM_PAGES)
    pool = device.tensor("kv")
    pool.fill_(POISON)
    model = TurnModel(pool)
    slow = WeatherStore(store, dice=Random(seed), pause=turns)
    async with KVCache(LAYOUT, device=device, store=slow) as cache:
        storm = Storm(
            Plan(
                seed=seed,
                num_requests=num_requests,
                num_at_once=24,
                answer_tokens=24,
            ),
            cache,
            model,
            num_pages=NUM_PAGES,
            pause=turns,
            on_end=cache.check_invariants,
        )
        await storm.run()
        assert await cache.drain() == 0
        cache.check_invariants()
        statistics = cache.statistics()
        assert statistics.leaked_pages == 0
        pages = statistics.replica.pools["kv"]
        assert pages.free + pages.tree == NUM_PAGES
        assert statistics.replica.num_open == statistics.replica.promised_pages == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    counters, tally = statistics.counters, storm.tally
    assert (counters.closed, counters.aborted) == (tally.served, tally.aborted.total())
    assert tally.num_ended == num_requests
    # One may be served before its cancellation comes; the last may find nobody left.
    assert -5 <= tally.aborted.total() - num_requests // 2 <= 0
    return tally, model


@pytest.mark.parametrize("seed", range(4))
async def test_after_a_storm_no_page_is_lost_and_no_byte_was_wrong(seed):
    tally, model = await storm(seed, MemoryStore(2**28))
    assert model.read_bytes > 2**20
    assert model.wrong_bytes == 0
    # It was one: requests were cancelled wherever they can be, and pages ran out.
    assert len(tally.aborted) >= len(State) - 1
    assert tally.by_scope
    assert tally.by_task
    assert tally.out_of_pages


async def test_nor_over_files(tmp_path: Path):
    _, model = await storm(0, FileStore(tmp_path))
    assert model.wrong_bytes == 0


async def test_nor_over_a_store_that_is_too_small():
    _, model = await storm(0, MemoryStore(2**18))
    assert model.wrong_bytes == 0


async def test_the_same_seed_brings_the_same_storm():
    first, _ = await storm(0, MemoryStore(2**28), num_requests=60)
    again, _ = await storm(0, MemoryStore(2**28), num_requests=60)
    assert first == again


def test_the_model_sees_each_byte_that_is_wrong():
    pool = CpuDevice(LAYOUT, num_pages=4).tensor("kv")
    model, text = ToyModel(pool), Text(range(2 * PAGE_TOKENS + 3))
    pages = (3, 1, 2)
    model.forward([Work(pages, num_read=0, start=0, digests=text.digests)])
    reading = Work(pages, num_read=len(text), start=len(text), digests=text.digests)
    model.forward([reading])
    assert (model.read_bytes, model.wrong_bytes) == (len(text) * 256, 0)
    pool[1, 2, 1, 5, 0, 7] += 1
    model.forward([reading])
    assert model.wrong_bytes == 1
    # Of other tokens, be it by one long ago, all bytes are wrong, save by chance.
    model.wrong_bytes = 0
    other = Text([1, *range(1, 2 * PAGE_TOKENS + 3)]).digests
    model.forward([Work(pages, num_read=len(other), start=len(other), digests=other)])
    assert model.wrong_bytes > 0.98 * len(other) * 256
