"""Waits for a task of the engine's that no cancellation of the waiter cuts short."""

from __future__ import annotations

import asyncio

import anyio


async def wait_out(
    task: asyncio.Task[None], timeout_s: float
) -> asyncio.CancelledError | None:
    """Wait until a task is done, at most ``timeout_s``; return a cancellation.

    A shield holds off a scope, and a loop holds off ``task.cancel()``, which goes
    through every shield.
    """
    loop = asyncio.get_running_loop()
    until, cancelled = loop.time() + timeout_s, None
    with anyio.CancelScope(shield=True):
        while not task.done() and loop.time() < until:
            cancelled = await _cancellation_of(task, until - loop.time()) or cancelled
    return cancelled


async def _cancellation_of(
    task: asyncio.Task[None], timeout_s: float
) -> asyncio.CancelledError | None:
    """Wait for a task; return the cancellation that ended the wait, if one did."""
    try:
        await asyncio.wait([task], timeout=timeout_s)
    except asyncio.CancelledError as error:
        return error
    return None
