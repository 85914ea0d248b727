"""``python -m examples.storm``: an abort storm, and every byte checked.

Thousands of requests over branching prefixes share a pool that is too small and a store
that is slow and forgetful; half of them are cancelled at random moments. The exit
status is not zero if a page leaked, a byte was wrong, or a task was left.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from asyncache import CpuDevice, FileStore, KVCache, MemoryStore, Store
from examples.storm.lag import Lag, quantile
from examples.storm.report import Outcome, Sample, lag_table, plot, requests_table
from examples.storm.storm import Plan, Storm
from examples.storm.toy import LAYOUT, ToyModel
from examples.storm.weather import WeatherStore

POISON = 0xA5
SAMPLE_S = 0.01
STEP_S = 0.004


async def weather(
    plan: Plan, store: Store, *, num_pages: int, on_end: Callable[[], object]
) -> Outcome:
    """Run a storm and measure it; nothing of it is left when this returns."""
    samples: list[Sample] = []
    device, lag = CpuDevice(LAYOUT, num_pages=num_pages), Lag()
    pool = device.tensor("kv")
    pool.fill_(POISON)  # whoever reads what nobody wrote shall notice
    model = ToyModel(pool, step_s=STEP_S)
    slow = WeatherStore(store, dice=Random(plan.seed), pause=asyncio.sleep)
    async with KVCache(LAYOUT, device=device, store=slow) as cache:
        storm = Storm(plan, cache, model, num_pages=num_pages, on_end=on_end)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as watchers:
            watching = [
                watchers.create_task(lag.tick()),
                watchers.create_task(_sample(cache, samples)),
            ]
            with lag.watch():
                await storm.run()
            for task in watching:
                task.cancel()
        seconds = time.perf_counter() - began
        failures = await _settle(cache, num_pages)
    statistics = cache.statistics()
    counters = statistics.counters
    ended = (storm.tally.served, storm.tally.aborted.total())
    if (counters.closed, counters.aborted) != ended:
        failures.append(
            f"{ended} requests served and aborted, says the cache {counters}"
        )
    if model.wrong_bytes:
        failures.append(f"{model.wrong_bytes} of {model.read_bytes} bytes were wrong")
    if statistics.transfers or asyncio.all_tasks() != {asyncio.current_task()}:
        failures.append(f"{statistics.transfers} transfers or some tasks still run")
    return Outcome(
        seconds=seconds,
        tally=storm.tally,
        statistics=statistics,
        read_bytes=model.read_bytes,
        wrong_bytes=model.wrong_bytes,
        samples=samples,
        lag=lag,
        failures=failures,
    )


async def _sample(cache: KVCache, samples: list[Sample]) -> None:
    began = time.perf_counter()
    while True:
        replica = cache.statistics().replica
        samples.append(
            Sample(
                at_s=time.perf_counter() - began,
                pages=replica.pools["kv"],
                num_requests=replica.num_requests,
                num_waiting=replica.num_waiting,
            )
        )
        await asyncio.sleep(SAMPLE_S)


async def _settle(cache: KVCache, num_pages: int) -> list[str]:
    """Wait for offloads; return what is not as it must be when nobody is served."""
    failures = []
    if num_moving := await cache.drain():
        failures.append(f"{num_moving} transfers did not end")
    cache.check_invariants()
    statistics = cache.statistics()
    pages = statistics.replica.pools["kv"]
    if statistics.leaked_pages or pages.free + pages.tree != num_pages:
        failures.append(f"pages leaked: {pages} of {num_pages}")
    if statistics.replica.num_open or statistics.replica.promised_pages:
        failures.append(f"something is still open: {statistics.replica}")
    return failures


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="examples.storm", description=__doc__)
    parser.add_argument("--requests", type=int, default=2_000, help="in all")
    parser.add_argument("--at-once", type=int, default=64, help="in flight")
    parser.add_argument("--pages", type=int, default=448, help="of the pool")
    parser.add_argument("--seed", type=int, default=0, help="of all chance")
    parser.add_argument("--files", action="store_true", help="a store of files")
    parser.add_argument("--plot", type=Path, help="write a PNG (needs matplotlib)")
    return parser.parse_args()


def main() -> int:
    """Run a storm and print what came of it; return the exit status."""
    arguments, console = _parse(), Console()
    plan = Plan(
        seed=arguments.seed,
        num_requests=arguments.requests,
        num_at_once=arguments.at_once,
    )
    # One core computes; the other is for everything else.
    torch.set_num_threads(1)
    # What was imported lives for ever: the collector need not look at it again.
    gc.freeze()
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
    with tempfile.TemporaryDirectory(prefix="asyncache-storm-") as folder, bar:
        store = FileStore(folder) if arguments.files else MemoryStore(2**28)
        task = bar.add_task("storm", total=plan.num_requests)
        outcome = asyncio.run(
            weather(
                plan,
                store,
                num_pages=arguments.pages,
                on_end=lambda: bar.advance(task),
            )
        )
    console.print(requests_table(outcome), lag_table(outcome.lag))
    if arguments.plot is not None:
        plot(arguments.plot, outcome)
        console.print(f"pages over time: {arguments.plot}")
    for failure in outcome.failures:
        console.print(f"[red]{failure}")
    print(json.dumps(_summary(outcome)))
    return 1 if outcome.failures else 0


def _summary(outcome: Outcome) -> dict[str, object]:
    tally = outcome.tally
    _, lates, inside, worked = zip(*outcome.lag.ticks, strict=True)
    return {
        "seconds": round(outcome.seconds, 1),
        "served": tally.served,
        "aborted": {state.name: num for state, num in tally.aborted.items()},
        "refused": tally.refused,
        "wrong_bytes": outcome.wrong_bytes,
        "leaked_pages": outcome.statistics.leaked_pages,
        "lag_ms": _parts_ms(lates),
        "lag_inside_cache_ms": _parts_ms(inside),
        "lag_worked_in_cache_ms": _parts_ms(worked),
        "failures": outcome.failures,
    }


def _parts_ms(values_s: Sequence[float]) -> dict[str, float]:
    parts = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(1e3 * quantile(values_s, at), 2) for name, at in parts.items()}


if __name__ == "__main__":
    sys.exit(main())
