"""A copy on a thread outlives every cancellation of its caller."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from asyncache.core import ClosedError
from asyncache.devices._threads import INLINE_BYTES, CopyThread


class HeldCopy:
    """A copy that ends when the test says so, and the call that waits for it."""

    def __init__(self):
        self.thread = CopyThread()
        self.finish = threading.Event()
        self.has_ended = False
        self.outcome = None

    def copy(self):
        self.finish.wait()
        self.has_ended = True

    async def call(self, *, task_status):
        task_status.started(asyncio.current_task())
        try:
            await self.thread.start(self.copy, num_bytes=INLINE_BYTES + 1).wait()
        except asyncio.CancelledError:
            assert self.has_ended
            self.outcome = "cancelled"
            raise
        else:
            self.outcome = "returned"


async def test_native_cancellations_wait_for_the_copy():
    held = HeldCopy()
    async with anyio.create_task_group() as group:
        task = await group.start(held.call)
        for _ in range(3):
            await wait_all_tasks_blocked()
            task.cancel()
        await wait_all_tasks_blocked()
        assert held.outcome is None
        held.finish.set()
    assert held.outcome == "cancelled"
    await held.thread.aclose()


async def test_a_cancelled_scope_waits_for_the_copy():
    held = HeldCopy()
    async with anyio.create_task_group() as group:
        await group.start(held.call)
        await wait_all_tasks_blocked()
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
            assert held.outcome is None
            held.finish.set()
    assert held.has_ended
    await held.thread.aclose()


async def test_a_timeout_is_a_timeout_once_the_copy_is_over():
    held = HeldCopy()

    async def expire_and_finish(deadline):
        await wait_all_tasks_blocked()
        deadline.reschedule(0)
        await wait_all_tasks_blocked()
        held.finish.set()

    async def call():
        async with asyncio.timeout(None) as deadline:
            group.start_soon(expire_and_finish, deadline)
            await held.thread.start(held.copy, num_bytes=INLINE_BYTES + 1).wait()

    async with anyio.create_task_group() as group:
        with pytest.raises(TimeoutError):
            await call()
    assert held.has_ended
    await held.thread.aclose()


async def test_closing_waits_for_the_copy_even_if_cancelled():
    held = HeldCopy()

    async def close():
        try:
            await held.thread.aclose()
        finally:
            assert held.outcome == "returned"

    async with anyio.create_task_group() as group:
        await group.start(held.call)
        await wait_all_tasks_blocked()
        assert held.thread.num_running == 1
        async with anyio.create_task_group() as closers:
            closers.start_soon(close)
            await wait_all_tasks_blocked()
            with pytest.raises(ClosedError):
                held.thread.start(held.copy, num_bytes=1)
            closers.cancel_scope.cancel()
            held.finish.set()
    assert held.thread.num_running == 0


def test_a_call_that_is_thrown_away_blocks_until_the_copy_is_over():
    held = HeldCopy()

    async def begin():
        call = held.thread.start(held.copy, num_bytes=INLINE_BYTES + 1).wait()
        call.send(None)  # runs up to the wait for the thread
        return call

    call = asyncio.run(begin())
    threading.Timer(0.0, held.finish.set).start()
    with suppress(RuntimeError):  # anyio misses the loop
        call.close()
    assert held.has_ended
    asyncio.run(held.thread.aclose())


async def test_what_a_copy_raises_comes_out_of_the_call():
    thread = CopyThread()

    def fail():
        raise MemoryError("no room")

    for num_bytes in (1, INLINE_BYTES + 1):
        with pytest.raises(MemoryError, match="no room"):
            await thread.start(fail, num_bytes=num_bytes).wait()
    await thread.aclose()
