"""Two requests, one cold prefix: one transfer, and neither can hurt the other."""

from __future__ import annotations

import anyio
import pytest

from asyncache.core import AbortedError
from tests.engine.scene import PAGE, check_pages, gate_store, prompt, scene


async def both_restoring(view, stack, tokens):
    requests = [stack.enter_context(view.cache.request(tokens)) for _ in range(2)]
    return requests, [await request.restore() for request in requests]


async def test_two_requests_for_one_cold_prefix_make_one_transfer():
    tokens = prompt(3)
    store = await gate_store(tokens, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(tokens) as one, view.cache.request(tokens) as two:
            first, second = await one.restore(), await two.restore()
            assert first.num_tokens == second.num_tokens == 3 * PAGE
            assert not first.settled
            assert not second.gates.is_open(0)
            assert one.page_table == two.page_table
            await store.get_gate.wait_arrived()
            store.get_gate.open()
            await first.wait()
            await second.wait()
            assert store.get_gate.num_arrived == 1
            assert view.cache.statistics().counters.loaded_pages == 3
            check_pages(view.device, two, tokens, 3 * PAGE)


@pytest.mark.parametrize("leaver", [0, 1])
async def test_the_end_of_one_does_not_hurt_the_other(leaver):
    tokens = prompt(3)
    store = await gate_store(tokens, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        scopes = [view.cache.request(tokens) for _ in range(2)]
        requests = [scope.__enter__() for scope in scopes]
        hits = [await request.restore() for request in requests]
        await store.get_gate.wait_arrived()
        scopes[leaver].__exit__(RuntimeError, None, None)
        with pytest.raises(AbortedError):
            await hits[leaver].wait()
        stays = 1 - leaver
        assert hits[stays].num_tokens == 3 * PAGE
        assert view.pool.transit == 3
        store.get_gate.open()
        await hits[stays].wait()
        view.finish(requests[stays], tokens, 3 * PAGE)
        scopes[stays].__exit__(None, None, None)


async def test_when_both_leave_the_transfer_stops_and_its_pages_go_back():
    tokens = prompt(3)
    store = await gate_store(tokens, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(tokens) as one, view.cache.request(tokens) as two:
            await one.restore()
            await two.restore()
            await store.get_gate.wait_arrived()
        await view.rest()
        assert view.pool.free == 8


async def test_one_deadline_ends_one_wait_and_the_load_goes_on():
    tokens = prompt(3)
    store = await gate_store(tokens, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(tokens) as one, view.cache.request(tokens) as two:
            hurried = await one.restore(deadline_s=0.02)
            patient = await two.restore()
            await hurried.wait()
            assert (hurried.num_tokens, patient.num_tokens) == (0, 3 * PAGE)
            store.get_gate.open()
            await patient.wait()
            check_pages(view.device, two, tokens, 3 * PAGE)
            # What landed is there for the one that had given up, too.
            one.suspend()
            again = await (await one.restore(deadline_s=0)).wait()
            assert again.num_tokens == 3 * PAGE


async def test_a_longer_prompt_loads_only_what_the_shorter_one_does_not():
    tokens = prompt(5)
    store = await gate_store(tokens, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with (
            view.cache.request(tokens[: 2 * PAGE + 1]) as short,
            view.cache.request(tokens) as long,
        ):
            await short.restore()
            hit = await long.restore()
            assert hit.num_tokens == 5 * PAGE
            assert view.pool.transit == 5
            store.get_gate.open()
            with anyio.fail_after(5):
                await hit.wait()
            check_pages(view.device, long, tokens, 5 * PAGE)


@pytest.mark.parametrize("deadline_s", [0, 0.02])
async def test_who_has_no_time_for_a_lookup_has_none_for_a_load_of_others(deadline_s):
    tokens = prompt(3)
    store = await gate_store(tokens, is_open=True)
    store.get_gate.close()
    async with scene(store, num_pages=16) as view:
        with view.cache.request(tokens) as patient:
            load = await patient.restore()
            await store.get_gate.wait_arrived()
            store.contains_gate.close()
            with view.cache.request(prompt(3)[: 2 * PAGE] + prompt(3, seed=2)) as other:
                hit = await other.restore(deadline_s=deadline_s)
                assert hit.settled
                assert hit.num_tokens == 0
                assert other.page_table["kv"].tolist() == []
            assert load.num_tokens == 3 * PAGE
            store.contains_gate.open()
            store.get_gate.open()
            await load.wait()
