"""The blocking face: who may call it, and that stop means stop."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import threading
import time

import anyio
import pytest

from asyncache.core import (
    AbortedError,
    ClosedError,
    FactKind,
    InvariantError,
    OrderError,
    StoreError,
)
from asyncache.devices import CpuDevice
from asyncache.engine import BlockingCache, Limits
from asyncache.engine._alarms import Alarms
from asyncache.stores import MemoryStore
from asyncache.testing import Fault, FaultyStore, Gate, GateStore
from asyncache.threads import outlast
from tests.engine.blocking import PATIENCE_S, blocking_scene, interrupt, loading
from tests.engine.scene import (
    LAYOUT,
    PAGE,
    StubbornStore,
    gate_device,
    keys,
    memory_store as new_store,
    prompt,
    staged,
    turns,
    unchanged,
)

TOKENS = prompt(3)
SHORT = Limits(close_s=0.05, retry_s=0.001)


def memory_store(*prompts):
    return asyncio.run(new_store(*prompts))


def held_store(*prompts, gate="get_gate", kind=GateStore):
    """Return a store that holds these prompts, with one of its gates shut."""
    store = kind(memory_store(*prompts), is_open=True)
    getattr(store, gate).close()
    return store


def new_cache(store=None, **arguments):
    return BlockingCache(LAYOUT, device=CpuDevice(LAYOUT, 8), store=store, **arguments)


def on_loop(thread, call):
    """Make a call on the loop of a cache's thread."""
    done = threading.Event()
    thread.call(lambda: (call(), done.set()))
    assert done.wait(PATIENCE_S)


def wait_until(holds):
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        os.sched_yield()


def raised_elsewhere(call):
    """Make a call in another thread; return what it raised."""
    raised = []

    def run():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


# Closing.


@pytest.mark.parametrize("where", ["contains_gate", "get_gate", "put_gate"])
def test_closing_ends_requests_and_transfers_wherever_they_are(where):
    store = held_store(TOKENS, gate=where)
    gate = getattr(store, where)
    with blocking_scene(store, check=False) as view:
        view.serve(prompt(2, seed=5), deadline_s=0)
        with view.cache.request(TOKENS) as request:
            hit = request.restore_nowait()
            view.until(lambda: gate.num_waiting)
            view.cache.close()
            view.cache.close()
            assert gate.num_waiting == 0
            with pytest.raises(AbortedError):
                hit.wait()
            with pytest.raises(AbortedError):
                request.extend(1)
        view.check_clean()


def test_closing_waits_for_a_copy_that_has_begun():
    store, device, tasks = memory_store(TOKENS), gate_device(), []
    with blocking_scene(device=device, linker=staged(store), check=False) as view:
        with view.cache.request(TOKENS) as request:
            loading(view, device.write_gate, request)
            cache, thread = view.cache, view.cache._thread

            async def let_on():
                while not (cache._is_closed and thread._changed._waiters):
                    await turns(1)
                assert view.pool.quarantine == 3
                device.write_gate.open()

            on_loop(thread, lambda: tasks.append(asyncio.ensure_future(let_on())))
            cache.close()
        assert tasks[0].exception() is None
        assert thread.is_over
        view.check_clean()


def test_a_store_that_never_stops_is_told_within_close_s():
    store = held_store(TOKENS, kind=StubbornStore)
    cache = new_cache(store, limits=SHORT)
    cache.open()
    with cache.request(TOKENS) as request:
        request.restore()
        wait_until(lambda: store.get_gate.num_waiting)
        thread = cache._thread
        for _ in range(2):
            with pytest.raises(OrderError, match=r"1 transfers did not stop .* 0\.05"):
                cache.close()
        with pytest.raises(AbortedError):
            request.extend(1)
        assert cache.statistics().replica.pools["kv"].quarantine == 3
    on_loop(thread, store.get_gate.open)
    wait_until(lambda: thread.is_over)
    cache.close()
    assert cache.statistics().leaked_pages == 0
    assert thread.is_over


class SlowStore(MemoryStore):
    """Opens and closes when the test says so."""

    def __init__(self, **gates):
        super().__init__(2**20)
        self.open_gate, self.close_gate = Gate(is_open=True), Gate(is_open=True)
        self.num_closed = 0

    async def open(self):
        await self.open_gate.pass_through()

    async def aclose(self):
        await self.close_gate.pass_through()
        await super().aclose()
        self.num_closed += 1


def test_a_store_that_does_not_close_is_told_within_close_s():
    store = SlowStore()
    store.close_gate.close()
    cache = new_cache(store, limits=SHORT)
    cache.open()
    thread = cache._thread
    with pytest.raises(OrderError, match="the store did not close"):
        cache.close()
    on_loop(thread, store.close_gate.open)
    wait_until(lambda: thread.is_over)
    cache.close()
    assert store.num_closed == 1


def test_closing_is_not_cut_short_by_a_signal():
    class Interrupting(SlowStore):
        async def aclose(self):
            await interrupt(changed)
            while not changed._waiters:  # it waits on
                await turns(1)
            await super().aclose()

    store = Interrupting()
    cache = new_cache(store)
    cache.open()
    changed, thread = cache._queues.changed, cache._thread
    with pytest.raises(KeyboardInterrupt):
        cache.close()
    assert store.num_closed == 1
    assert thread.is_over
    cache.close()


def test_closing_reports_what_closing_the_store_raised_once():
    class Broken(MemoryStore):
        async def aclose(self):
            raise OSError("flush failed")

    cache = new_cache(Broken(2**20))
    cache.open()
    with pytest.raises(OSError, match="flush failed"):
        cache.close()
    cache.close()


def test_left_by_an_exception_the_cache_closes_and_the_exception_goes_on():
    cache = new_cache(memory_store(TOKENS))

    def serve():
        with cache, cache.request(TOKENS) as request:
            request.restore()
            raise RuntimeError("serving failed")

    with pytest.raises(RuntimeError, match="serving failed"):
        serve()
    assert cache.statistics().leaked_pages == 0


def test_a_bracket_left_after_closing_gives_its_pages_back():
    with blocking_scene(memory_store(), check=False) as view:
        scope = view.cache.request(prompt(1))
        request = scope.__enter__()
        request.extend(5)
        bracket = view.cache.forward([request])
        bracket.__enter__()
        request.commit(5)  # an offload is due once the bracket is left
        view.cache.close()
        bracket.__exit__(None, None, None)
        scope.__exit__(None, None, None)
        assert view.cache.statistics().leaked_pages == 0
        view.cache.check_invariants()


def test_a_cache_that_is_lost_ends_its_thread_and_says_so():
    cache = new_cache(memory_store())
    cache.open()
    thread = cache._thread
    on_loop(thread, thread._look)  # its owner lives: it goes on
    assert not thread.is_over
    with pytest.warns(ResourceWarning, match="close it"):
        del cache
    wait_until(lambda: thread.is_over)
    thread.join()


def test_a_thread_whose_owner_has_ended_ends_too():
    store, threads = SlowStore(), []

    def own():
        cache = new_cache(store)
        cache.open()
        threads.append(cache._thread)
        kept.append(cache)

    kept = []
    owner = threading.Thread(target=own)
    owner.start()
    owner.join()
    wait_until(lambda: threads[0].is_over)
    assert store.num_closed == 1


# Opening.


@pytest.mark.parametrize("error", [StoreError("no such directory"), OSError("gone")])
def test_a_store_that_cannot_be_opened_says_so_and_is_closed(error):
    class Broken(SlowStore):
        async def open(self):
            raise error

    store = Broken()
    cache = new_cache(store)
    with pytest.raises(type(error), match=str(error)):
        cache.open()
    assert store.num_closed == 1
    cache.close()
    assert repr(cache) == "<BlockingCache, closed>"


def test_interrupted_while_it_opens_its_store_is_closed_again():
    class Interrupting(SlowStore):
        async def open(self):
            while cache._thread is None:
                await turns(1)
            await interrupt(cache._thread._changed)
            await super().open()

    store = Interrupting()
    store.open_gate.close()
    cache = new_cache(store)
    with pytest.raises(KeyboardInterrupt):
        cache.open()
    assert store.num_closed == 1
    cache.close()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_thread_that_is_killed_while_it_opens_leaves_nothing(is_stopped):
    class Killing(SlowStore):
        async def open(self):
            if is_stopped:
                while cache._thread is None:
                    await turns(1)
                cache._thread.stop()  # as when its owner has ended
            else:
                asyncio.current_task().cancel()
            await turns(2)

    store = Killing()
    cache = new_cache(store)
    with pytest.raises(ClosedError, match="while it was opened"):
        cache.open()
    cache.close()
    assert store.num_closed == 1


def test_what_did_not_stop_opening_in_time_is_waited_for_by_close():
    class Stubborn(SlowStore):
        async def open(self):
            try:
                while cache._thread is None:
                    await turns(1)
                await interrupt(cache._thread._changed)
            finally:
                # The signal may have the opening cancelled before it was seen to come.
                await outlast(opened)

    store, opened = Stubborn(), anyio.Event()
    cache = new_cache(store, limits=SHORT)
    with pytest.raises(KeyboardInterrupt):
        cache.open()
    thread = cache._thread
    with pytest.raises(OrderError, match="did not close within"):
        cache.close()
    on_loop(thread, opened.set)
    wait_until(lambda: thread.is_over)
    cache.close()
    assert store.num_closed == 1
    assert cache._thread is None


def test_a_cache_is_opened_once():
    cache = new_cache()
    assert repr(cache) == "<BlockingCache, not open>"
    with pytest.raises(ClosedError, match="not open"):
        cache.request(TOKENS)
    with cache:
        assert "free=8" in repr(cache)
        with pytest.raises(OrderError, match="opened once"):
            cache.open()
    with pytest.raises(OrderError, match="opened once"):
        cache.open()
    never_open = new_cache()
    never_open.close()
    assert repr(never_open) == "<BlockingCache, closed>"


# Who may call.


def all_calls(view, request, hit, scope):
    return (
        lambda: view.cache.request(TOKENS),
        lambda: view.cache.match_nowait(TOKENS),
        lambda: view.cache.gates([request]),
        lambda: view.cache.forward([request]).__enter__(),
        view.cache.step,
        view.cache.drain,
        view.cache.close,
        lambda: request.extend(2),
        lambda: request.append([1]),
        lambda: request.commit(1),
        lambda: request.truncate(1),
        request.restore,
        request.restore_nowait,
        request.suspend,
        hit.wait,
        scope.__enter__,
    )


def test_calls_from_another_thread_are_refused():
    with blocking_scene(memory_store(TOKENS)) as view:
        with view.cache.request(TOKENS) as request:
            hit = request.restore().wait()
            request.extend(len(TOKENS))
            scope = view.cache.request(TOKENS)
            with unchanged(view):
                for call in all_calls(view, request, hit, scope):
                    error = raised_elsewhere(call)
                    assert isinstance(error, OrderError), (call, error)
                    assert "another thread or process" in str(error)
        assert view.serve(TOKENS) == 3 * PAGE


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_calls_in_a_forked_child_are_refused_and_touch_nothing():
    with (
        blocking_scene(memory_store(TOKENS)) as view,
        view.cache.request(TOKENS) as request,
    ):
        hit = request.restore().wait()
        scope = view.cache.request(TOKENS)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for call in all_calls(view, request, hit, scope):
                    with pytest.raises(OrderError, match="thread or process"):
                        call()
                request.__exit__(None, None, None)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        view.finish(request, TOKENS, 3 * PAGE)


def test_calls_on_a_closed_cache_are_refused():
    with blocking_scene(check=False) as view:
        scope = view.cache.request(TOKENS)
        view.cache.close()
        for call in (
            lambda: view.cache.request(TOKENS),
            lambda: view.cache.match_nowait(TOKENS),
            lambda: view.cache.gates([]),
            lambda: view.cache.forward([]).__enter__(),
            view.cache.step,
            view.cache.drain,
            scope.__enter__,
        ):
            with pytest.raises(ClosedError, match="closed"):
                call()


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-1, ValueError, "-1"),
        (math.nan, ValueError, "nan"),
        (math.inf, ValueError, "inf"),
        (True, TypeError, "bool"),
        ("1", TypeError, "str"),
    ],
)
def test_deadlines_and_timeouts_are_finite_and_not_negative(value, error, text):
    store = held_store(TOKENS)
    with blocking_scene(store) as view, view.cache.request(prompt(1, seed=1)) as other:
        hit = other.restore()
        with view.cache.request(TOKENS) as request, unchanged(view):
            for call in (
                lambda: request.restore(deadline_s=value),
                lambda: request.restore_nowait(deadline_s=value),
                lambda: hit.wait(timeout_s=value),
                lambda: view.cache.step(timeout_s=value),
                lambda: view.cache.drain(deadline_s=value),
            ):
                with pytest.raises(error, match=text):
                    call()
            assert not view.cache._runtime._deadlines
            assert request.settled
        view.open(store.get_gate)


# Observers.


def test_observers_are_called_in_the_thread_of_the_loop_and_may_call_back():
    class Curious:
        def __init__(self):
            self.view, self.threads, self.refused = None, set(), []

        def on_event(self, event):
            self.threads.add(threading.get_ident())
            if self.view is None or len(self.refused) > 20:
                return
            cache, tokens = self.view.cache, prompt(1, seed=10 + len(self.refused))
            with cache.request(tokens) as request:
                for call in (request.restore, cache.step, cache.drain, cache.close):
                    with pytest.raises(OrderError, match="from within the cache"):
                        call()
                self.refused.append(event)
                self.view.finish(request, tokens, 0)

    observer, store = Curious(), memory_store(TOKENS)
    with blocking_scene(store, num_pages=128, observer=observer) as view:
        observer.view = view
        assert view.serve(TOKENS) == 3 * PAGE
        view.cache.drain()
        assert len(observer.refused) > 20
    assert observer.threads == {threading.get_ident()}


def test_an_observer_of_a_failed_transfer_may_not_wait_either():
    class Waiting:
        def __init__(self):
            self.cache, self.errors = None, []

        def on_event(self, event):
            if not isinstance(getattr(event, "kind", None), FactKind):
                with pytest.raises(OrderError, match="from within the cache"):
                    self.cache.step()
                self.errors.append(event)

    class Raising(MemoryStore):
        async def contains(self, keys):
            raise OSError("disk")

    observer = Waiting()
    with blocking_scene(Raising(2**20), observer=observer, check=False) as view:
        observer.cache = view.cache
        assert view.serve(TOKENS) == 0
        assert observer.errors


def test_an_observer_that_raises_is_logged_and_hurts_nobody(caplog):
    class Failing:
        def on_event(self, event):
            raise ValueError("observer")

    with blocking_scene(memory_store(TOKENS), observer=Failing()) as view:
        assert view.serve(TOKENS) == 3 * PAGE
    assert caplog.records
    assert {record.name for record in caplog.records} == {"asyncache"}
    assert "observer failed" in caplog.text


# A bug of ours.


@pytest.mark.parametrize("error", [InvariantError("a law"), KeyError("a bug")])
def test_a_verdict_that_breaks_a_law_ends_every_wait(error):
    store = held_store(TOKENS)
    with blocking_scene(store, check=False) as view:

        def apply(ballot, verdict):
            raise error

        with view.cache.request(TOKENS) as request:
            hit = loading(view, store.get_gate, request)
            view.replica.apply = apply
            view.open(store.get_gate)
            with pytest.raises(InvariantError):
                hit.wait()
        for call in (
            view.cache.step,
            view.cache.drain,
            lambda: view.cache.request(TOKENS),
        ):
            with pytest.raises(InvariantError):
                call()
        view.cache.close()
        view.cache.check_invariants = lambda: None


def test_a_drain_and_a_restore_end_when_the_cache_fails():
    store = held_store(TOKENS, gate="contains_gate")
    with blocking_scene(store, check=False) as view:
        request = view.cache.request(TOKENS).__enter__()
        request.restore_nowait()

        def fail(ballot, verdict):
            raise InvariantError("a law")

        view.replica.apply = fail
        view.open(store.contains_gate)
        with pytest.raises(InvariantError):
            view.until(lambda: False)
        with pytest.raises(InvariantError):
            view.cache.drain()
        view.cache.check_invariants = lambda: None


# Clocks.


def test_an_alarm_that_another_one_cancels_does_not_ring():
    alarms, rung = Alarms(), []
    alarms.set(0, lambda: (rung.append(1), second.cancel()))
    second = alarms.set(0, lambda: rung.append(2))
    alarms.set(1e300, lambda: rung.append(3))
    third = alarms.set(0, lambda: rung.append(4))
    third.cancel()
    while time.monotonic() < alarms.due:
        pass
    assert alarms.ring() == 1
    assert rung == [1]
    assert alarms.ring() == 0


# Many at once.


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_requests_that_come_and_go_leaves_nothing(seed):
    chance = random.Random(seed)
    prompts = [prompt(chance.randrange(1, 5), seed=number) for number in range(12)]
    bad = [key for tokens in prompts[::3] for key in keys(tokens)[1:2]]
    store = FaultyStore(memory_store(*prompts[:8]), Fault.TORN, keys=bad)
    limits = Limits(slots=4, offloads=2, retry_s=0.001, breaker_s=0.001)
    with blocking_scene(store, num_pages=12, limits=limits) as view:
        live = []
        for _ in range(400):
            if len(live) < 4:
                tokens = chance.choice(prompts)
                request = view.cache.request(tokens).__enter__()
                hit = request.restore_nowait(deadline_s=chance.choice([0.002, 5]))
                live.append((request, hit, tokens))
            view.cache.step(timeout_s=chance.choice([0, 0.001]))
            request, hit, tokens = entry = chance.choice(live)
            if chance.random() < 0.2:
                request.__exit__(RuntimeError, None, None)
                live.remove(entry)
            elif hit.settled and request.reserved:
                view.finish(request, tokens, hit.num_tokens)
                request.__exit__(None, None, None)
                live.remove(entry)
            elif hit.settled:
                request.suspend()
                live.remove(entry)
                live.append((request, request.restore_nowait(), tokens))
            view.cache.check_invariants()
        for request, _, _ in live:
            request.__exit__(None, None, None)
        live.clear()
        request = hit = entry = None
        gc.collect()
