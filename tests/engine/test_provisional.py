"""What was computed over bytes that never came enters neither tree nor store."""

from __future__ import annotations

import gc

import pytest

from asyncache.core import OrderError
from asyncache.testing import Fault, FaultyStore
from tests.engine.scene import (
    PAGE,
    compute,
    gate_store,
    keys,
    memory_store,
    prompt,
    scene,
)

TOKENS = prompt(4)


async def loading(view, store, request):
    """Restore, and return the hit while its load is held at the store."""
    hit = await request.restore()
    await store.get_gate.wait_arrived()
    assert not request.settled
    return hit


async def test_a_commit_over_a_load_is_shared_once_the_load_has_landed():
    tokens = [*TOKENS, *range(500, 500 + PAGE)]
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(TOKENS, reserve_tokens=PAGE) as request:
            hit = await loading(view, store, request)
            request.append(tokens[len(TOKENS) :])
            request.extend(len(tokens))
            compute(view.device, request, tokens, 4)
            assert request.commit(len(tokens)) == 4 * PAGE
            assert view.cache.match_nowait([*tokens, 0]) == 0
            store.get_gate.open()
            await hit.wait()
            assert request.settled
            assert view.cache.match_nowait([*tokens, 0]) == 5 * PAGE


async def test_a_normal_end_over_a_load_still_shares_what_was_committed():
    tokens = [*TOKENS, *range(500, 500 + PAGE)]
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(TOKENS, reserve_tokens=PAGE) as request:
            await loading(view, store, request)
            request.append(tokens[len(TOKENS) :])
            request.extend(len(tokens))
            compute(view.device, request, tokens, 4)
            request.commit(len(tokens))
        store.get_gate.open()
        await view.cache.drain()
        assert view.cache.match_nowait([*tokens, 0]) == 5 * PAGE
        assert view.cache.statistics().counters.closed == 1


async def test_a_commit_over_a_load_is_of_no_more_than_a_truncation_leaves():
    """Fails if it is kept: tokens that came later are shared before their forward."""
    tokens = [*TOKENS, *range(500, 500 + PAGE)]
    later = [*TOKENS, *range(700, 700 + PAGE)]
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(TOKENS, reserve_tokens=PAGE) as request:
            hit = await loading(view, store, request)
            request.append(tokens[len(TOKENS) :])
            request.extend(len(tokens))
            compute(view.device, request, tokens, 4)
            request.commit(len(tokens))
            request.truncate(len(TOKENS))
            request.append(later[len(TOKENS) :])
            request.extend(len(later))
            store.get_gate.open()
            await hit.wait()
            assert view.cache.match_nowait([*later, 0]) == 4 * PAGE
            compute(view.device, request, later, 4)
            request.commit(len(later))
            assert view.cache.match_nowait([*later, 0]) == 5 * PAGE


async def test_a_load_that_never_comes_does_not_keep_a_closed_request_for_ever():
    tokens = [*TOKENS, *range(500, 500 + PAGE)]
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(TOKENS, reserve_tokens=PAGE) as request:
            await request.restore()
            state = request._state
            request.append(tokens[len(TOKENS) :])
            request.extend(len(tokens))
            request.commit(len(tokens))
        assert view.cache.statistics().replica.num_requests == 1
        del request
        gc.collect()
        # Its clock goes on; the store's gate stays shut.
        view.expire(state)
        assert view.cache.statistics().replica.num_requests == 0
        await view.rest()
        assert view.cache.match_nowait([*tokens, 0]) == 0


@pytest.mark.parametrize("num_lost", [1, 3, 4])
async def test_tokens_computed_over_a_short_load_enter_neither_tree_nor_store(num_lost):
    tokens = [*TOKENS, *range(500, 500 + PAGE)]
    first_lost = 4 - num_lost
    inner = await gate_store(TOKENS, is_open=True)
    inner.get_gate.close()
    lost = keys(TOKENS)[first_lost : first_lost + 1]
    async with scene(FaultyStore(inner, Fault.LOST, keys=lost)) as view:
        with view.cache.request(TOKENS, reserve_tokens=PAGE) as request:
            hit = await loading(view, inner, request)
            assert hit.num_tokens == 4 * PAGE
            request.append(tokens[len(TOKENS) :])
            request.extend(len(tokens))
            with view.cache.forward([request]):
                compute(view.device, request, tokens, 4)
            request.commit(len(tokens))
            inner.get_gate.open()
            await hit.wait()
            assert hit.num_tokens == first_lost * PAGE
            assert request.settled
            assert (await view.cache.step()).shortened == (request,)
            assert view.cache.match_nowait([*tokens, 0]) == first_lost * PAGE
            assert len(request.page_table["kv"]) == first_lost
            # Recomputed, it is as good as ever.
            request.extend(len(tokens))
            compute(view.device, request, tokens, first_lost)
            request.commit(len(tokens))
        await view.cache.drain()
        assert await inner.contains(keys(tokens)) == [True] * 5
        assert view.cache.statistics().counters.shortened == 1


async def test_a_short_load_before_the_first_step_is_reported_by_it():
    inner = await memory_store(TOKENS)
    store = FaultyStore(inner, Fault.CORRUPT, keys=keys(TOKENS)[2:3])
    async with scene(store) as view:
        with view.cache.request(TOKENS) as request:
            hit = await (await request.restore()).wait()
            assert hit.num_tokens == 2 * PAGE
            report = await view.cache.step()
            assert report.landed == report.shortened == (request,)
            assert (await view.cache.step()).shortened == ()


async def test_reports_keep_no_request_alive_and_name_none_that_ended():
    inner = await memory_store(TOKENS)
    store = FaultyStore(inner, Fault.CORRUPT, keys=keys(TOKENS)[2:3])
    async with scene(store) as view:
        assert await view.serve(TOKENS) == 2 * PAGE
        report = await view.cache.step()
        assert report.landed == report.shortened == ()


async def test_restoring_twice_or_after_computing_is_refused():
    store = await gate_store(TOKENS)
    async with scene(store) as view:
        with view.cache.request(TOKENS) as request:
            restoring = request.restore().__await__()
            next(restoring)
            before = view.dump()
            with pytest.raises(OrderError, match="open already"):
                await request.restore()
            with pytest.raises(OrderError, match="restore is open"):
                request.extend(1)
            with pytest.raises(OrderError, match="restore is open"):
                request.truncate(1)
            assert view.dump() == before
            restoring.close()
            store.contains_gate.open()
            request.extend(1)
            with pytest.raises(OrderError, match="before extend"):
                await request.restore()
