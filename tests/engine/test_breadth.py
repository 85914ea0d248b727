"""What embedders expect on day one beside restore and commit, on both faces."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from asyncache import content_tokens, lfu
from asyncache.core import ClosedError, Fact, FactKind, OrderError, StoreError
from asyncache.engine import ReadOnly, WriteBack, WriteThrough
from asyncache.linkers import StoreLinker
from asyncache.stores import FileStore, MemoryStore, TieredStore
from asyncache.testing import Gate, GateStore, cancel_nth
from tests.engine.blocking import blocking_scene
from tests.engine.scene import (
    LAYOUT,
    LIMITS,
    PAGE,
    content,
    gate_store,
    keys,
    memory_store,
    prompt,
    scene,
    store_pages,
    turns,
)

TOKENS = prompt(3)
OTHER = prompt(3, seed=1)


class KeptStore(MemoryStore):
    """Outlives the caches that it is attached to."""

    async def aclose(self) -> None:
        self.num_closed = getattr(self, "num_closed", 0) + 1


async def kept_store(*prompts) -> KeptStore:
    store = KeptStore(2**20)
    for tokens in prompts:
        await store_pages(store, tokens)
    return store


# Prefetch.


async def test_what_is_prefetched_is_a_device_hit_for_whoever_comes_next():
    async with scene(await memory_store(TOKENS)) as view:
        assert await view.cache.prefetch(TOKENS) == 3 * PAGE
        assert view.cache.match_nowait(TOKENS) == 3 * PAGE
        with view.cache.request(TOKENS) as request:
            hit = await request.restore(deadline_s=0)
            assert hit.device_tokens == 3 * PAGE


async def test_a_prefetch_may_be_cancelled_at_every_await():
    async def scenario(view) -> None:
        await view.cache.prefetch(TOKENS)

    def fresh():
        return scene(store)

    store = await kept_store(TOKENS)
    await cancel_nth(scenario, fresh=fresh, check=lambda view: view.rest())


class SlowLinker(StoreLinker):
    """Notes what is in a hurry, and loads once it may."""

    def __init__(self, store, device) -> None:
        super().__init__(store, device)
        self.plans: dict[int, bool] = {}
        self.hurried: list[int] = []

    async def load(self, plan, landed) -> int:
        self.plans[plan.seq] = plan.is_prefetch
        return await super().load(plan, landed)

    def hurry(self, seq: int) -> None:
        self.hurried.append(seq)
        super().hurry(seq)


async def test_a_request_that_joins_a_prefetch_makes_it_urgent():
    store, linkers = await gate_store(TOKENS, is_open=True), []
    store.get_gate.close()

    def linker(device):
        linkers.append(SlowLinker(store, device))
        return linkers[0]

    async with scene(linker=linker) as view, anyio.create_task_group() as group:
        group.start_soon(view.cache.prefetch, TOKENS)
        await store.get_gate.wait_arrived()
        [(seq, is_prefetch)] = linkers[0].plans.items()
        assert is_prefetch
        assert linkers[0].hurried == []
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            await turns(5)
            assert linkers[0].hurried == [seq]
            store.get_gate.open()
            assert (await hit.wait()).num_tokens == 3 * PAGE
    # One that has ended is in no hurry.
    linkers[0].hurry(seq)


async def test_a_prefetch_waits_for_a_load_and_not_the_other_way_round():
    store = await gate_store(TOKENS, OTHER, is_open=True)
    store.get_gate.close()

    def linker(device):
        [pool] = LAYOUT.pools
        page_bytes = LAYOUT.space(pool).page_bytes
        return StoreLinker(store, device, batch_bytes=page_bytes, num_batches=1)

    async with (
        scene(linker=linker, num_pages=24) as view,
        anyio.create_task_group() as group,
    ):
        first = prompt(2, seed=5)
        await store_pages(store, first)
        done: list[str] = []

        async def prefetch() -> None:
            await view.cache.prefetch(TOKENS)
            done.append("prefetch")

        async def restore(tokens, name: str) -> None:
            with view.cache.request(tokens) as request:
                await (await request.restore()).wait()
                done.append(name)

        group.start_soon(restore, first, "first")
        await store.get_gate.wait_arrived()
        group.start_soon(prefetch)
        await turns(10)
        group.start_soon(restore, OTHER, "load")
        await turns(10)
        store.get_gate.open()
        while len(done) < 3:
            await turns(1)
        assert done == ["first", "load", "prefetch"]


# Launches.


async def test_loads_wait_for_a_launch_and_start_as_one_batch():
    store = await gate_store(TOKENS, OTHER, is_open=True)
    store.get_gate.close()
    async with scene(store, launch="batch") as view:
        assert view.cache.launch().num_loads == 0
        with view.cache.request(TOKENS) as one, view.cache.request(OTHER) as other:
            hits = [await request.restore() for request in (one, other)]
            await turns(5)
            assert store.get_gate.num_arrived == 0
            batch = view.cache.launch()
            assert batch.num_loads == 2
            assert not batch.gates.is_open(0)
            await store.get_gate.wait_arrived(2)
            store.get_gate.open()
            await batch.gates.wait(1)
            assert [(await hit.wait()).num_tokens for hit in hits] == [12, 12]


async def test_a_launch_is_refused_where_loads_start_by_themselves():
    async with scene() as view:
        with pytest.raises(OrderError, match='make the cache launch="batch"'):
            view.cache.launch()
    with pytest.raises(ValueError, match='"eager" or "batch", not \'lazy\''):
        async with scene(launch="lazy"):
            pass


# Attach and detach.


async def test_what_was_resident_before_a_store_was_attached_goes_there_too():
    store = await kept_store()
    async with scene() as view:
        assert await view.serve(TOKENS) == 0
        await view.cache.attach(store)
        assert await view.cache.drain() == 0
        assert all(await store.contains(keys(TOKENS)))
        await view.cache.detach()
        assert store.num_closed == 1
        assert await view.serve(TOKENS) == 3 * PAGE


async def test_after_a_detach_the_store_is_neither_asked_nor_written():
    first, second = await kept_store(TOKENS), await kept_store(OTHER)
    async with scene(first, num_pages=12) as view:
        assert await view.serve(TOKENS) == 3 * PAGE
        await view.cache.detach()
        assert await view.serve(OTHER) == 0
        assert not any(await first.contains(keys(OTHER)))
        await view.cache.attach(second)
        assert await view.cache.drain() == 0
        assert all(await second.contains(keys(TOKENS)))
        assert await view.serve(prompt(3, seed=2)) == 0
        await view.cache.detach()
        await view.cache.detach()


@pytest.mark.parametrize("gate", ["contains_gate", "get_gate"])
async def test_a_detach_in_the_middle_of_a_restore_is_a_miss(gate):
    store = await gate_store(TOKENS, is_open=True)
    getattr(store, gate).close()
    async with scene(store) as view, anyio.create_task_group() as group:
        lengths = []

        async def handler() -> None:
            lengths.append(await view.serve(TOKENS))

        group.start_soon(handler)
        await getattr(store, gate).wait_arrived()
        await view.cache.detach()
        await turns(20)
        assert lengths == [0]


async def test_a_store_that_cannot_be_opened_is_not_attached(tmp_path):
    (tmp_path / "file").write_text("in the way")
    async with scene() as view:
        with pytest.raises(StoreError):
            await view.cache.attach(FileStore(tmp_path / "file"))
        assert await view.serve(TOKENS) == 0
        await view.cache.attach(MemoryStore(2**20))
        with pytest.raises(OrderError, match="a store is attached"):
            await view.cache.attach(MemoryStore(2**20))
        with pytest.raises(OrderError, match="a store is attached"):
            await view.cache.attach()
    async with scene() as view:
        with pytest.raises(ValueError, match="give a store or a linker"):
            await view.cache.attach()


async def test_attach_and_detach_may_be_cancelled_at_every_await():
    async def scenario(view) -> None:
        await view.cache.attach(await kept_store(TOKENS))
        await view.cache.prefetch(TOKENS)
        await view.cache.detach()

    async def check(view) -> None:
        await view.rest()
        await view.cache.detach()
        await view.cache.attach(await kept_store(OTHER))
        assert await view.serve(OTHER) == 3 * PAGE

    await cancel_nth(scenario, fresh=scene, check=check)


async def test_a_store_that_is_detached_while_it_is_attached_is_not_attached():
    class Slow(KeptStore):
        gate = Gate()

        async def open(self) -> None:
            await self.gate.pass_through()

    async with scene() as view, anyio.create_task_group() as group:
        store = Slow(2**20)

        async def attach() -> None:
            with pytest.raises(OrderError, match="was detached while"):
                await view.cache.attach(store)

        group.start_soon(attach)
        await store.gate.wait_arrived()
        await view.cache.detach()
        assert view.cache._home is None
        assert await view.serve(TOKENS) == 0
        await view.cache.attach(await kept_store(OTHER))
        assert await view.serve(OTHER) == 3 * PAGE


async def test_two_may_detach_one_store_and_one_of_them_attach_another():
    store, others = await kept_store(TOKENS), await kept_store(OTHER)
    async with scene(store) as view:

        async def exchange() -> None:
            await view.cache.detach()
            await view.cache.attach(others)

        async with anyio.create_task_group() as group:
            group.start_soon(exchange)
            group.start_soon(view.cache.detach)
        assert (store.num_closed, getattr(others, "num_closed", 0)) == (1, 0)
        assert await view.serve(OTHER) == 3 * PAGE
    assert others.num_closed == 1


# Reset.


async def test_after_a_reset_nothing_is_resident_and_the_store_is_still_good():
    async with scene(await memory_store(TOKENS)) as view:
        assert await view.serve(TOKENS) == 3 * PAGE
        view.cache.reset()
        assert view.cache.match_nowait(TOKENS) == 0
        assert view.pool.free == 8
        assert await view.serve(TOKENS) == 3 * PAGE


async def test_new_weights_find_nothing_of_the_old_ones():
    store = await memory_store(TOKENS)
    async with scene(store) as view:
        view.cache.reset(revision="v2")
        assert await view.serve(TOKENS) == 0
        assert await view.cache.drain() == 0
        view.cache.reset(revision="v2")
        assert await view.serve(TOKENS) == 3 * PAGE
        with pytest.raises(TypeError, match="revision must be a str, not int"):
            view.cache.reset(revision=3)
        with pytest.raises(ValueError, match="cannot be encoded"):
            view.cache.reset(revision="\ud800")
        assert view.cache.match_nowait(TOKENS) == 3 * PAGE


async def test_a_reset_in_the_middle_of_everything_leaves_nothing_behind():
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    store.put_gate.close()
    async with scene(store, num_pages=16) as view:
        await view.serve(OTHER)
        await store.put_gate.wait_arrived()
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            assert hit.num_tokens == 3 * PAGE
            view.cache.reset()
            assert hit.num_tokens == 0
            store.get_gate.open()
            store.put_gate.open()
            await hit.wait()
            view.finish(request, TOKENS, 0)
        assert view.cache.match_nowait(OTHER) == 0


# When pages are offloaded.


async def test_a_read_only_cache_reads_and_never_writes():
    store = await memory_store(TOKENS)
    async with scene(store, writes=ReadOnly()) as view:
        assert await view.serve(TOKENS) == 3 * PAGE
        await view.serve(OTHER)
        assert await view.cache.drain() == 0
        assert not any(await store.contains(keys(OTHER)))


async def test_pages_are_written_once_enough_requests_have_used_them():
    store = await memory_store()
    async with scene(store, writes=WriteThrough(threshold=2)) as view:
        for count in (0, 3):
            await view.serve(TOKENS)
            assert await view.cache.drain() == 0
            assert sum(await store.contains(keys(TOKENS))) == count


async def test_write_back_saves_what_eviction_would_take_and_loses_nothing():
    store = await memory_store()
    prompts = [prompt(3, seed=seed) for seed in range(4)]
    async with scene(store, num_pages=14, writes=WriteBack(low_water=5)) as view:
        for tokens in prompts[:3]:
            await view.serve(tokens)
            assert await view.cache.drain() == 0
        assert not any(await store.contains(keys(prompts[2])))
        for tokens in prompts:
            await view.serve(tokens)
            assert await view.cache.drain() == 0
        assert view.cache.statistics().counters.evicted_unsaved_pages == 0
        for tokens in prompts:
            assert await view.serve(tokens) == 3 * PAGE


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: WriteBack(0), "low_water must be at least 1, not 0"),
        (lambda: WriteThrough(0), "threshold must be at least 1, not 0"),
    ],
)
def test_a_way_to_write_that_cannot_be_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


# Policies, siblings, images, tiers.


async def test_a_policy_decides_what_is_evicted():
    async with scene(num_pages=10, policy=lfu) as view:
        for tokens in (TOKENS, TOKENS, OTHER):
            await view.serve(tokens)
        await view.serve(prompt(4, seed=2))
        assert view.cache.match_nowait(TOKENS) == 3 * PAGE
        assert view.cache.match_nowait(OTHER) < 3 * PAGE


async def test_siblings_share_the_pages_of_their_prompt():
    async with scene(num_pages=12) as view:
        with view.cache.request(TOKENS) as first:
            await (await first.restore()).wait()
            view.finish(first, TOKENS, 0)
            with view.cache.request(TOKENS) as second:
                hit = await second.restore()
                assert hit.device_tokens == 3 * PAGE
                second.extend(len(TOKENS))
                tables = [request.page_table["kv"] for request in (first, second)]
                assert tables[0][:3] == tables[1][:3]
                assert tables[0][3] != tables[1][3]


async def test_two_images_in_one_place_of_a_prompt_share_nothing_after_it():
    prompts = [
        [*prompt(1)[:PAGE], *content_tokens(bytes([image]) * 32, PAGE), *OTHER[:5]]
        for image in (1, 2)
    ]
    async with scene(num_pages=12) as view:
        assert [await view.serve(tokens) for tokens in prompts] == [0, PAGE]
        assert await view.serve(prompts[0]) == 3 * PAGE


async def test_memory_stands_in_front_of_files(tmp_path):
    space = 2 * 3 * len(content(TOKENS, 0))
    store = TieredStore([MemoryStore(space), FileStore(tmp_path)])
    async with scene(store, num_pages=5) as view:
        for tokens in (TOKENS, OTHER, prompt(3, seed=2)):
            await view.serve(tokens)
            assert await view.cache.drain() == 0
        assert await view.serve(TOKENS) == 3 * PAGE
    async with scene(FileStore(tmp_path)) as view:
        assert await view.serve(OTHER) == 3 * PAGE


async def test_a_priority_out_of_range_is_refused():
    async with scene() as view:
        with pytest.raises(ValueError, match="priority must be at most"):
            view.cache.request(TOKENS, priority=2**31)
        with pytest.raises(TypeError, match="priority must be an int"):
            view.cache.request(TOKENS, priority=1.5)


# The blocking face.


def test_the_blocking_face_prefetches_launches_and_resets():
    store = asyncio.run(memory_store(TOKENS))
    with blocking_scene(store, launch="batch") as view:
        with view.cache.request(TOKENS) as request:
            hit = request.restore()
            assert view.cache.launch().num_loads == 1
            assert hit.wait().num_tokens == 3 * PAGE
        assert view.cache.match_nowait(TOKENS) == 3 * PAGE
        view.cache.reset()
        assert view.cache.match_nowait(TOKENS) == 0
    store = asyncio.run(memory_store(TOKENS))
    with blocking_scene(store) as view:
        assert view.cache.prefetch(TOKENS) == 3 * PAGE


def test_a_store_comes_and_goes_on_the_blocking_face():
    first, second = (asyncio.run(kept_store(tokens)) for tokens in (TOKENS, OTHER))
    with blocking_scene(num_pages=12) as view:
        assert view.serve(prompt(2, seed=3)) == 0
        view.cache.attach(first)
        assert view.serve(TOKENS) == 3 * PAGE
        assert view.cache.drain() == 0
        view.cache.detach()
        view.cache.detach()
        assert first.num_closed == 1
        assert view.serve(OTHER) == 0
        view.cache.attach(second)
        with pytest.raises(OrderError, match="a store is attached"):
            view.cache.attach(second)
        assert view.cache.drain() == 0
        stored = asyncio.run(second.contains(keys(prompt(2, seed=3))))
        assert all(stored)


def test_a_store_that_cannot_be_opened_is_not_attached_to_the_blocking_face(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with blocking_scene() as view:
        with pytest.raises(StoreError):
            view.cache.attach(FileStore(tmp_path / "file"))
        assert view.serve(TOKENS) == 0
        view.cache.attach(MemoryStore(2**20))
        assert view.serve(TOKENS) == 3 * PAGE


async def test_events_tell_of_a_reset():
    async with scene() as view:
        await view.serve(TOKENS)
        view.cache.reset()
        (told,) = [e for e in view.log.of(Fact) if e.kind is FactKind.RESET]
        assert told.num_pages == 3


async def test_closing_while_a_store_is_being_attached_attaches_nothing():
    store = GateStore(MemoryStore(2**20), is_open=True)
    async with scene(check=False) as view, anyio.create_task_group() as group:

        async def attach() -> None:
            with pytest.raises(Exception, match="closed"):
                await view.cache.attach(store)

        group.start_soon(attach)
        await view.cache.aclose()


@pytest.mark.parametrize("end", ["detach", "aclose"])
async def test_a_store_that_never_opens_keeps_nobody_waiting(end):
    class Hanging(KeptStore):
        gate = Gate()

        async def open(self) -> None:
            await self.gate.pass_through()

    store = Hanging(2**20)
    async with scene(check=end == "detach") as view, anyio.create_task_group() as group:

        async def attach() -> None:
            with pytest.raises((OrderError, ClosedError)):
                await view.cache.attach(store)

        group.start_soon(attach)
        await store.gate.wait_arrived()
        began = anyio.current_time()
        await getattr(view.cache, end)()
        assert anyio.current_time() - began < LIMITS.close_s / 2
        assert store.gate.num_waiting == 0
