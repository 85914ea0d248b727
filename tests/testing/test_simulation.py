"""The simulator: a seed is a run, its fakes keep their contracts, and it sees a lie."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import asynccontextmanager, suppress
from random import Random

import anyio
import pytest

from asyncache.core import ClosedError, DeviceError
from asyncache.stores import Status
from asyncache.testing import check_device, check_store
from asyncache.testing.simulation import (
    POISON,
    BusyError,
    LawError,
    Mishap,
    Shelf,
    SimulatedDevice,
    SimulatedLoop,
    SimulatedStore,
    StuckError,
    Weather,
    draw,
    run,
    simulate,
)
from tests.engine.scene import LAYOUT, content, keys, prompt
from tests.testing import fresh

SEEDS = range(12)


# A seed is a run.


def test_a_seed_makes_the_same_run_twice_in_one_process():
    first = [simulate(draw(seed), is_logged=True).log for seed in SEEDS]
    clutter = [object() for _ in range(10_000)]  # other addresses for all that follows
    del clutter[::2]
    gc.collect()
    second = [simulate(draw(seed), is_logged=True).log for seed in reversed(SEEDS)]
    assert first == second[::-1]
    assert min(map(len, first)) > 10


@pytest.mark.slow
def test_a_seed_makes_the_same_run_in_fresh_processes():
    assert len(fresh.outputs(12, 1)) == 1


def test_seeds_make_different_runs():
    logs = {tuple(simulate(draw(seed), is_logged=True).log) for seed in SEEDS}
    assert len(logs) == len(SEEDS)


# The loop.


async def sleepers(num_tasks: int = 8) -> list[int]:
    """Return in which order tasks ended that were due at one moment, or cancelled."""
    ended = []

    async def sleep(number: int) -> None:
        try:
            await anyio.sleep(1 if number % 2 else 1000)
        finally:
            ended.append(number)

    with anyio.move_on_after(5):
        async with anyio.create_task_group() as group:
            for number in range(num_tasks):
                group.start_soon(sleep, number)
    assert anyio.current_time() == 5
    return ended


def test_what_is_due_at_one_moment_comes_in_an_order_of_the_seed():
    orders = [run(sleepers, dice=Random(seed)) for seed in (1, 1, 2, 3, 4)]
    assert orders[0] == orders[1]
    assert len(set(map(tuple, orders))) == 4
    assert {frozenset(order[:4]) for order in orders} == {frozenset({1, 3, 5, 7})}
    assert run(sleepers, dice=None)[:4] == [1, 3, 5, 7]


def test_time_passes_at_once():
    async def main():
        await asyncio.sleep(1e6)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await anyio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main, dice=None) == 1e6 + 10


def test_a_hang_is_an_error_that_says_where():
    async def wait_for_nobody():
        await anyio.Event().wait()

    with pytest.raises(StuckError, match=r"nothing can ever happen.*Event\.wait"):
        run(wait_for_nobody, dice=Random(0))


def test_a_busy_loop_is_an_error():
    async def poll():
        while True:  # noqa: ASYNC110 - what it is about
            await asyncio.sleep(0)

    with pytest.raises(BusyError, match="no time has passed"):
        run(poll, dice=Random(0))


def test_a_poll_that_sets_timers_for_now_is_a_busy_loop_too():
    async def poll():
        future = asyncio.get_running_loop().create_future()
        while True:
            await asyncio.wait([future], timeout=0)

    with pytest.raises(BusyError, match="100 turns and no time has passed"):
        run(poll, dice=None, max_turns=100)


def test_a_heartbeat_hides_no_hang():
    async def main():
        async def beat():
            while True:  # noqa: ASYNC110 - a heartbeat
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            group.create_task(beat())
            await anyio.Event().wait()

    with pytest.raises(StuckError, match=r"not over after 60 seconds.*Event\.wait"):
        run(main, dice=Random(0), max_s=60)


def test_a_timer_without_end_never_comes_and_one_without_a_time_is_refused():
    with pytest.raises(StuckError, match="nothing can ever happen"):
        run(anyio.sleep_forever, dice=None)

    async def main():
        async with asyncio.timeout(float("inf")):
            await asyncio.sleep(1)
        with pytest.raises(ValueError, match="NaN"):
            asyncio.get_running_loop().call_later(float("nan"), print)

    run(main, dice=None)


def test_a_thread_that_calls_back_is_named_when_its_caller_hangs():
    async def main():
        loop, event = asyncio.get_running_loop(), anyio.Event()

        def call_back():
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

        thread = threading.Thread(target=call_back)
        thread.start()
        thread.join()
        await event.wait()

    with pytest.raises(StuckError, match="another thread called"):
        run(main, dice=None)


def test_an_error_that_nobody_asked_for_is_found_without_the_collector():
    class Owner:
        def __init__(self):
            self.task = asyncio.create_task(self.work())

        async def work(self):
            raise KeyError("lost")

    async def main():
        Owner()
        await asyncio.sleep(1)

    with pytest.raises(ExceptionGroup) as caught:
        run(main, dice=None)
    assert [str(error) for error in caught.value.exceptions] == ["'lost'"]
    gc.collect()


def test_plain_futures_come_in_an_order_of_the_seed():
    async def main():
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(12)]
        clutter = [loop.create_future() for _ in range(40)]
        loop.call_later(1, lambda: [future.set_result(None) for future in futures])
        done, _ = await asyncio.wait([*futures, *clutter[::3]], timeout=2)
        for future in clutter:
            future.cancel()
        return [futures.index(future) for future in done]

    assert run(main, dice=Random(1)) == run(main, dice=Random(1))


def test_a_run_within_a_run_is_refused():
    async def main():
        with pytest.raises(RuntimeError, match="from a running event loop"):
            run(sleepers, dice=None)

    run(main, dice=None)


def test_another_loop_goes_on_beside_a_run():
    """Its scopes are in sets by the hash that they had, and must keep it."""
    entered, may_go = threading.Event(), threading.Event()
    ended = []

    async def server():
        async with anyio.create_task_group() as group:

            async def handle():
                with anyio.CancelScope(), anyio.CancelScope():
                    entered.set()
                    while not may_go.is_set():  # noqa: ASYNC110 - a thread's
                        await anyio.sleep(0.001)

            for _ in range(3):
                group.start_soon(handle)
        ended.append(True)

    async def main():
        may_go.set()
        while not ended:
            with anyio.CancelScope(), anyio.CancelScope():
                await anyio.sleep(0.001)

    thread = threading.Thread(target=anyio.run, args=(server,), daemon=True)
    thread.start()
    assert entered.wait(10)
    run(main, dice=Random(0), max_s=10_000)
    thread.join(10)


def test_what_hangs_though_it_is_cancelled_hides_no_error():
    async def main():
        async def stubborn():
            while True:
                try:
                    await anyio.Event().wait()
                except asyncio.CancelledError:
                    continue

        task = asyncio.create_task(stubborn())
        await asyncio.sleep(1)
        raise KeyError(task.get_name())

    with pytest.raises(KeyError) as caught:
        run(main, dice=None)
    assert "torn down" in caught.value.__notes__[0]


def test_there_is_no_thread_and_no_other_thread():
    async def main():
        loop = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="starts no thread"):
            await asyncio.to_thread(print)
        with pytest.raises(RuntimeError, match="starts no thread"):
            await loop.getaddrinfo("localhost", 80)
        return loop

    loop = run(main, dice=None)
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, print)
    other = SimulatedLoop()
    other._thread = -1
    with pytest.raises(RuntimeError, match="one thread"):
        other.call_soon_threadsafe(print)
    assert "0 ready" in repr(other)
    other.close()


def test_what_nobody_handles_fails_the_run():
    async def main():
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with pytest.raises(ExceptionGroup) as caught:
        run(main, dice=None)
    assert isinstance(caught.value.exceptions[0].__cause__, ZeroDivisionError)


def test_a_check_after_each_handle_stops_the_run_where_it_failed():
    times = []

    def check():
        times.append(asyncio.get_running_loop().time())
        if times[-1] == 1:
            raise LawError("here")

    with pytest.raises(LawError, match="here"):
        run(sleepers, dice=Random(0), after=check)
    assert times.count(1) == 1


def test_collector_and_scopes_are_as_before_after_a_run():
    was = anyio.CancelScope.__hash__
    assert gc.isenabled()
    run(sleepers, dice=None)
    assert gc.isenabled()
    assert anyio.CancelScope.__hash__ is was
    gc.disable()
    try:
        run(sleepers, dice=None)
        assert not gc.isenabled()
    finally:
        gc.enable()


# The fakes keep their contracts.


@pytest.mark.slow
@pytest.mark.parametrize("copy_s", [0.0, 0.01])
@pytest.mark.parametrize("host_addressable", [False, True])
def test_the_device_keeps_its_contract(copy_s, host_addressable):
    def make():
        return SimulatedDevice(
            LAYOUT,
            4,
            copy_s=lambda: copy_s,
            host_addressable=host_addressable,
        )

    run(lambda: check_device(make), dice=None)


@pytest.mark.slow
@pytest.mark.parametrize("stubborn", [0.0, 0.5, 1.0])
def test_the_store_keeps_its_contract(stubborn):
    @asynccontextmanager
    async def make():
        weather = Weather(Random(1), {Mishap.STUBBORN: stubborn})
        async with SimulatedStore(Shelf(), weather=weather) as store:
            yield store

    run(lambda: check_store(make), dice=None)


# What the fakes do wrong.


def test_a_copy_is_torn_while_it_is_under_way():
    async def main():
        device = SimulatedDevice(LAYOUT, 4, copy_s=lambda: 1.0)
        page = bytes(range(device.page("kv", 0).nbytes))
        async with anyio.create_task_group() as group:
            group.start_soon(device.write_pages, "kv", [2], memoryview(page))
            await anyio.sleep(0.5)
            half = len(page) // 2
            assert device.page("kv", 2)[:half] == page[:half]
            assert set(device.page("kv", 2)[half:]) == {POISON}
        assert device.page("kv", 2) == page
        assert anyio.current_time() == 1.0

    run(main, dice=None)


@pytest.mark.parametrize(
    ("mishap", "touched"), [(Mishap.REFUSE, 0), (Mishap.TEAR, 0.5), (Mishap.DIE, 1)]
)
def test_a_device_fails_in_three_ways(mishap, touched):
    async def main():
        weather = Weather(Random(0), {mishap: 1.0})
        device = SimulatedDevice(LAYOUT, 4, weather=weather)
        page = bytes(device.page("kv", 0).nbytes)
        with pytest.raises(DeviceError):
            await device.write_pages("kv", [1], memoryview(page))
        assert bytes(device.page("kv", 1)).count(0) == touched * len(page)
        with weather.paused():
            if mishap is Mishap.DIE:
                with pytest.raises(DeviceError):
                    await device.write_pages("kv", [1], memoryview(page))
            else:
                await device.write_pages("kv", [1], memoryview(page))
        assert ("dead" in repr(device)) == (mishap is Mishap.DIE)

    run(main, dice=None)


TOKENS = prompt(4)
NAMES = keys(TOKENS)
PAGES = [content(TOKENS, position) for position in range(4)]


def stored() -> Shelf:
    shelf = Shelf()
    for key, page in zip(NAMES, PAGES, strict=True):
        shelf.put(key, page)
    return shelf


READS = {
    Mishap.LOSE: [Status.MISS] * 4,
    Mishap.CORRUPT: [Status.CORRUPT] * 4,
    Mishap.PARTIAL: [Status.HIT] * 2 + [Status.UNAVAILABLE] * 2,
    Mishap.SHORT: [Status.HIT] * 2,
}


@pytest.mark.parametrize("mishap", READS)
def test_a_store_fails_to_read(mishap):
    async def main():
        shelf = stored()
        store = SimulatedStore(shelf, weather=Weather(Random(0), {mishap: 1.0}))
        targets = [bytearray(len(page)) for page in PAGES]
        statuses = await store.get_into(NAMES, [[memoryview(t)] for t in targets])
        assert statuses == READS[mishap]
        for status, target, page in zip(statuses, targets, PAGES, strict=False):
            assert (bytes(target) == page) == (status is Status.HIT)
        assert (len(shelf.pages) == 4) == (mishap in {Mishap.PARTIAL, Mishap.SHORT})

    run(main, dice=None)


WRITES = {
    Mishap.FULL: ([Status.REJECTED] * 4, 0),
    Mishap.UNREPORTED: ([Status.UNAVAILABLE] * 4, 4),
    Mishap.SHORT: ([Status.HIT] * 2, 4),
}


@pytest.mark.parametrize("mishap", WRITES)
def test_a_store_fails_to_write(mishap):
    async def main():
        shelf = Shelf()
        store = SimulatedStore(shelf, weather=Weather(Random(0), {mishap: 1.0}))
        statuses = await store.put(NAMES, [[memoryview(page)] for page in PAGES])
        assert (statuses, len(shelf.pages)) == WRITES[mishap]

    run(main, dice=None)


def test_a_store_may_raise_stall_hide_or_be_out():
    async def main():
        async def ask(mishap):
            weather = Weather(Random(0), {mishap: 1.0})
            store = SimulatedStore(stored(), weather=weather, answer_s=lambda: 0.001)
            return await store.contains(NAMES)

        with pytest.raises(OSError, match="injected"):
            await ask(Mishap.RAISE)
        began = anyio.current_time()
        assert await ask(Mishap.STALL) == [True] * 4
        assert anyio.current_time() - began == pytest.approx(1.001)
        assert await ask(Mishap.HIDE) == [False] * 4
        weather = Weather()
        store = SimulatedStore(stored(), weather=weather)
        weather.is_out = True
        targets = [[memoryview(bytearray(len(page)))] for page in PAGES]
        assert await store.contains(NAMES) == [False] * 4
        assert await store.get_into(NAMES, targets) == [Status.UNAVAILABLE] * 4
        assert await store.put(NAMES, targets) == [Status.UNAVAILABLE] * 4
        with weather.paused():
            assert await store.contains(NAMES) == [True] * 4
        await store.aclose()
        with pytest.raises(ClosedError):
            await store.contains(NAMES)

    run(main, dice=None)


def test_a_shelf_keeps_what_was_used_last():
    shelf = Shelf(2)
    for key, page in zip(NAMES, PAGES, strict=True):
        shelf.put(key, page)
    assert list(shelf.pages) == NAMES[2:]
    shelf.put(NAMES[2], PAGES[2])
    shelf.put(NAMES[0], PAGES[0])
    assert list(shelf.pages) == [NAMES[2], NAMES[0]]
    assert "2 of 2" in repr(shelf)


# Runs.


@pytest.mark.slow
def test_all_holds_over_some_seeds():
    errors = {}
    steps = 0
    for seed in range(150):
        result = simulate(draw(seed))
        steps += result.steps
        if result.error is not None:
            errors[seed] = result.error
    assert errors == {}
    assert steps > 5000
