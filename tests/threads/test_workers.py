"""Jobs on threads: a call ends only when none of its jobs runs any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asyncache.core import ClosedError
from asyncache.threads import Stop, Workers, _pauses as pauses


class Held:
    """Jobs that run until the test lets them go, and note what happens to them."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = anyio.Event()
        self.stopped = anyio.Event()
        self.running = 0
        self.num_begun = 0
        self._loop = asyncio.get_running_loop()

    def job(self, part: int, stop: threading.Event) -> None:
        self.running += 1
        self.num_begun += 1
        self._loop.call_soon_threadsafe(self.begun.set)
        stop.wait()
        with suppress(RuntimeError):  # a test closed the loop
            self._loop.call_soon_threadsafe(self.stopped.set)
        self.go.wait()
        self.running -= 1


async def turns(count: int) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


async def run_caught(workers: Workers, held: Held, caught: list[BaseException]) -> None:
    try:
        await workers.run(held.job, [0])
    except BaseException as error:
        caught.append(error)
        assert held.running == 0
        raise


async def test_every_part_is_done_when_run_returns():
    workers, done = Workers(3, "test", owner="store"), []
    await workers.run(lambda part, stop: done.append(part), range(20))
    assert sorted(done) == list(range(20))
    await workers.run(lambda part, stop: done.append(part), [])
    await workers.aclose()


async def test_no_thread_starts_before_the_first_job():
    before = threading.active_count()
    workers = Workers(3, "test", owner="store")
    assert threading.active_count() == before
    await workers.run(lambda part, stop: None, [0])
    assert threading.active_count() > before
    await workers.aclose()
    assert threading.active_count() == before


async def test_an_error_of_a_job_is_raised_when_all_jobs_are_over():
    workers, done = Workers(2, "test", owner="store"), []

    def job(part: int, stop: threading.Event) -> None:
        if part == 1:
            raise LookupError("part 1")
        done.append(part)

    with pytest.raises(LookupError, match="part 1"):
        await workers.run(job, range(4))
    assert sorted(done) == [0, 2, 3]
    await workers.aclose()


async def test_a_cancelled_scope_waits_for_the_thread_to_stop():
    workers, held = Workers(1, "test", owner="store"), Held()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_caught, workers, held, [])
        await held.begun.wait()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await held.stopped.wait()
            await turns(20)
            assert held.running == 1
            held.go.set()
    assert held.running == 0
    await workers.aclose()


async def test_no_number_of_native_cancellations_gets_past_the_thread():
    workers, held, caught = Workers(1, "test", owner="store"), Held(), []
    task = asyncio.create_task(run_caught(workers, held, caught))
    await held.begun.wait()
    for _ in range(5):
        task.cancel()
        await turns(3)
        assert not task.done()
    await held.stopped.wait()
    held.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(caught) == 1
    await workers.aclose()


async def test_waiting_for_a_thread_in_a_cancelled_scope_does_not_spin():
    workers, held = Workers(1, "test", owner="store"), Held()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_caught, workers, held, [])
        await held.begun.wait()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await held.stopped.wait()
            await turns(5)
            [waiting] = asyncio.all_tasks() - {asyncio.current_task()}
            cancelling = waiting.cancelling()
            await turns(50)
            assert waiting.cancelling() == cancelling
            held.go.set()
    await workers.aclose()


async def test_a_native_cancellation_that_comes_after_a_scopes_own_is_not_lost():
    workers, held = Workers(1, "test", owner="store"), Held()
    left_scope = False

    async def victim() -> None:
        nonlocal left_scope
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await workers.run(held.job, [0])
        left_scope = True

    scopes: list[anyio.CancelScope] = []
    task = asyncio.create_task(victim())
    await held.begun.wait()
    scopes[0].cancel()
    await held.stopped.wait()
    task.cancel()
    await turns(3)
    held.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not left_scope
    await workers.aclose()


async def test_a_timeout_of_asyncio_ends_after_the_thread():
    workers, held = Workers(1, "test", owner="store"), Held()
    async with anyio.create_task_group() as tasks:

        async def let_go() -> None:
            await held.stopped.wait()
            held.go.set()

        tasks.start_soon(let_go)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await workers.run(held.job, [0])
        assert held.running == 0
    await workers.aclose()


async def test_jobs_that_have_not_begun_are_dropped():
    workers, held = Workers(1, "test", owner="store"), Held()
    held.go.set()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(workers.run, held.job, range(10))
            await held.begun.wait()
            scope.cancel()
    assert held.num_begun == 1
    await workers.aclose()


def test_a_coroutine_that_is_thrown_away_blocks_until_its_thread_stops():
    async def begin() -> tuple[Held, Coroutine[object, object, None]]:
        held = Held()
        held.go.set()
        thrown_away = workers.run(held.job, [0])
        thrown_away.send(None)
        await held.begun.wait()
        return held, thrown_away

    workers = Workers(1, "test", owner="store")
    held, thrown_away = asyncio.run(begin())
    assert held.running == 1
    thrown_away.close()
    assert held.running == 0
    asyncio.run(workers.aclose())


async def test_closing_stops_what_runs_and_refuses_what_comes():
    workers, held = Workers(1, "test", owner="store"), Held()
    held.go.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(workers.run, held.job, range(3))
        await held.begun.wait()
        await workers.aclose()
        assert held.running == 0
    with pytest.raises(ClosedError, match="closed"):
        await workers.run(held.job, [0])


async def test_closing_may_be_cancelled_and_done_again():
    workers, held = Workers(1, "test", owner="store"), Held()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(workers.run, held.job, [0])
        await held.begun.wait()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await workers.aclose()
        assert held.running == 1
        held.go.set()
    await workers.aclose()


async def test_a_time_that_is_up_ends_jobs_as_a_cancellation_does_and_returns():
    workers, held = Workers(1, "test", owner="store"), Held()
    held.go.set()
    await workers.run(held.job, range(3), timeout_s=0.01)
    assert (held.num_begun, held.running) == (1, 0)
    await workers.aclose()


async def test_a_time_that_is_not_up_changes_nothing():
    workers, stops = Workers(1, "test", owner="store"), []
    await workers.run(lambda part, stop: stops.append(stop), [0], timeout_s=3600)
    assert not stops[0].is_set()
    timers = asyncio.get_running_loop()._scheduled
    assert all(timer.cancelled() for timer in timers)
    await workers.aclose()


async def test_what_a_job_blocks_in_is_interrupted_when_it_should_end():
    workers, begun = Workers(1, "test", owner="store"), anyio.Event()
    loop = asyncio.get_running_loop()

    def job(part: int, stop: Stop) -> None:
        blocked = threading.Event()
        with stop.interrupting(blocked.set):
            loop.call_soon_threadsafe(begun.set)
            blocked.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(workers.run, job, [0])
        await begun.wait()
        tasks.cancel_scope.cancel()
    await workers.aclose()


def test_a_job_that_begins_to_block_too_late_is_interrupted_at_once_and_not_later():
    stop, calls = Stop(), []
    with stop.interrupting(lambda: calls.append("before")):
        pass
    stop.set()
    with stop.interrupting(lambda: calls.append("after")):
        assert calls == ["after"]
    stop.set()
    assert calls == ["after"]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_the_last_thing_is_done_when_no_job_runs_any_more(is_cancelled):
    workers, held = Workers(2, "test", owner="store"), Held()
    num_running: list[int] = []
    over = anyio.Event()
    loop = asyncio.get_running_loop()

    def last() -> None:
        num_running.append(held.running)
        loop.call_soon_threadsafe(over.set)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(workers.run, held.job, [0])
        await held.begun.wait()
        with anyio.CancelScope() as scope:
            if is_cancelled:
                scope.cancel()
                await workers.aclose(last)
        if not is_cancelled:
            tasks.start_soon(workers.aclose, last)
        await held.stopped.wait()
        held.go.set()
    await over.wait()
    assert num_running == [0]
    await workers.aclose()


# Whose jobs come first.


class Rivals:
    """Jobs that come first, which run until let go, and those that wait for them."""

    def __init__(self) -> None:
        self.first = Workers(1, "first", owner="store")
        self.second = Workers(1, "second", owner="store", after=self.first)
        self.let_go = threading.Event()
        self.at_pause = threading.Event()
        self.order: list[str] = []

    def hold(self, part: int, stop: Stop) -> None:
        self.let_go.wait(30)
        self.order.append("first")

    def pause(self, part: int, stop: Stop) -> None:
        self.at_pause.set()
        stop.pause()
        self.order.append("second")

    async def aclose(self) -> None:
        self.let_go.set()
        await self.second.aclose()
        await self.first.aclose()


async def test_a_pause_lasts_until_no_job_is_left_that_comes_first(monkeypatch):
    monkeypatch.setattr(pauses, "_MOST_S", 600.0)
    rivals = Rivals()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rivals.first.run, rivals.hold, [0, 1])
        await anyio.lowlevel.checkpoint()
        tasks.start_soon(rivals.second.run, rivals.pause, [0])
        await anyio.to_thread.run_sync(rivals.at_pause.wait)
        rivals.let_go.set()
    assert rivals.order == ["first", "first", "second"]
    # And is none where there is nobody.
    await rivals.second.run(rivals.pause, [0])
    await rivals.first.run(lambda _, stop: stop.pause(), [0])
    await rivals.aclose()


async def test_a_pause_ends_however_long_others_run():
    rivals = Rivals()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rivals.first.run, rivals.hold, [0])
        await anyio.lowlevel.checkpoint()
        for _ in range(3):
            await rivals.second.run(rivals.pause, [0])
        rivals.let_go.set()
    assert rivals.order == ["second"] * 3 + ["first"]
    await rivals.aclose()


async def test_who_should_end_does_not_pause(monkeypatch):
    monkeypatch.setattr(pauses, "_MOST_S", 600.0)
    rivals, stops = Rivals(), []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rivals.first.run, rivals.hold, [0])
        await anyio.lowlevel.checkpoint()

        def stop_and_pause(part: int, stop: Stop) -> None:
            stop.set()
            stop.pause()
            stops.append(stop)

        await rivals.second.run(stop_and_pause, [0])
        rivals.let_go.set()
    assert len(stops) == 1
    await rivals.aclose()
