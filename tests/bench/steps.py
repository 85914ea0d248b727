"""What a step costs, and the signals between transfers, forwards and scopes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, Literal

from asyncache.core import PageState
from asyncache.devices import CpuDevice
from asyncache.engine import KVCache, Request
from asyncache.engine._gates import Board, Gates
from asyncache.engine._queues import OneLoop
from asyncache.ranks import LocalGroup
from asyncache.stores import MemoryStore
from tests.bench import inputs
from tests.bench.measure import Row, Stopwatch, interleave
from tests.bench.peers import sglang_layer_counter

NUM_OPEN = 64
STEPS = 500
LAYERS, REQUESTS = 61, 32


def run(num_rounds: int) -> Iterator[Row]:
    """Step with open requests, signal layers, and cancel what is queued."""
    yield asyncio.run(_step_alone(num_rounds))
    yield asyncio.run(_step_of_group("sync", num_rounds))
    yield asyncio.run(_step_of_group("pipelined", num_rounds, bound=100))
    yield from _signals(num_rounds)
    yield asyncio.run(_cancel(num_rounds))


async def _seconds_a_step(
    step: Callable[[], Awaitable[object]], num_rounds: int
) -> float:
    watches = []
    for _ in range(num_rounds):
        watches.append(watch := Stopwatch())
        with watch:
            for _ in range(STEPS):
                await step()
    return median(watch.seconds for watch in watches) / STEPS


async def _step_alone(num_rounds: int) -> Row:
    layout = inputs.layout()
    device = CpuDevice(layout, num_pages=2 * NUM_OPEN)
    async with KVCache(layout, device=device) as cache:
        with ExitStack() as scopes:
            for token in range(NUM_OPEN):
                scopes.enter_context(cache.request([token])).extend(1)
            seconds = await _seconds_a_step(cache.step, num_rounds)
    name = f"step(), {NUM_OPEN} open requests, one rank"
    return Row(name=name, ours=1e6 * seconds, bound=60)


async def _step_of_group(
    barrier: Literal["sync", "pipelined"],
    num_rounds: int,
    *,
    bound: float | None = None,
) -> Row:
    """Measure the whole barrier but for the wait: all of it is the loop's own time."""
    layout = inputs.layout()
    device = CpuDevice(layout, num_pages=2 * NUM_OPEN)
    [group] = LocalGroup.of(1)
    async with KVCache(layout, device=device, group=group, barrier=barrier) as cache:
        prompts = [cache.prompt([token]) for token in range(NUM_OPEN)]
        with ExitStack() as scopes:
            for request in cache.admit(prompts):
                scopes.enter_context(request).extend(1)
            seconds = await _seconds_a_step(cache.step, num_rounds)
    name = f"step(), {NUM_OPEN} open, {barrier} barrier, no other rank to wait for"
    return Row(name=name, ours=1e6 * seconds, bound=bound)


def _signals(num_rounds: int) -> Iterator[Row]:
    """Signal each layer of each load of a batch, and pass a gate a layer."""
    ours = partial(_our_signals, asyncio.run(_one_loop()))
    name = f"{LAYERS} layers x {REQUESTS} loads, signals alone"
    make = sglang_layer_counter()
    if make is None:
        [ours_s] = interleave(ours, num_rounds=num_rounds)
        yield Row(name=name, ours=1e6 * ours_s, against="SGLang: make bench-peers")
        return
    each, once = (partial(_their_signals, make, n) for n in (REQUESTS, 1))
    ours_s, each_s, once_s = interleave(ours, each, once, num_rounds=num_rounds)
    for against, seconds, bound in (
        ("SGLang LayerWiseLoadCounter, one a load", each_s, 0.25),
        ("the same, one for all loads at once", once_s, None),
    ):
        yield Row(
            name=name,
            ours=1e6 * ours_s,
            baseline=1e6 * seconds,
            against=against,
            bound=bound,
        )


async def _one_loop() -> OneLoop:
    return OneLoop()


def _our_signals(queues: OneLoop) -> float:
    board = Board(30.0, queues, lambda seq: None, lambda: None)
    loads = [board.progress(seq) for seq in range(REQUESTS)]
    gates = Gates(board, loads)
    with (watch := Stopwatch()):
        landings = [board.landing(seq) for seq in range(REQUESTS)]
        for layer in range(LAYERS):
            for landed in landings:
                landed(layer)
            gates.wait_blocking(layer)
    return watch.seconds


def _their_signals(make: Callable[[int], Any], num_counters: int) -> float:
    with (watch := Stopwatch()):
        counters = [make(LAYERS) for _ in range(num_counters)]
        for counter in counters:
            counter.set_consumer(counter.update_producer())
        for layer in range(LAYERS):
            for counter in counters:
                counter.complete(0, layer)
            for counter in counters:
                counter.wait_until(layer)
    return watch.seconds


async def _cancel(num_rounds: int) -> Row:
    """Cancel a restore whose load is queued, until its pages are free."""
    layout, store = inputs.layout(), MemoryStore(2**30)
    device = CpuDevice(layout, num_pages=256)
    tokens = list(range(64 * inputs.PAGE_TOKENS + 1))
    watches = []
    async with KVCache(layout, device=device, store=store, launch="batch") as cache:
        with cache.request(tokens) as request:
            request.extend(len(tokens))
            request.commit(len(tokens))
        await cache.drain()
        cache.reset()
        for _ in range(10 * num_rounds):
            watch = Stopwatch()
            with cache.request(tokens) as request:
                await request.restore()
                assert _in_transit(cache) == 64
                with watch:
                    _hang_up(request)
                    assert _in_transit(cache) == 0
            watches.append(watch)
    seconds = median(watch.seconds for watch in watches)
    name = "cancel of a queued load of 64 pages, until they are free"
    return Row(name=name, ours=1e6 * seconds, bound=100)


def _hang_up(request: Request) -> None:
    """Leave a scope as a cancellation does."""
    request.__exit__(asyncio.CancelledError, asyncio.CancelledError(), None)


def _in_transit(cache: KVCache) -> int:
    [ledger] = cache._runtime.replica._state.ledgers
    return ledger.count(PageState.TRANSIT)
