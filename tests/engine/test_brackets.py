"""No page changes hands while a forward may still write it."""

from __future__ import annotations

import threading

import anyio
import pytest

from asyncache.core import AbortedError
from asyncache.devices._threads import CopyThread
from tests.engine.scene import (
    PAGE,
    check_pages,
    compute,
    gate_store,
    memory_store,
    prompt,
    scene,
    turns,
    write,
)

GARBAGE = b"\xee" * 64


class HeldForward:
    """A forward in a thread, which writes its pages only when the test lets it."""

    def __init__(self, view, pages):
        self.may_write = threading.Event()
        self.began = threading.Event()
        self.over = anyio.Event()
        self._view = view
        self._pages = pages
        self._thread = CopyThread()

    async def run(self, requests):
        """Run within a bracket, to its end, as a serving loop does."""
        with self._view.cache.forward(requests):
            await self._thread.start(self._write, num_bytes=2**30).wait()
        self.over.set()
        await self._thread.aclose()

    def _write(self):
        self.began.set()
        self.may_write.wait(10)
        for page in self._pages:
            write(self._view.device, page, GARBAGE)


async def test_pages_of_a_cancelled_handler_wait_for_the_forward_that_writes_them():
    """Fails if the bracket is taken away: then the load gets the forward's pages."""
    stored, computed = prompt(3), prompt(3, seed=1)
    async with scene(await memory_store(stored), num_pages=8) as view:
        scope = view.cache.request(computed)
        request = scope.__enter__()
        request.extend(len(computed))
        forward = HeldForward(view, list(request.page_table["kv"]))
        async with anyio.create_task_group() as group:
            group.start_soon(forward.run, [request])
            await anyio.to_thread.run_sync(forward.began.wait)
            # The client goes, in the middle of its prefill.
            scope.__exit__(RuntimeError, None, None)
            assert (view.pool.quarantine, view.pool.free) == (4, 4)
            with view.cache.request(stored) as other:
                hit = await (await other.restore()).wait()
                assert hit.num_tokens == 3 * PAGE
                forward.may_write.set()
                await forward.over.wait()
                check_pages(view.device, other, stored, 3 * PAGE)
            assert view.pool.quarantine == 0


async def test_who_needs_pages_that_a_forward_still_writes_waits_for_it():
    stored, computed = prompt(3), prompt(3, seed=1)
    async with scene(await memory_store(stored), num_pages=4) as view:
        scope = view.cache.request(computed)
        request = scope.__enter__()
        request.extend(len(computed))
        forward = HeldForward(view, list(request.page_table["kv"]))
        async with anyio.create_task_group() as group:
            group.start_soon(forward.run, [request])
            await anyio.to_thread.run_sync(forward.began.wait)
            scope.__exit__(RuntimeError, None, None)
            hits = []

            async def serve():
                hits.append(await view.serve(stored))

            group.start_soon(serve)
            await turns(20)
            assert hits == []
            assert view.cache.statistics().replica.num_waiting == 1
            forward.may_write.set()
        assert hits == [3 * PAGE]


async def test_brackets_may_end_in_any_order():
    async with scene() as view:
        with view.cache.request(prompt(1)) as one, view.cache.request(prompt(1)) as two:
            first = view.cache.forward([one])
            second = view.cache.forward([two])
            one.extend(PAGE)
            first.__enter__()
            second.__enter__()
            one.suspend()
            first.__exit__(None, None, None)
            # Released while the second was the newest: it may know of them.
            assert view.pool.quarantine == 1
            second.__exit__(None, None, None)
            assert view.pool.quarantine == 0
            third = view.cache.forward([])
            third.__enter__()
            with view.cache.forward([two]):
                two.extend(PAGE)
                two.truncate(1)
            two.suspend()
            assert view.pool.quarantine == 1
            third.__exit__(None, None, None)
            assert view.pool.quarantine == 0


async def test_what_is_computed_in_a_bracket_is_not_offloaded_before_its_end():
    store = await gate_store(is_open=True)
    tokens = prompt(2)
    async with scene(store) as view:
        with view.cache.request(tokens) as request:
            request.extend(len(tokens))
            with view.cache.forward([request]):
                request.commit(len(tokens))
                await turns(10)
                assert store.put_gate.num_arrived == 0
                compute(view.device, request, tokens)
        await view.cache.drain()
        assert store.put_gate.num_arrived == 1


async def test_a_bracket_is_left_though_the_model_raised_or_the_cache_closed():
    async with scene() as view:
        with view.cache.request(prompt(1)) as request:
            with (
                pytest.raises(RuntimeError, match="the model"),
                view.cache.forward([request]),
            ):
                raise RuntimeError("the model failed")
            assert not view.cache._runtime.driver._open_brackets
    bracket = None
    async with scene(check=False) as view:
        scope = view.cache.request(prompt(1))
        request = scope.__enter__()
        request.extend(1)
        bracket = view.cache.forward([request])
        bracket.__enter__()
        await view.cache.aclose()
        assert view.pool.quarantine == 1
        bracket.__exit__(None, None, None)
        assert view.pool.quarantine == 0
        scope.__exit__(None, None, None)


async def test_an_ended_or_foreign_request_opens_no_bracket():
    async with scene() as view, scene() as other:
        with view.cache.request(prompt(1)) as request:
            for call in (other.cache.gates, other.cache.forward):
                with pytest.raises(ValueError, match="of another cache"):
                    _ = call([request]).__enter__()
            scope = view.cache.request(prompt(1))
            gone = scope.__enter__()
            scope.__exit__(ValueError, None, None)
            with pytest.raises(AbortedError), view.cache.forward([request, gone]):
                pass
        assert view.replica.look.is_idle
