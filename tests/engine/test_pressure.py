"""A small pool: who waits gets its turn, who is served keeps what it was promised."""

from __future__ import annotations

import anyio
import pytest

from asyncache.core import OutOfPagesError, TooManyRequestsError
from asyncache.engine import Limits
from asyncache.stores import MemoryStore
from tests.engine.scene import (
    PAGE,
    StubbornStore,
    check_pages,
    compute,
    gate_store,
    memory_store,
    prompt,
    scene,
    turns,
)


@pytest.mark.parametrize("has_store", [False, True])
async def test_a_pool_of_one_and_a_half_prompts_serves_eight_requests(has_store):
    prompts = [prompt(3, seed=seed) for seed in range(8)]
    store = await memory_store(*prompts[::2]) if has_store else None
    async with scene(store, num_pages=6) as view:
        hits = {}

        async def handle(seed):
            with view.cache.request(prompts[seed]) as request:
                hit = await (await request.restore()).wait()
                hits[seed] = hit.num_tokens
                for stop in range(hit.num_tokens + 1, len(prompts[seed]) + 1, 5):
                    request.extend(stop)
                    await turns(1)
                view.finish(request, prompts[seed], hit.num_tokens)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for seed in range(8):
                    group.start_soon(handle, seed)
        expected = 3 * PAGE if has_store else 0
        assert hits == {seed: 0 if seed % 2 else expected for seed in range(8)}


async def test_extending_within_a_reservation_never_fails_whatever_others_do():
    async with scene(num_pages=8) as view:
        tokens = prompt(5)
        with view.cache.request(tokens) as request:
            await (await request.restore()).wait()
            with view.cache.request(prompt(1, seed=1)) as other:
                other.extend(2)
                other.append(range(40))
                before = view.dump()
                with pytest.raises(OutOfPagesError) as refused:
                    other.extend(40)
                assert (refused.value.needed, refused.value.available) == (8, 0)
                assert view.dump() == before
                request.extend(len(tokens))
                compute(view.device, request, tokens)
                request.commit(len(tokens))
                check_pages(view.device, request, tokens, 5 * PAGE)


async def test_a_restore_without_room_waits_and_past_its_deadline_is_a_miss():
    tokens = prompt(3)
    async with scene(await memory_store(tokens), num_pages=5) as view:
        with view.cache.request(prompt(3, seed=1)) as first:
            await first.restore()
            with view.cache.request(tokens) as request:
                hit = await request.restore(deadline_s=0.02)
                assert hit.num_tokens == 0
                assert hit.settled
                assert not request.reserved
                with pytest.raises(OutOfPagesError, match="need 4 pages"):
                    request.extend(len(tokens))
        assert await view.serve(tokens) == 3 * PAGE


async def test_a_promise_that_cannot_be_kept_any_more_is_not_shown():
    tokens = prompt(3)
    store = StubbornStore(await memory_store(tokens), is_open=True)
    store.get_gate.close()
    async with scene(store, num_pages=7) as view:
        with view.cache.request(tokens) as one, view.cache.request(tokens) as two:
            hits = [await request.restore() for request in (one, two)]
            await store.get_gate.wait_arrived()
            assert one.reserved
            assert two.reserved
            for request, hit in zip((one, two), hits, strict=True):
                view.expire(request._state)
                assert (await hit.wait()).num_tokens == 0
            # The store still writes three pages; the hit that fell first made room.
            assert (one.reserved, two.reserved) == (False, True)
            with pytest.raises(OutOfPagesError):
                one.extend(len(tokens))
            two.extend(len(tokens))
            store.get_gate.open()


@pytest.mark.parametrize("deadline_s", [0, 0.01])
async def test_a_restore_without_room_or_store_is_a_miss_in_time(deadline_s):
    async with scene(num_pages=5) as view:
        with view.cache.request(prompt(3)) as first:
            await first.restore()
            with view.cache.request(prompt(3, seed=1)) as second:
                hit = await second.restore(deadline_s=deadline_s)
                assert (hit.num_tokens, second.reserved) == (0, False)


async def test_a_deadline_of_zero_does_not_wait_for_what_others_load():
    tokens = prompt(3)
    store = await gate_store(tokens, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(tokens) as one, view.cache.request(tokens) as two:
            patient = await one.restore()
            hasty = await two.restore(deadline_s=0)
            assert hasty.settled
            assert hasty.num_tokens == 0
            store.get_gate.open()
            await patient.wait()
            assert (patient.num_tokens, hasty.num_tokens) == (3 * PAGE, 0)


async def test_a_suspended_request_lets_the_next_one_in():
    async with scene(num_pages=5) as view:
        with view.cache.request(prompt(3)) as first:
            await first.restore()
            with view.cache.request(prompt(3, seed=1)) as second:
                hits = []

                async def wait():
                    hits.append(await second.restore())

                async with anyio.create_task_group() as group:
                    group.start_soon(wait)
                    await turns(5)
                    assert hits == []
                    first.suspend()
                assert second.reserved


async def test_no_more_requests_are_open_than_the_limits_say():
    limits = Limits(requests=1, slots=2, offloads=1, mask_ints=1)
    async with scene(MemoryStore(2**20), limits=limits) as view:
        with (
            view.cache.request(prompt(1)),
            pytest.raises(TooManyRequestsError, match="1 requests are open"),
            view.cache.request(prompt(1)),
        ):
            pass
        for seed in range(4):
            await view.serve(prompt(2, seed=seed))


async def test_more_loads_than_slots_take_their_turn():
    prompts = [prompt(1, seed=seed) for seed in range(10)]
    store = await gate_store(*prompts, is_open=True)
    limits = Limits(slots=2, offloads=1, close_s=5.0)
    async with scene(store, num_pages=30, limits=limits) as view:
        hits = []

        async def handle(tokens):
            hits.append(await view.serve(tokens))

        async with anyio.create_task_group() as group:
            for tokens in prompts:
                group.start_soon(handle, tokens)
            await turns(5)
            assert view.cache.statistics().transfers <= 10
        assert hits == [PAGE] * 10


async def test_what_is_evicted_unsaved_is_told():
    async with scene(await gate_store(), num_pages=4, check=False) as view:
        await view.serve(prompt(3), deadline_s=0)
        counters = view.cache.statistics().counters
        assert counters.evicted_unsaved_pages == 0
        # Its put hangs and pins it; nothing can be evicted.
        with view.cache.request(prompt(3, seed=1)) as request:
            await turns(3)
            with pytest.raises(OutOfPagesError):
                request.extend(13)
    async with scene(num_pages=4) as view:
        await view.serve(prompt(3))
        await view.serve(prompt(3, seed=1))
        assert view.cache.statistics().counters.evicted_pages == 3
