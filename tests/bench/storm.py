"""What a cache adds to the event loop's lag while requests come, and are cancelled."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from statistics import median

from asyncache.stores import MemoryStore
from examples.storm.__main__ import weather
from examples.storm.lag import quantile
from examples.storm.report import Outcome
from examples.storm.storm import Plan
from tests.bench.measure import Row

NUM_REQUESTS = 400
NUM_PAGES = 448
BOUND_MS = 10.0


def run(num_rounds: int) -> Iterator[Row]:
    """Run some short storms; take the one in the middle, part by part."""
    gc.collect()
    gc.freeze()  # as a server would, before it serves
    try:
        outcomes = [_storm(seed) for seed in range(min(num_rounds, 5))]
    finally:
        gc.unfreeze()
    late_ms, cache_ms, worked_ms = (
        median(
            1e3 * quantile([tick[part] for tick in o.lag.ticks], 0.99) for o in outcomes
        )
        for part in (1, 2, 3)
    )
    yield Row(
        name=f"loop lag in a storm of {NUM_REQUESTS}, p99, inside the cache",
        ours=cache_ms,
        unit="ms",
        against=f"{worked_ms:.1f} ms worked; {late_ms:.1f} ms of lag in all",
        bound=BOUND_MS,
    )


def _storm(seed: int) -> Outcome:
    plan = Plan(seed=seed, num_requests=NUM_REQUESTS)
    outcome = asyncio.run(
        weather(plan, MemoryStore(2**28), num_pages=NUM_PAGES, on_end=lambda: None)
    )
    assert not outcome.failures, outcome.failures
    return outcome
