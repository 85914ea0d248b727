"""A bug of ours fails the cache, and never the embedder."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from asyncache.core import InvariantError, PageState
from tests.engine.scene import gate_store, memory_store, prompt, scene, turns

TOKENS = prompt(3)


def corrupt(view):
    """Move free pages away from where the ledger says that they are."""
    ledger = view.replica._state.ledgers[0]
    for page in range(ledger.num_pages):
        ledger._state[page] = PageState.QUARANTINE


async def failed(view):
    """Check that all calls raise, and that the task goes on."""
    for call in (
        lambda: view.cache.request(TOKENS),
        lambda: view.cache.match_nowait(TOKENS),
        lambda: view.cache.forward([]).__enter__(),
        lambda: view.cache.gates([]),
    ):
        with pytest.raises(InvariantError):
            call()
    for wait in (view.cache.step, view.cache.drain):
        with pytest.raises(InvariantError):
            await wait()
    assert view.cache.statistics()
    assert asyncio.current_task().cancelling() == 0
    await view.cache.aclose()


async def broken_scene(view, body):
    try:
        await body(view)
    finally:
        # Nothing is left to be checked of a state that is known to be wrong.
        view.cache.check_invariants = lambda: None


async def test_a_call_that_breaks_a_law_raises_and_so_does_each_later_one():
    async with scene(await memory_store(TOKENS), check=False) as view:
        with view.cache.request(TOKENS) as request:
            corrupt(view)
            with pytest.raises(InvariantError, match="where its holder says"):
                request.extend(1)
            with pytest.raises(InvariantError):
                request.extend(1)
            with pytest.raises(InvariantError):
                await request.restore()
        await failed(view)
        view.cache.check_invariants = lambda: None


@pytest.mark.parametrize("error", [InvariantError("a law"), KeyError("a bug")])
async def test_a_verdict_that_breaks_a_law_ends_every_wait(error):
    store = await gate_store(TOKENS, prompt(2, seed=1), is_open=True)
    store.get_gate.close()
    async with scene(store, check=False) as view:
        ends = []

        async def restoring():
            with view.cache.request(TOKENS) as request:
                hit = await request.restore()
                try:
                    await hit.wait()
                except InvariantError as caught:
                    ends.append(caught)

        async def draining():
            try:
                await view.cache.drain()
            except InvariantError as caught:
                ends.append(caught)

        async def asking():
            with view.cache.request(prompt(2, seed=2)) as request:
                try:
                    await request.restore()
                except InvariantError as caught:
                    ends.append(caught)

        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(restoring)
                await store.get_gate.wait_arrived()
                group.start_soon(draining)
                store.contains_gate.close()
                group.start_soon(asking)
                await turns(3)

                def apply(ballot, verdict):
                    raise error

                view.replica.apply = apply
                store.contains_gate.open()
        assert len(ends) == 3
        assert all(type(end) is InvariantError for end in ends)
        assert store.get_gate.num_waiting == 0
        await failed(view)
        view.cache.check_invariants = lambda: None


async def test_leaving_a_scope_or_a_bracket_of_a_failed_cache_raises_nothing():
    async with scene(check=False) as view:
        with view.cache.request(TOKENS) as request, view.cache.forward([request]):
            view.cache._runtime.driver.fail(InvariantError("a law"))
        with pytest.raises(InvariantError, match="a law"):
            request.extend(1)
        assert "InvariantError" in repr(request)
        await failed(view)


async def test_a_failure_within_an_observer_ends_the_verdicts_too():
    class Corrupting:
        view = None

        def on_event(self, event):
            if self.view is not None:
                corrupt(self.view)
                with self.view.cache.request(TOKENS) as request:
                    request.extend(1)

    observer = Corrupting()
    async with scene(observer=observer, check=False) as view:
        with view.cache.request(prompt(1)) as request:
            view.finish(request, prompt(1), 0)
        observer.view = view
        with view.cache.request(prompt(1, seed=1)) as request:
            request.extend(5)
            request.commit(5)
        assert [type(c["exception"]) for c in view.loop_errors] == [InvariantError]
        view.loop_errors.clear()
        await failed(view)
        view.cache.check_invariants = lambda: None


async def test_a_policy_that_calls_the_cache_is_refused():
    seen = []

    def policy(node):
        if seen and seen[-1] is None:
            try:
                view.cache.request(TOKENS).__enter__()
            except Exception as error:  # noqa: BLE001 - the test looks at it
                seen.append(error)
        return node.used

    async with scene(num_pages=4, policy=policy) as view:
        await view.serve(prompt(2))
        seen.append(None)
        await view.serve(prompt(2, seed=1))
        assert "from within the cache" in str(seen[1])
