"""The blocking face: the same cache for a step loop that lives in a thread."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from asyncache.core import AbortedError, OrderError, OutOfPagesError, PageState
from asyncache.engine import Limits, StoreDown, TransferFailed
from asyncache.stores import FileStore, MemoryStore
from asyncache.testing import Fault, FaultyStore, GateStore
from tests.engine.blocking import blocking_scene, interrupt, left_by, loading
from tests.engine.scene import (
    PAGE,
    StubbornStore,
    check_pages,
    compute,
    content,
    gate_device,
    keys,
    memory_store as new_store,
    prompt,
    staged,
    store_pages,
    write,
)

TOKENS = prompt(3)
HASTY = Limits(gate_s=0.05, close_s=5.0, breaker_s=0.001, retry_s=0.001)


def memory_store(*prompts):
    return asyncio.run(new_store(*prompts))


def held_store(*prompts, gate="get_gate", kind=GateStore):
    """Return a store that holds these prompts, with one of its gates shut."""
    store = kind(memory_store(*prompts), is_open=True)
    getattr(store, gate).close()
    return store


def call(work):
    work()


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


# The life of a request.


def test_what_was_committed_is_a_hit_and_what_was_offloaded_comes_back(tmp_path):
    with blocking_scene(FileStore(tmp_path)) as view:
        assert view.serve(TOKENS) == 0
        assert view.cache.match_nowait(TOKENS) == 3 * PAGE
        assert view.serve(TOKENS) == 3 * PAGE
        assert view.cache.drain() == 0
        assert view.cache.statistics().counters.stored_pages == 3
    with blocking_scene(FileStore(tmp_path)) as view:
        assert view.serve(TOKENS) == 3 * PAGE
        assert view.cache.statistics().counters.loaded_pages == 3


def test_without_a_store_there_is_no_thread():
    before = threading.active_count()
    with blocking_scene() as view:
        assert threading.active_count() == before
        assert view.serve(TOKENS) == 0
        assert view.serve(TOKENS) == 3 * PAGE


def test_decoding_appends_extends_and_commits_page_by_page():
    with blocking_scene(MemoryStore(2**20)) as view:
        tokens = prompt(1)
        with view.cache.request(tokens, reserve_tokens=2 * PAGE) as request:
            request.restore().wait()
            assert request.reserved
            request.extend(len(tokens))
            for token in range(2 * PAGE):
                tokens.append(token)
                request.append([token])
                request.extend(len(tokens))
                with view.cache.forward([request]):
                    compute(view.device, request, tokens)
                assert request.commit(len(tokens)) == len(tokens) // PAGE * PAGE
                view.cache.step()
        assert view.cache.match_nowait([*tokens, 0]) == 3 * PAGE


def test_a_step_waits_for_what_comes_and_reports_it():
    store = held_store(TOKENS)
    with blocking_scene(store) as view:
        with view.cache.request(TOKENS) as request:
            hit = loading(view, store.get_gate, request)
            assert view.cache.step().landed == ()
            view.open(store.get_gate)
            reports = []
            while not hit.settled:
                reports.append(view.cache.step(timeout_s=20))
            assert [r.landed for r in reports if r.landed] == [(request,)]
            request.extend(len(TOKENS))
        view.serve(prompt(2, seed=1))
        view.cache.drain()
        # What a wait brought in is not waited for again.
        assert view.cache.step(timeout_s=1e9).stored_pages == 2


def test_nothing_changes_between_two_calls_that_wait():
    """Fails if calls apply what has come in: then the commit would find no pages."""
    inner = held_store(TOKENS)
    store = FaultyStore(inner, Fault.LOST, keys=keys(TOKENS)[:1])
    with blocking_scene(store) as view, view.cache.request(TOKENS) as request:
        hit = loading(view, inner.get_gate, request)
        request.extend(len(TOKENS))
        view.open(inner.get_gate)
        while not view.cache._queues._inbox:
            pass
        assert hit.num_tokens == 3 * PAGE
        with view.cache.forward([request]):
            compute(view.device, request, TOKENS, 3)
        request.commit(len(TOKENS))
        assert len(request.page_table["kv"]) == 4
        assert not hit.settled
        assert hit.wait().num_tokens == 0
        assert request.page_table["kv"].tolist() == []
        assert view.cache.step().shortened == (request,)
        view.finish(request, TOKENS, 0)


def test_a_suspended_request_starts_over_and_its_old_hit_is_zero():
    with (
        blocking_scene(memory_store(TOKENS)) as view,
        view.cache.request(TOKENS) as request,
    ):
        first = request.restore_nowait()
        assert (first.agreed, first.num_tokens) == (False, 0)
        request.suspend()
        assert first.agreed
        assert first.wait().num_tokens == 0
        assert not view.cache._runtime._deadlines
        second = request.restore()
        assert (first.num_tokens, second.num_tokens) == (0, 3 * PAGE)
        assert second.wait().settled


def test_restoring_twice_or_extending_meanwhile_is_refused():
    store = held_store(TOKENS, gate="contains_gate")
    with blocking_scene(store) as view, view.cache.request(TOKENS) as request:
        hit = request.restore_nowait()
        before = view.dump()
        for call in (request.restore, request.restore_nowait):
            with pytest.raises(OrderError, match="restore"):
                call()
        with pytest.raises(OrderError, match="restore is open"):
            request.extend(1)
        assert view.dump() == before
        assert not hit.wait(timeout_s=0).settled
        view.open(store.contains_gate)
        assert hit.wait().num_tokens == 3 * PAGE


# Two requests, one cold prefix.


def test_two_requests_for_one_cold_prefix_make_one_transfer():
    store = held_store(TOKENS)
    with blocking_scene(store) as view:
        with view.cache.request(TOKENS) as one, view.cache.request(TOKENS) as two:
            first, second = loading(view, store.get_gate, one), two.restore()
            assert first.num_tokens == second.num_tokens == 3 * PAGE
            assert one.page_table == two.page_table
            view.open(store.get_gate)
            first.wait()
            second.wait()
            check_pages(view.device, two, TOKENS, 3 * PAGE)
        assert store.get_gate.num_arrived == 1
        assert view.cache.statistics().counters.loaded_pages == 3


@pytest.mark.parametrize("leaver", [0, 1])
def test_the_end_of_one_does_not_hurt_the_other(leaver):
    store = held_store(TOKENS)
    with blocking_scene(store) as view:
        scopes = [view.cache.request(TOKENS) for _ in range(2)]
        requests = [scope.__enter__() for scope in scopes]
        hits = [request.restore() for request in requests]
        view.arrived(store.get_gate)
        scopes[leaver].__exit__(RuntimeError, None, None)
        with pytest.raises(AbortedError):
            hits[leaver].wait()
        stays = 1 - leaver
        assert hits[stays].num_tokens == 3 * PAGE
        assert view.pool.transit == 3
        view.open(store.get_gate)
        hits[stays].wait()
        view.finish(requests[stays], TOKENS, 3 * PAGE)
        scopes[stays].__exit__(None, None, None)


def test_one_deadline_ends_one_wait_and_the_load_goes_on():
    store = held_store(TOKENS)
    with (
        blocking_scene(store) as view,
        view.cache.request(TOKENS) as one,
        view.cache.request(TOKENS) as two,
    ):
        hurried = one.restore(deadline_s=0.02)
        patient = two.restore()
        hurried.wait()
        assert (hurried.num_tokens, patient.num_tokens) == (0, 3 * PAGE)
        view.open(store.get_gate)
        patient.wait()
        check_pages(view.device, two, TOKENS, 3 * PAGE)


# Leaving a scope, wherever it is.


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("where", ["contains_gate", "get_gate"])
def test_left_in_a_lookup_or_a_load_it_gives_all_back(where, error):
    store = held_store(TOKENS, gate=where)
    with blocking_scene(store) as view:
        with left_by(error, view.cache.request(TOKENS)) as request:
            request.restore_nowait()
            view.until(lambda: store.contains_gate.num_arrived)
            if where == "get_gate":
                view.until(lambda: store.get_gate.num_waiting)
        assert view.cache.statistics().counters.aborted == 1
        view.rest()
        assert view.pool.free == 8
        assert getattr(store, where).num_waiting == 0


def test_left_during_the_copy_its_pages_wait_until_the_copy_is_over():
    store, device = memory_store(TOKENS), gate_device()
    with blocking_scene(device=device, linker=staged(store)) as view:
        with left_by(RuntimeError, view.cache.request(TOKENS)) as request:
            loading(view, device.write_gate, request)
        assert (view.pool.quarantine, view.pool.transit, view.pool.free) == (3, 0, 5)
        held = view.pages(PageState.QUARANTINE)
        with view.cache.request(prompt(4, seed=1)) as other:
            other.extend(other.num_tokens)
            assert held.isdisjoint(other.page_table["kv"])
        view.open(device.write_gate)


def test_left_while_a_store_cannot_stop_its_pages_are_not_given_out():
    store = held_store(TOKENS, kind=StubbornStore)
    other = prompt(4, seed=1)
    with blocking_scene(store) as view:
        with left_by(RuntimeError, view.cache.request(TOKENS)) as request:
            loading(view, store.get_gate, request)
        assert view.pool.quarantine == 3
        with view.cache.request(other) as request:
            request.extend(len(other))
            compute(view.device, request, other)
            view.open(store.get_gate)
            view.until(lambda: not view.pool.quarantine)
            check_pages(view.device, request, other, len(other) - 1)


def test_a_generator_that_is_closed_or_lost_gives_all_back():
    store = held_store(TOKENS)
    with blocking_scene(store) as view:

        def stream():
            with view.cache.request(TOKENS) as request:
                request.restore()
                yield "headers"

        for end in (lambda answer: answer.close(), lambda answer: None):
            answer = stream()
            assert next(answer) == "headers"
            assert view.pool.transit == 3
            end(answer)
            del answer
            gc.collect()
            view.until(lambda: view.pool.free == 8)


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_request_that_is_lost_is_aborted_whichever_thread_finds_it(is_foreign):
    with blocking_scene(memory_store(TOKENS)) as view:
        lost = [view.cache.request(TOKENS).__enter__()]
        lost[0].restore().wait()
        lost.append(lost)
        del lost
        with pytest.warns(ResourceWarning, match="never left"):
            (in_a_thread if is_foreign else call)(gc.collect)
        view.cache.step()
        assert view.cache.statistics().counters.aborted == 1


def test_a_scope_that_ends_in_another_thread_ends_in_the_next_step():
    with blocking_scene(memory_store(TOKENS)) as view:
        scope = view.cache.request(TOKENS)
        request = scope.__enter__()
        request.restore().wait()
        in_a_thread(lambda: scope.__exit__(None, None, None))
        assert view.cache.statistics().replica.num_requests == 1
        view.cache.step()
        counters = view.cache.statistics().counters
        assert (counters.closed, counters.aborted) == (1, 0)


class Interrupting(GateStore):
    """Sends the main thread a signal, once, from within a call."""

    def __init__(self, inner, call):
        super().__init__(inner, is_open=True)
        self.call, self.changed = call, None

    async def contains(self, keys):
        await self._interrupt("contains")
        return await super().contains(keys)

    async def get_into(self, keys, targets, layers=None):
        await self._interrupt("get_into")
        return await super().get_into(keys, targets, layers)

    async def put(self, keys, sources):
        await self._interrupt("put")
        return await super().put(keys, sources)

    async def _interrupt(self, call):
        if call == self.call:
            self.call = None
            await interrupt(self.changed)


@pytest.mark.parametrize("call", ["contains", "get_into"])
def test_a_scope_whose_wait_is_interrupted_goes_on(call):
    store = Interrupting(memory_store(TOKENS), call)
    store.contains_gate.close()
    store.get_gate.close()
    with blocking_scene(store) as view, view.cache.request(TOKENS) as request:
        store.changed = view.cache._queues.changed
        if call == "get_into":
            store.contains_gate.open()
        with pytest.raises(KeyboardInterrupt):
            request.restore().wait()
        if call == "contains":
            assert request.settled
            assert not view.cache._runtime._deadlines
        request.suspend()
        view.open(store.contains_gate)
        view.open(store.get_gate)
        assert request.restore().wait().num_tokens == 3 * PAGE


def test_a_drain_that_is_interrupted_leaves_the_offload_alone():
    store = Interrupting(memory_store(), "put")
    store.put_gate.close()
    with blocking_scene(store) as view:
        store.changed = view.cache._queues.changed
        with view.cache.request(TOKENS) as request:
            view.finish(request, TOKENS, 0)
        with pytest.raises(KeyboardInterrupt):
            view.cache.drain()
        assert not view.cache._runtime._resting
        view.open(store.put_gate)
        assert view.cache.drain() == 0
        assert view.cache.statistics().counters.stored_pages == 3


# Brackets.


def test_pages_of_a_request_that_left_wait_for_the_forward_that_writes_them():
    stored, computed = TOKENS, prompt(3, seed=1)
    with blocking_scene(memory_store(stored), num_pages=8) as view:
        scope = view.cache.request(computed)
        request = scope.__enter__()
        request.extend(len(computed))
        pages, may_write = list(request.page_table["kv"]), threading.Event()

        def model():
            may_write.wait(20)
            for page in pages:
                write(view.device, page, b"\xee" * 64)

        with view.cache.request(stored) as other:
            with view.cache.forward([request]):
                thread = threading.Thread(target=model)
                thread.start()
                scope.__exit__(RuntimeError, None, None)
                assert (view.pool.quarantine, view.pool.free) == (4, 4)
                assert other.restore().wait().num_tokens == 3 * PAGE
                may_write.set()
                thread.join()
                check_pages(view.device, other, stored, 3 * PAGE)
            assert view.pool.quarantine == 0


def test_what_is_computed_in_a_bracket_is_not_offloaded_before_its_end():
    store = held_store(gate="put_gate")
    with blocking_scene(store) as view:
        with view.cache.request(TOKENS) as request:
            request.extend(len(TOKENS))
            with view.cache.forward([request]):
                request.commit(len(TOKENS))
                for _ in range(3):
                    view.cache.step(timeout_s=0.01)
                assert store.put_gate.num_arrived == 0
                compute(view.device, request, TOKENS)
        view.until(lambda: store.put_gate.num_arrived == 1)
        view.open(store.put_gate)


# Provisional requests.


def test_over_an_open_load_a_commit_is_recorded_and_follows_it():
    store = held_store(TOKENS)
    tokens = [*TOKENS, *range(500, 500 + PAGE)]
    with (
        blocking_scene(store) as view,
        view.cache.request(TOKENS, reserve_tokens=PAGE) as request,
    ):
        hit = loading(view, store.get_gate, request)
        assert not request.settled
        request.append(tokens[len(TOKENS) :])
        request.extend(len(tokens))
        compute(view.device, request, tokens, 3)
        request.commit(len(tokens))
        assert view.cache.match_nowait([*tokens, 0]) == 0
        view.open(store.get_gate)
        hit.wait()
        assert request.settled
        assert view.cache.match_nowait([*tokens, 0]) == 4 * PAGE


@pytest.mark.parametrize("num_lost", [1, 3])
def test_tokens_computed_over_a_short_load_enter_neither_tree_nor_store(num_lost):
    tokens, first_lost = [*TOKENS, *range(500, 500 + PAGE)], 3 - num_lost
    inner = held_store(TOKENS)
    store = FaultyStore(inner, Fault.LOST, keys=keys(TOKENS)[first_lost:][:1])
    with blocking_scene(store) as view:
        with view.cache.request(TOKENS, reserve_tokens=PAGE) as request:
            hit = loading(view, inner.get_gate, request)
            request.append(tokens[len(TOKENS) :])
            request.extend(len(tokens))
            compute(view.device, request, tokens, 3)
            request.commit(len(tokens))
            view.open(inner.get_gate)
            assert hit.wait().num_tokens == first_lost * PAGE
            assert view.cache.step().shortened == (request,)
            assert view.cache.match_nowait([*tokens, 0]) == first_lost * PAGE
            view.finish(request, tokens, first_lost * PAGE)
        view.cache.drain()
        assert view.cache.statistics().counters.shortened == 1


# Gates.


def test_gates_open_layer_by_layer_and_the_owner_may_wait_at_them():
    store, device = held_store(TOKENS), gate_device()
    device.write_gate.open()
    with (
        blocking_scene(device=device, linker=staged(store, layer_groups=2)) as view,
        view.cache.request(TOKENS) as request,
    ):
        hit = loading(view, store.get_gate, request)
        gates = view.cache.gates([request])
        assert [gates.is_open(layer) for layer in (0, 1)] == [False, False]

        async def let_one_pass():
            store.get_gate.open()
            store.get_gate.close()

        view._on_loop(let_one_pass())
        gates.wait_blocking(0)
        assert [gates.is_open(layer) for layer in (0, 1)] == [True, False]
        half = view.device.tensor("kv")[request.page_table["kv"][2], 0]
        assert half.contiguous().numpy().tobytes() == content(TOKENS, 2)[:32]
        view.open(store.get_gate)
        gates.wait_blocking(1)
        assert hit.wait().gates.num_open == float("inf")
        check_pages(view.device, request, TOKENS, 3 * PAGE)


def test_the_owner_may_wait_for_a_load_that_has_yet_to_begin():
    """Fails if it takes no turns there: the load before never gives up its place."""
    others = [prompt(1, seed=seed) for seed in (1, 2)]
    store = held_store(TOKENS, *others)
    with (
        blocking_scene(store, limits=Limits(slots=2, offloads=1)) as view,
        view.cache.request(others[0]) as one,
        view.cache.request(others[1]) as two,
        view.cache.request(TOKENS) as three,
    ):
        hits = [request.restore() for request in (one, two, three)]
        view.arrived(store.get_gate, 2)
        assert not hits[2].gates.is_open(0)
        view.open(store.get_gate)
        hits[2].gates.wait_blocking(1)
        check_pages(view.device, three, TOKENS, 3 * PAGE)


def test_a_forward_in_another_thread_waits_for_a_layer():
    store = held_store(TOKENS)
    with blocking_scene(store) as view, view.cache.request(TOKENS) as request:
        hit, order = loading(view, store.get_gate, request), []
        waits = threading.Event()

        def forward():
            waits.set()
            hit.gates.wait_blocking(1)
            order.append("read")

        thread = threading.Thread(target=forward)
        thread.start()
        waits.wait(20)
        order.append("open")
        view.open(store.get_gate)
        thread.join()
        assert order == ["open", "read"]
        hit.wait()


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_gate_opens_in_the_end_and_its_load_counts_as_failed(is_foreign):
    store = held_store(TOKENS)
    with blocking_scene(store, limits=HASTY) as view:
        with view.cache.request(TOKENS) as request:
            hit = loading(view, store.get_gate, request)
            (in_a_thread if is_foreign else call)(lambda: hit.gates.wait_blocking(0))
            assert hit.gates.is_open(1)
            assert hit.wait().num_tokens == 0
            view.finish(request, TOKENS, 0)
        assert view.cache.statistics().counters.cut_pages == 3


def test_nobody_may_await_a_gate_of_a_cache_without_a_loop():
    store = held_store(TOKENS)
    with blocking_scene(store) as view, view.cache.request(TOKENS) as request:
        gates = loading(view, store.get_gate, request).gates
        with pytest.raises(OrderError, match=r"wait_blocking\(\)"):
            asyncio.run(gates.wait(0))
        view.open(store.get_gate)


# Pressure.


@pytest.mark.parametrize("has_store", [False, True])
def test_a_step_loop_serves_eight_requests_from_a_pool_of_one_and_a_half(has_store):
    prompts = [prompt(3, seed=seed) for seed in range(8)]
    store = memory_store(*prompts[::2]) if has_store else None
    with blocking_scene(store, num_pages=6) as view:
        hits, live = {}, {}
        for seed, tokens in enumerate(prompts):
            scope = view.cache.request(tokens)
            live[seed] = scope, scope.__enter__().restore_nowait(), [None]
        steps = 0
        while live:
            steps += 1
            assert steps < 10_000
            view.cache.step(timeout_s=0.02)
            for seed, (scope, hit, stop) in list(live.items()):
                if not hit.settled:
                    continue
                assert scope.reserved
                # A few tokens a step, as long as the others wait.
                stop[0] = min((stop[0] or hit.num_tokens) + 5, len(prompts[seed]))
                scope.extend(stop[0])
                if stop[0] == len(prompts[seed]):
                    hits[seed] = hit.num_tokens
                    view.finish(scope, prompts[seed], hit.num_tokens)
                    scope.__exit__(None, None, None)
                    del live[seed]
        expected = 3 * PAGE if has_store else 0
        assert hits == {seed: 0 if seed % 2 else expected for seed in range(8)}


@pytest.mark.parametrize("deadline_s", [0, 0.02])
def test_a_restore_that_its_own_thread_keeps_from_room_is_a_miss_in_time(deadline_s):
    with blocking_scene(memory_store(TOKENS), num_pages=5) as view:
        with view.cache.request(prompt(3, seed=1)) as first:
            first.restore()
            with view.cache.request(TOKENS) as request:
                hit = request.restore(deadline_s=deadline_s)
                assert (hit.num_tokens, hit.settled) == (0, True)
                assert not request.reserved
                with pytest.raises(OutOfPagesError, match="need 4 pages"):
                    request.extend(len(TOKENS))
        assert view.serve(TOKENS) == 3 * PAGE
        assert not view.log.of(StoreDown)


def test_more_loads_than_slots_take_their_turn():
    prompts = [prompt(1, seed=seed) for seed in range(10)]
    limits = Limits(slots=2, offloads=1, close_s=5.0)
    with blocking_scene(memory_store(*prompts), num_pages=30, limits=limits) as view:
        scopes = [view.cache.request(tokens) for tokens in prompts]
        hits = [scope.__enter__().restore_nowait() for scope in scopes]
        view.until(lambda: all(hit.settled for hit in hits))
        for scope, tokens in zip(scopes, prompts, strict=True):
            check_pages(view.device, scope, tokens, PAGE)
            scope.__exit__(None, None, None)


# Faults and clocks.


@pytest.mark.parametrize("fault", Fault)
def test_requests_are_served_while_the_store_fails_from_the_start(fault):
    with blocking_scene(FaultyStore(memory_store(TOKENS), fault)) as view:
        assert view.serve(TOKENS) in {0, 3 * PAGE}
        assert view.serve(TOKENS) == 3 * PAGE
        assert view.serve(prompt(2, seed=3)) == 0


def test_one_bad_page_costs_its_owner_its_tail_and_the_others_nothing():
    prompts = [prompt(3, seed=seed) for seed in range(16)]
    store = FaultyStore(memory_store(*prompts), Fault.TORN, keys=keys(prompts[7])[1:2])
    with blocking_scene(store, num_pages=100) as view:
        hits = [view.serve(tokens) // PAGE for tokens in prompts]
        assert hits == [3 if seed != 7 else 1 for seed in range(16)]


def test_requests_are_served_within_their_deadlines_by_a_store_that_hangs():
    store = held_store(TOKENS, gate="contains_gate")
    with blocking_scene(store, num_pages=32) as view:
        for seed in range(3):
            assert view.serve(prompt(3, seed=seed), deadline_s=0.01) == 0
        assert view.serve(TOKENS, deadline_s=0.01) == 3 * PAGE
        assert {e.kind.name for e in view.log.of(TransferFailed)} <= {"LOOKUP"}
        view.open(store.contains_gate)


def test_a_step_returns_when_a_deadline_has_come():
    store = held_store(TOKENS, gate="contains_gate")
    with blocking_scene(store) as view, view.cache.request(TOKENS) as request:
        hit = request.restore_nowait(deadline_s=0.02)
        while not hit.settled:
            view.cache.step(timeout_s=1e9)
        assert hit.num_tokens == 0
        view.open(store.contains_gate)


def test_a_deadline_in_the_middle_of_a_load_keeps_what_has_landed():
    store = held_store(TOKENS)
    with blocking_scene(store) as view:
        view.serve(TOKENS[: PAGE + 1], deadline_s=0)
        with view.cache.request(TOKENS) as request:
            hit = loading(view, store.get_gate, request)
            assert hit.num_tokens == 3 * PAGE
            view.expire(request._state)
            assert hit.wait().num_tokens == PAGE
            check_pages(view.device, request, TOKENS, PAGE)
        view.rest()
        assert store.get_gate.num_waiting == 0


def test_a_clock_of_a_restore_that_was_given_back_does_not_end_the_next():
    with (
        blocking_scene(memory_store(TOKENS)) as view,
        view.cache.request(TOKENS) as request,
    ):
        for _ in range(3):
            request.restore_nowait(deadline_s=5e-324)
            request.suspend()
        hit = request.restore(deadline_s=1e300)
        view.cache.step()
        assert hit.wait().num_tokens == 3 * PAGE


def test_a_cache_whose_thread_is_killed_serves_on_without_its_store():
    store = held_store(TOKENS)
    with blocking_scene(store) as view:
        with view.cache.request(TOKENS) as request:
            hit = loading(view, store.get_gate, request)
            thread = view.cache._queues._thread
            thread.cancel()
            assert hit.wait().num_tokens == 0
            view.finish(request, TOKENS, 0)
        view.until(lambda: thread.is_over)
        assert view.serve(TOKENS) == 3 * PAGE
        assert view.serve(prompt(3, seed=5)) == 0
        assert view.cache.drain() == 0


def test_a_store_that_ends_its_thread_ends_nothing_else():
    class Exiting(MemoryStore):
        async def get_into(self, keys, targets, layers=None):
            raise SystemExit(3)

    store = Exiting(2**20)
    asyncio.run(store_pages(store, TOKENS))

    def serve():
        with blocking_scene(store) as view:
            assert view.serve(TOKENS) == 0
            assert view.serve(TOKENS) == 3 * PAGE

    # Whoever closes the cache is told, for somebody asked for an exit.
    with pytest.raises(SystemExit):
        serve()
