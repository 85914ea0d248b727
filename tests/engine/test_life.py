"""The life of a request: what it may reuse, what it shares, what stays as it was."""

from __future__ import annotations

import pytest

from asyncache.core import OutOfPagesError
from asyncache.devices import CpuDevice
from asyncache.engine import KVCache, WriteThrough
from asyncache.stores import FileStore, MemoryStore
from tests.engine.scene import (
    LAYOUT,
    PAGE,
    check_pages,
    compute,
    memory_store,
    prompt,
    scene,
    snapshot,
    turns,
)


async def test_what_was_committed_is_a_hit_for_the_next_request():
    async with scene() as view:
        tokens = prompt(3)
        assert await view.serve(tokens) == 0
        assert view.cache.match_nowait(tokens) == 3 * PAGE
        before = snapshot(view.device)
        assert await view.serve(tokens) == 3 * PAGE
        assert await view.serve(tokens[: 2 * PAGE] + [7] * PAGE) == 2 * PAGE
        assert snapshot(view.device)[:3] == before[:3]


async def test_the_last_token_of_a_prompt_is_never_a_hit():
    async with scene() as view:
        await view.serve(prompt(3))
        assert await view.serve(prompt(3)[: 2 * PAGE]) == PAGE


async def test_pages_come_back_from_files_under_other_numbers(tmp_path):
    tokens = prompt(4)
    async with scene(FileStore(tmp_path)) as view:
        await view.serve(tokens)
    async with scene(FileStore(tmp_path)) as view:
        with view.cache.request(prompt(2, seed=9)) as other:
            other.extend(2 * PAGE)  # takes the page numbers that were used before
            with view.cache.request(tokens) as request:
                hit = await request.restore()
                await hit.wait()
                assert hit.num_tokens == 4 * PAGE
                assert hit.device_tokens == 0
                assert list(request.page_table["kv"]) == [2, 3, 4, 5]
                check_pages(view.device, request, tokens, 4 * PAGE)


async def test_a_hit_may_be_resident_at_its_head_and_stored_at_its_tail():
    tokens = prompt(4)
    async with scene(await memory_store(tokens)) as view:
        view.device.tensor("kv")[:] = 0
        with view.cache.request(tokens[: 2 * PAGE + 1]) as request:
            await (await request.restore()).wait()
        with view.cache.request(tokens) as request:
            hit = await (await request.restore()).wait()
            assert (hit.num_tokens, hit.device_tokens) == (4 * PAGE, 2 * PAGE)
            assert "settled" in repr(hit)
            check_pages(view.device, request, tokens, 4 * PAGE)


async def test_decoding_appends_extends_and_commits_page_by_page():
    async with scene(MemoryStore(2**20)) as view:
        tokens = prompt(1)
        with view.cache.request(tokens, reserve_tokens=2 * PAGE) as request:
            await (await request.restore()).wait()
            assert request.reserved
            assert request.extend(len(tokens)) == 2
            table = request.page_table["kv"]
            first = list(table)
            for token in range(2 * PAGE):
                tokens.append(token)
                request.append([token])
                request.extend(len(tokens))
                compute(view.device, request, tokens)
                shared = request.commit(len(tokens))
                assert shared == len(tokens) // PAGE * PAGE
            assert request.num_tokens == len(tokens)
            assert list(table)[:2] == first
            assert request.page_table["kv"] is table
        assert view.cache.match_nowait([*tokens, 0]) == 3 * PAGE


async def test_truncating_gives_back_what_only_the_forgotten_tokens_had():
    async with scene() as view:
        tokens = prompt(2)
        with view.cache.request(tokens) as request:
            request.extend(len(tokens))
            compute(view.device, request, tokens)
            request.commit(PAGE)
            free = view.pool.free
            request.append([5] * 2 * PAGE)
            request.extend(len(tokens) + 2 * PAGE)
            request.truncate(len(tokens))
            assert request.num_tokens == len(tokens)
            assert view.pool.free == free
            with pytest.raises(ValueError, match=f"between the {PAGE} that are shared"):
                request.truncate(PAGE - 1)


async def test_a_suspended_request_starts_over_with_what_it_committed():
    async with scene() as view:
        tokens = prompt(3)
        with view.cache.request(tokens) as request:
            hit = await (await request.restore()).wait()
            request.extend(2 * PAGE)
            compute(view.device, request, tokens)
            request.commit(2 * PAGE)
            request.suspend()
            assert not request.reserved
            assert list(request.page_table["kv"]) == []
            assert view.pool.request == 0
            hit = await (await request.restore()).wait()
            assert hit.num_tokens == 2 * PAGE
            view.finish(request, tokens, hit.num_tokens)


async def test_a_hit_that_was_given_back_is_zero_and_its_clock_is_stopped():
    tokens = prompt(3)
    async with scene(await memory_store(tokens)) as view:
        with view.cache.request(tokens) as request:
            first = await request.restore()
            request.suspend()
            assert first.num_tokens == 0
            assert first.settled
            assert not view.cache._runtime._deadlines
            await first.wait()
            second = await (await request.restore()).wait()
            assert (first.num_tokens, second.num_tokens) == (0, 3 * PAGE)


async def test_suspending_during_a_restore_ends_it_without_a_hit():
    tokens = prompt(3)
    async with scene(await memory_store(tokens)) as view:
        with view.cache.request(tokens) as request:
            restoring = request.restore().__await__()
            next(restoring)  # asks the store, and waits
            request.suspend()
            with pytest.raises(StopIteration) as end:
                next(restoring)
            assert end.value.value.num_tokens == 0
            hit = await (await request.restore()).wait()
            assert hit.num_tokens == 3 * PAGE


async def test_a_restore_that_is_suspended_and_cancelled_gives_up_nothing_of_others():
    async with scene(await memory_store(prompt(3))) as view:
        with view.cache.request(prompt(3)) as request:
            restoring = request.restore().__await__()
            next(restoring)
            request.suspend()
            restoring.close()
            hit = await (await request.restore()).wait()
            assert hit.num_tokens == 3 * PAGE


async def test_namespaces_share_nothing():
    async with scene() as view:
        tokens = prompt(1)
        for namespace in (None, "", b"", "a", ("a",), ("a", "b")):
            with view.cache.request(tokens, namespace=namespace) as request:
                assert (await request.restore()).num_tokens == 0
                request.extend(len(tokens))
                compute(view.device, request, tokens)
                request.commit(len(tokens))
            assert view.cache.match_nowait(tokens, namespace=namespace) == PAGE


async def test_computing_needs_no_restore():
    async with scene(MemoryStore(2**20)) as view:
        tokens = prompt(2)
        with view.cache.request(tokens) as request:
            assert not request.reserved
            view.finish(request, tokens, 0)
            assert request.settled
        assert view.cache.match_nowait(tokens) == 2 * PAGE


async def test_pages_are_offloaded_once_enough_requests_have_used_them():
    store = MemoryStore(2**20)
    async with scene(store, writes=WriteThrough(threshold=3)) as view:
        for expected in (0, 0, 2):
            await view.serve(prompt(2))
            await view.cache.drain()
            assert store.num_pages == expected


async def test_a_prompt_that_can_never_fit_is_refused_when_it_is_opened():
    async with scene(num_pages=2) as view:
        scope = view.cache.request(prompt(1), reserve_tokens=PAGE)
        with pytest.raises(OutOfPagesError, match="3 pages cannot fit a pool of 2"):
            scope.__enter__()
        with pytest.raises(OutOfPagesError):
            scope.__enter__()  # nothing was opened: it may be tried again
        assert "not entered" in repr(scope)


async def test_representations_show_the_state():
    view_cache = KVCache(LAYOUT, device=CpuDevice(LAYOUT, 4))
    assert repr(view_cache) == "<KVCache, not open>"
    async with view_cache as cache:
        assert "free=4" in repr(cache)
        with cache.request(prompt(1)) as request:
            assert "5 tokens, 0 hit, 0 with pages" in repr(request)
            hit = await request.restore()
            assert repr(hit) == "<Hit 0 tokens, settled>"
            assert "0 loads" in repr(hit.gates)
        assert "ClosedError" in repr(request)
    await cache.aclose()
    never_open = KVCache(LAYOUT, device=CpuDevice(LAYOUT, 4))
    await never_open.aclose()
    assert repr(never_open) == "<KVCache, closed>"


async def test_a_step_reports_what_happened_since_the_last_one():
    tokens = prompt(3)
    async with scene(await memory_store(tokens)) as view:
        with view.cache.request(tokens) as request:
            hit = await request.restore()
            reports = []
            while not hit.settled:
                reports.append(await view.cache.step())
            reports.append(await view.cache.step())
            assert [r.landed for r in reports if r.landed] == [(request,)]
            request.extend(len(tokens))
            assert (await view.cache.step()).landed == ()
        await view.serve(prompt(2, seed=1))
        await view.cache.drain()
        assert (await view.cache.step()).stored_pages == 2
        await turns(1)
