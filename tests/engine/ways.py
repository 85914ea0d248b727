"""Every way in which what a handler awaits may be taken from it."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable, Coroutine

import anyio
import pytest

Handle = Callable[[], Coroutine[object, object, object]]
Reached = Callable[[], Awaitable[object]]
"""Waits until the handler is where it is to be cancelled."""


async def by_scope(handle: Handle, reached: Reached) -> None:
    """Cancel a scope around it: each of its awaits raises from now on."""
    scope = anyio.CancelScope()

    async def run() -> None:
        with scope:
            await handle()

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await reached()
        scope.cancel()
    assert scope.cancelled_caught


async def by_task(handle: Handle, reached: Reached) -> None:
    """Cancel its task, once."""
    await _by_task(handle, reached, 1)


async def by_task_again(handle: Handle, reached: Reached) -> None:
    """Cancel its task in each turn until it ends."""
    await _by_task(handle, reached, 5)


async def _by_task(handle: Handle, reached: Reached, times: int) -> None:
    task = asyncio.create_task(handle())
    await reached()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_timeout(handle: Handle, reached: Reached) -> None:
    """Let asyncio.timeout expire."""
    limits: list[asyncio.Timeout] = []

    async def run() -> None:
        async with asyncio.timeout(None) as limit:
            limits.append(limit)
            await handle()

    task = asyncio.create_task(run())
    await reached()
    limits[0].reschedule(asyncio.get_running_loop().time())
    with pytest.raises(TimeoutError):
        await task


async def by_wait_for(handle: Handle, reached: Reached) -> None:
    """Let asyncio.wait_for expire."""
    task = asyncio.create_task(handle())
    await reached()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(task, timeout=0.001)


async def by_shield_lost(handle: Handle, reached: Reached) -> None:
    """Cancel who waits for it behind asyncio.shield, then the task itself."""
    inner = asyncio.create_task(handle())
    outer = asyncio.create_task(_shielded(inner))
    await reached()
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert not inner.done()
    inner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await inner


async def _shielded(task: asyncio.Task[object]) -> None:
    await asyncio.shield(task)


async def by_close(handle: Handle, reached: Reached) -> None:
    """Close the coroutine: GeneratorExit where it awaits."""
    coroutine = await _driven(handle, reached)
    coroutine.close()


async def by_collector(handle: Handle, reached: Reached) -> None:
    """Lose the coroutine in a cycle, and let the collector find it."""
    box: list[object] = [await _driven(handle, reached)]
    box.append(box)
    del box
    with warnings.catch_warnings():
        # The collector finds request and coroutine in any order.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


async def _driven(
    handle: Handle, reached: Reached
) -> Coroutine[object, object, object]:
    """Run a coroutine by hand until it is where it is to be lost."""
    coroutine = handle()
    arrived = asyncio.ensure_future(reached())
    awaited = coroutine.send(None)
    while not arrived.done():
        awaited._asyncio_future_blocking = False
        await asyncio.wait({arrived, awaited}, return_when=asyncio.FIRST_COMPLETED)
        if awaited.done():
            awaited = coroutine.send(None)
    return coroutine


WAYS = (
    by_scope,
    by_task,
    by_task_again,
    by_timeout,
    by_wait_for,
    by_shield_lost,
    by_close,
    by_collector,
)
