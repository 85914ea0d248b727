"""What a store can do wrong costs its owners their tail, and nobody anything else."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from asyncache.core import StoreError, namespace_tag
from asyncache.engine import (
    KVCache,
    Limits,
    ReadOnly,
    StoreDown,
    StoreFull,
    StoreHealth,
    StoreSmaller,
    TransferFailed,
    TransferKind,
)
from asyncache.linkers import Linker
from asyncache.stores import MemoryStore, Status, TieredStore
from asyncache.testing import FailPoint, Fault, FaultyStore, GateStore, fail_nth
from tests.engine.scene import (
    LAYOUT,
    LIMITS,
    PAGE,
    StubbornStore,
    check_pages,
    content,
    gate_device,
    gate_store,
    keys,
    memory_store,
    prompt,
    scene,
    staged,
    turns,
)

TOKENS = prompt(3)


@pytest.mark.parametrize(
    "fault", [Fault.LOST, Fault.CORRUPT, Fault.TORN, Fault.MISSING]
)
async def test_one_bad_page_costs_its_owner_its_tail_and_the_others_nothing(fault):
    prompts = [prompt(3, seed=seed) for seed in range(32)]
    inner = await memory_store(*prompts)
    store = FaultyStore(inner, fault, keys=keys(prompts[7])[1:2])
    async with scene(store, num_pages=200) as view:
        hits = {}

        async def handle(seed):
            hits[seed] = await view.serve(prompts[seed])

        async with anyio.create_task_group() as group:
            for seed in range(32):
                group.start_soon(handle, seed)
        assert hits == {seed: (3 if seed != 7 else 1) * PAGE for seed in range(32)}


RAISED = [
    OSError("disk"),
    ValueError("shape"),
    RuntimeError("bug"),
    KeyError("gone"),
    TimeoutError(),
    StopIteration(),
    AssertionError("never"),
    ExceptionGroup("many", [OSError("one")]),
    asyncio.InvalidStateError(),
]


class RaisingStore(MemoryStore):
    """Raises in one of its calls."""

    def __init__(self, call, error):
        super().__init__(2**20)
        self.call, self.error = call, error

    async def contains(self, keys):
        self._raise("contains")
        return await super().contains(keys)

    async def get_into(self, keys, targets, layers=None):
        self._raise("get_into")
        return await super().get_into(keys, targets, layers)

    async def put(self, keys, sources):
        self._raise("put")
        return await super().put(keys, sources)

    def _raise(self, call):
        if call == self.call:
            raise self.error


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", ["contains", "get_into", "put"])
async def test_whatever_a_store_raises_is_an_event_and_a_miss(call, error):
    store = RaisingStore(None, error)
    for key in keys(TOKENS):
        page = bytearray(key.space.page_bytes)
        await store.put([key], [[memoryview(page)]])
    store.call = call
    if call == "put":
        await store.remove(keys(TOKENS))
    async with scene(store) as view:
        assert await view.serve(TOKENS) == 0
        await view.cache.drain()
        failed = view.log.of(TransferFailed)
        kinds = {
            "contains": TransferKind.LOOKUP,
            "get_into": TransferKind.LOAD,
            "put": TransferKind.OFFLOAD,
        }
        assert {event.kind for event in failed} == {kinds[call]}
        assert all(event.num_pages == 3 for event in failed)
        if call != "get_into":  # its pages of zeros are still there
            assert view.cache.statistics().counters.transfers_failed == len(failed)
        # Served all the same, and from the device the next time.
        assert await view.serve(TOKENS) == 3 * PAGE


async def test_the_store_may_fail_in_each_of_its_calls():
    tokens = prompt(4)

    def fresh(point):
        inner = MemoryStore(2**20)
        store = FaultyStore(inner, Fault.RAISES, point=point)
        return scene(store, writes=None)

    async def scenario(view):
        assert await view.serve(TOKENS) == 0
        await view.cache.drain()
        assert await view.serve(tokens) in {0, 3 * PAGE}

    async def check(view):
        await view.rest()
        assert await view.serve(TOKENS) == 3 * PAGE

    assert await fail_nth(scenario, fresh=fresh, check=check) >= 3
    assert FailPoint(1).num_calls == 0


@pytest.mark.parametrize("fault", Fault)
async def test_requests_are_served_while_the_store_fails_from_the_start(fault):
    store = FaultyStore(await memory_store(TOKENS), fault)
    async with scene(store) as view:
        assert await view.serve(TOKENS) in {0, 3 * PAGE}
        assert await view.serve(TOKENS) == 3 * PAGE
        assert await view.serve(prompt(2, seed=3)) == 0


async def test_requests_are_served_within_their_deadlines_by_a_store_that_hangs():
    store = await gate_store(TOKENS)
    async with scene(store, num_pages=32) as view:
        with anyio.fail_after(5):
            for seed in range(3):
                assert await view.serve(prompt(3, seed=seed), deadline_s=0.01) == 0
            assert await view.serve(TOKENS, deadline_s=0.01) == 3 * PAGE
        store.put_gate.open()


async def test_a_deadline_of_zero_asks_nobody_and_takes_what_is_resident():
    store = await gate_store(TOKENS)
    store.put_gate.open()
    async with scene(store) as view:
        await view.serve(TOKENS[: PAGE + 1], deadline_s=0)
        assert await view.serve(TOKENS, deadline_s=0) == PAGE
        assert store.contains_gate.num_arrived == 0
        store.contains_gate.open()


async def test_a_deadline_in_the_middle_of_a_load_keeps_what_has_landed():
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        await view.serve(TOKENS[: PAGE + 1], deadline_s=0)
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            assert hit.num_tokens == 3 * PAGE
            view.expire(request._state)
            await hit.wait()
            assert hit.num_tokens == PAGE
            check_pages(view.device, request, TOKENS, PAGE)
        await view.rest()
        assert store.get_gate.num_waiting == 0


async def test_the_breaker_opens_after_failures_and_closes_by_itself():
    clock = []
    store = FaultyStore(await memory_store(TOKENS), Fault.RAISES)
    limits = Limits(breaker_failures=2, breaker_s=3.0, close_s=5.0)
    async with scene(store, limits=limits) as view:
        health = view.cache._runtime.health
        now = asyncio.get_running_loop().time()
        health._clock = lambda: clock[-1] if clock else now
        for seed in range(2):
            with view.cache.request(prompt(2, seed=seed)) as request:
                await request.restore()
        assert view.log.of(StoreDown) == [StoreDown(2, 3.0)]
        assert view.cache.statistics().store == StoreHealth(
            is_down=True, is_full=False, num_failures=2, retry_s=3.0
        )
        store.fault = None
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            assert hit.num_tokens == 0
        assert health.offload_delay_s(0, b"") == pytest.approx(3.0)
        assert health.offload_delay_s(10_000, b"") > 3.0
        clock.append(now + 3.1)
        with view.cache.request(TOKENS) as request:
            hit = await (await request.restore()).wait()
            assert hit.num_tokens == 3 * PAGE
        assert not view.cache.statistics().store.is_down


async def test_a_store_that_was_down_is_tried_by_one_at_a_time():
    inner = FaultyStore(await memory_store(TOKENS), Fault.RAISES)
    store = GateStore(inner, is_open=True)
    limits = Limits(breaker_failures=1, breaker_s=3.0, close_s=5.0)
    async with scene(store, limits=limits, writes=ReadOnly()) as view:
        assert await view.serve(prompt(2, seed=1), deadline_s=1) == 0
        health, now = view.cache._runtime.health, asyncio.get_running_loop().time()
        health._clock = lambda: now + 3.1
        store.contains_gate.close()
        num = store.contains_gate.num_arrived
        async with anyio.create_task_group() as group:
            group.start_soon(view.serve, TOKENS)
            await store.contains_gate.wait_arrived(num + 1)
            # The others do not wait for what becomes of it.
            assert await view.serve(prompt(2, seed=2)) == 0
            assert store.contains_gate.num_arrived == num + 1
            # Who gave up trying has learnt nothing: the next one may.
            group.cancel_scope.cancel()
        assert view.cache.statistics().store.is_down
        inner.fault = None
        store.contains_gate.open()
        assert await view.serve(TOKENS) == 3 * PAGE
        assert not view.cache.statistics().store.is_down


async def test_a_store_that_fails_its_trial_is_left_alone_again():
    store = FaultyStore(await memory_store(TOKENS), Fault.RAISES)
    limits = Limits(breaker_failures=2, breaker_s=3.0, close_s=5.0)
    async with scene(store, limits=limits, writes=ReadOnly()) as view:
        health, now = view.cache._runtime.health, [asyncio.get_running_loop().time()]
        health._clock = lambda: now[0]
        for seed in range(2):
            await view.serve(prompt(2, seed=seed))
        now[0] += 3.1
        await view.serve(prompt(2, seed=3))
        assert view.cache.statistics().store.retry_s == pytest.approx(3.0)
        assert len(view.log.of(StoreDown)) == 2


async def test_those_who_failed_together_do_not_come_back_together():
    async with scene(MemoryStore(1)) as view:
        health = view.cache._runtime.health
        delays = set()
        for now in range(100):
            health._clock = lambda now=now: 1000 + now * 0.0123457
            delays.add(round(health.offload_delay_s(3, b"") / (4 * LIMITS.retry_s), 3))
        assert len(delays) > 30
        assert min(delays) >= 1
        assert max(delays) <= 1.25


async def test_a_full_disk_is_one_event_and_pages_are_stored_again_later():
    store = FaultyStore(MemoryStore(2**20), Fault.REJECTED)
    limits = Limits(breaker_s=0.05, close_s=5.0, retry_s=0.001)
    async with scene(store, limits=limits) as view:
        await view.serve(TOKENS)
        while not view.log.of(StoreFull):
            await turns(1)
        assert view.log.of(StoreFull) == [StoreFull(3, 0.05)]
        assert view.log.of(TransferFailed) == []
        assert view.log.of(StoreDown) == []
        store.fault = None
        await view.cache.drain()
        assert await store.contains(keys(TOKENS)) == [True] * 3


async def test_pages_refused_at_once_by_a_full_disk_are_one_event_too():
    store = GateStore(FaultyStore(MemoryStore(2**20), Fault.REJECTED), is_open=True)
    store.put_gate.close()
    limits = Limits(breaker_s=30, close_s=5.0)
    async with scene(store, num_pages=16, limits=limits, check=False) as view:
        for seed in range(3):
            await view.serve(prompt(3, seed=seed))
        await store.put_gate.wait_arrived(3)
        store.put_gate.open()
        await turns(10)
        assert view.log.of(StoreFull) == [StoreFull(3, 30)]


class SmallerStore(MemoryStore):
    missing_bytes = 7


async def test_a_store_that_starts_smaller_is_told():
    tiers = TieredStore([FaultyStore(SmallerStore(2**20), None), SmallerStore(2**20)])
    async with scene(tiers) as view:
        assert view.log.of(StoreSmaller) == [StoreSmaller(14)]
    async with scene(await memory_store(TOKENS)) as view:
        assert await view.serve(TOKENS) == 3 * PAGE
        assert view.log.of(StoreSmaller) == []


class QuotaStore(MemoryStore):
    """Keeps nothing of one namespace."""

    async def put(self, keys, sources):
        if any(key.tag == namespace_tag("greedy") for key in keys):
            return [Status.REJECTED] * len(keys)
        return await super().put(keys, sources)


async def test_a_namespace_whose_pages_are_refused_is_in_nobodys_way():
    store = QuotaStore(2**20)
    limits = Limits(breaker_s=30, close_s=5.0)
    async with scene(store, num_pages=16, limits=limits, check=False) as view:
        for _ in range(2):
            await view.serve(prompt(3, seed=1), namespace="greedy")
            while not view.log.of(StoreFull):
                await turns(1)
        await view.serve(TOKENS)
        while await store.contains(keys(TOKENS)) != [True] * 3:
            await turns(1)
        assert view.log.of(StoreFull) == [StoreFull(3, 30)]
        assert view.cache.statistics().store.is_full


class InstantStore(MemoryStore):
    """Answers without ever giving way to others."""

    def __init__(self):
        super().__init__(2**20)
        self.pages = {}

    async def contains(self, keys):
        return [key in self.pages for key in keys]

    async def get_into(self, keys, targets, layers=None):
        for key, [target] in zip(keys, targets, strict=True):
            target[:] = self.pages[key]
        return [Status.HIT] * len(keys)

    async def put(self, keys, sources):
        for key, [source] in zip(keys, sources, strict=True):
            self.pages[key] = bytes(source)
        return [Status.HIT] * len(keys)


async def test_a_store_may_answer_without_ever_suspending():
    store = InstantStore()
    async with scene(store) as view:
        await view.serve(TOKENS)
        await view.cache.drain()
        assert len(store.pages) == 3
    async with scene(store) as view:
        assert await view.serve(TOKENS) == 3 * PAGE


async def test_an_answer_that_comes_after_its_request_ended_is_counted():
    async with scene(InstantStore()) as view:
        with view.cache.request(TOKENS) as request:
            restoring = request.restore().__await__()
            next(restoring)
            restoring.close()
        await turns(3)
        assert view.cache.statistics().counters.late_completions == 1


async def test_pages_that_a_full_disk_made_forgotten_are_offered_by_the_next_commit():
    store = FaultyStore(MemoryStore(2**20), Fault.REJECTED)
    async with scene(store, limits=LIMITS) as view:
        await view.serve(TOKENS)
        await view.cache.drain()
        assert view.cache.statistics().counters.forgotten_pages == 3
        store.fault = None
        await view.serve(TOKENS)
        await view.cache.drain()
        assert await store.contains(keys(TOKENS)) == [True] * 3


async def test_an_offload_whose_parent_was_evicted_from_the_store_stores_it_first():
    store = MemoryStore(2**20)
    tokens = prompt(4)
    async with scene(store) as view:
        await view.serve(TOKENS)
        await view.cache.drain()
        await store.remove(keys(TOKENS)[-1:])
        await view.serve(tokens)
        await view.cache.drain()
        assert await store.contains(keys(tokens)) == [True] * 4
        assert view.cache.statistics().counters.offloads_failed == 1


async def test_a_slow_put_keeps_nobody_from_the_pool():
    store = await gate_store(is_open=True)
    store.put_gate.close()
    async with scene(store, num_pages=12) as view:
        for seed in range(3):
            await view.serve(prompt(3, seed=seed))
        # What an offload reads is pinned; the rest makes room.
        await store.put_gate.wait_arrived()
        store.put_gate.open()
        await view.rest()
        for seed in range(3, 8):
            await view.serve(prompt(3, seed=seed))


class FutureStore(GateStore):
    """Awaits a bare future in each read, which anybody may cancel."""

    def __init__(self, inner):
        super().__init__(inner, is_open=True)
        self.futures = []

    async def get_into(self, keys, targets, layers=None):
        future = asyncio.get_running_loop().create_future()
        self.futures.append(future)
        await future
        return await super().get_into(keys, targets, layers)


async def test_a_future_that_a_third_party_cancels_kills_that_load_and_no_other():
    others = prompt(2, seed=1)
    store = FutureStore(await memory_store(TOKENS, others))
    async with scene(store) as view:
        with (
            view.cache.request(TOKENS) as request,
            view.cache.request(others) as other,
        ):
            hit, other_hit = await request.restore(), await other.restore()
            while len(store.futures) < 2:
                await turns(1)
            store.futures[0].cancel()
            await hit.wait()
            assert (hit.num_tokens, other_hit.num_tokens) == (0, 2 * PAGE)
            assert not other_hit.settled
            failed = view.log.of(TransferFailed)
            assert [type(event.error) for event in failed] == [asyncio.CancelledError]
            store.futures[1].set_result(None)
            await other_hit.wait()
            check_pages(view.device, other, others, 2 * PAGE)


async def test_a_transfer_task_that_is_cancelled_by_name_ends_alone():
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            await store.get_gate.wait_arrived()
            for task in asyncio.all_tasks():
                if task.get_name().startswith("asyncache "):
                    task.cancel()
            await hit.wait()
            assert hit.num_tokens == 0
        store.get_gate.open()
        request = None
        assert await view.serve(TOKENS) == 3 * PAGE


# What asyncio says of a coroutine whose task is cancelled before its first step.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
async def test_a_transfer_that_is_cancelled_before_its_first_step_ends_alone():
    store = await gate_store(TOKENS, is_open=True)
    async with scene(store) as view:
        with view.cache.request(TOKENS) as request:
            restoring = request.restore().__await__()
            next(restoring)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                if task.get_name().startswith("asyncache "):
                    task.cancel()
            await turns(4)
            assert store.contains_gate.num_arrived == 0
            assert request._landing.settled.is_set()
            restoring.close()
        [failed] = view.log.of(TransferFailed)
        assert failed.kind is TransferKind.LOOKUP
        assert await view.serve(TOKENS) == 3 * PAGE


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("num_turns", range(6))
@pytest.mark.parametrize("kill_all", [False, True])
async def test_a_cache_whose_home_is_killed_serves_on_without_its_store(
    kill_all, num_turns
):
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(TOKENS) as request:
            restoring = request.restore().__await__()
            next(restoring)
            await turns(num_turns)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                if kill_all or task.get_name() == "asyncache":
                    task.cancel()
            while not request._landing.settled.is_set():
                await turns(1)
            restoring.close()
            assert list(request.page_table["kv"]) == []
            view.finish(request, TOKENS, 0)
        assert await view.serve(TOKENS) == 3 * PAGE
        assert await view.serve(prompt(3, seed=5)) == 0
        assert await view.cache.drain() == 0


async def test_nothing_begins_once_the_home_is_killed_though_a_read_goes_on():
    store = StubbornStore(await memory_store(TOKENS, prompt(3, seed=1)))
    store.contains_gate.open()
    async with scene(store, num_pages=16) as view:
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            await store.get_gate.wait_arrived()
            [home] = [t for t in asyncio.all_tasks() if t.get_name() == "asyncache"]
            home.cancel()
            await turns(2)
            assert not view.cache._runtime.transfers.is_running
            with view.cache.request(prompt(3, seed=1)) as other:
                assert (await other.restore()).num_tokens == 0
            assert store.contains_gate.num_arrived == 1
            assert not home.done()
            store.get_gate.open()
            await hit.wait()
            assert hit.num_tokens == 0


class ShortStore(MemoryStore):
    """Answers for fewer pages than it was asked for, or for more."""

    def __init__(self, extra):
        super().__init__(2**20)
        self.extra = extra

    def cut(self, answers, more):
        return (
            answers[: self.extra] if self.extra < 0 else answers + [more] * self.extra
        )

    async def contains(self, keys):
        return self.cut(await super().contains(keys), True)

    async def get_into(self, keys, targets, layers=None):
        return self.cut(await super().get_into(keys, targets, layers), Status.HIT)

    async def put(self, keys, sources):
        return self.cut(await super().put(keys, sources), Status.HIT)


@pytest.mark.parametrize("extra", [-1, 2])
async def test_a_store_that_miscounts_is_no_worse_than_one_that_fails(extra):
    store = ShortStore(extra)
    for position, key in enumerate(keys(TOKENS)):
        await MemoryStore.put(store, [key], [[memoryview(content(TOKENS, position))]])
    async with scene(store) as view:
        await view.serve(TOKENS)
        await view.serve(prompt(2, seed=4))
        await view.cache.drain()


@pytest.mark.parametrize("error", [StoreError("no such directory"), OSError("gone")])
async def test_a_store_that_cannot_be_opened_says_so_and_is_closed(error):
    class Broken(MemoryStore):
        closed = 0

        async def open(self):
            raise error

        async def aclose(self):
            type(self).closed += 1

    cache = KVCache(LAYOUT, device=gate_device(), store=Broken(2**20))
    with pytest.raises(type(error), match=str(error)):
        await cache.open()
    assert Broken.closed == 1
    await cache.aclose()


async def test_a_cache_without_a_store_moves_nothing():
    async with scene() as view:
        await view.serve(TOKENS)
        assert await view.cache.drain() == 0
        assert view.cache.statistics().counters.stored_pages == 0


async def test_hung_offloads_leave_a_staging_buffer_to_loads():
    store = await gate_store(TOKENS, is_open=True)
    store.put_gate.close()
    device = gate_device(24, is_open=True)
    async with scene(device=device, linker=staged(store, num_batches=2)) as view:
        for seed in range(1, 5):
            await view.serve(prompt(2, seed=seed))
        await store.put_gate.wait_arrived()
        assert await view.serve(TOKENS, deadline_s=5) == 3 * PAGE
        assert store.put_gate.num_waiting == 1
        store.put_gate.open()


async def test_linkers_may_be_given_in_place_of_stores_but_not_beside():
    store = MemoryStore(2**20)
    device = gate_device()
    with pytest.raises(ValueError, match="not both"):
        KVCache(LAYOUT, device=device, store=store, linker=staged(store)(device))
    assert issubclass(type(staged(store)(device)), Linker)
