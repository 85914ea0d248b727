"""Cancel a call in its middle, once and again, in each way that asyncio knows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum, auto

import anyio
import anyio.lowlevel


class Cancellation(Enum):
    """How a call is cancelled."""

    SCOPE = auto()
    """By an anyio scope: each await raises until the scope is left."""
    TASK = auto()
    """By ``task.cancel()``: one await raises, shielded or not."""
    TASK_TWICE = auto()
    """By ``task.cancel()``, and again while the call cleans up."""
    SCOPE_AND_TASK = auto()
    """By a scope, and by ``task.cancel()`` while the call cleans up."""


async def cancel_after(
    num_turns: int, call: Callable[[], Awaitable[object]], how: Cancellation
) -> bool:
    """Start a call, cancel it ``num_turns`` turns of the event loop later.

    Returns once the call has ended.

    Returns:
        Whether it was cancelled; False if it ended first.
    """
    victim = _Victim(call)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(victim.run)
        for _ in range(num_turns):
            if victim.has_ended:
                break
            await anyio.lowlevel.checkpoint()
        await victim.cancel(how)
    return victim.was_cancelled


class _Victim:
    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        self._call = call
        self._scope = anyio.CancelScope()
        self._task: asyncio.Task[object] | None = None
        self.has_ended = False
        self.was_cancelled = False

    async def run(self) -> None:
        self._task = asyncio.current_task()
        try:
            with self._scope:
                await self._call()
        except asyncio.CancelledError:
            self.was_cancelled = True
        finally:
            self.was_cancelled |= self._scope.cancelled_caught
            self.has_ended = True

    async def cancel(self, how: Cancellation) -> None:
        if how in {Cancellation.SCOPE, Cancellation.SCOPE_AND_TASK}:
            self._scope.cancel()
        else:
            self._cancel_task()
        if how in {Cancellation.TASK_TWICE, Cancellation.SCOPE_AND_TASK}:
            # Two turns: one to deliver the first, one to begin to clean up.
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            self._cancel_task()

    def _cancel_task(self) -> None:
        if self._task is not None and not self.has_ended:
            self._task.cancel()
