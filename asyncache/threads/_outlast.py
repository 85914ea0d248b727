"""A wait that outlasts every cancellation.

A cancelled anyio scope cancels each await that is not shielded from it, again and
again; ``task.cancel()`` cancels one await, but goes through any shield. Whoever lent
memory to something that runs on has to wait for it through both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio


async def outlast(
    over: anyio.Event, *, on_cancel: Callable[[], None] | None = None
) -> None:
    """Wait for an event, however often the task is cancelled meanwhile.

    Args:
        over: What is waited for; nothing but its setting ends the wait.
        on_cancel: Called once, at the first cancellation: asks for an early end.

    Raises:
        asyncio.CancelledError: The cancellation, once the event is set.
    """
    cancelled = await _cancellation_of(over)
    if cancelled is None:
        return
    if on_cancel is not None:
        on_cancel()
    with anyio.CancelScope(shield=True):
        # What comes through the shield is native. It has to win over a scope's own
        # cancellation: some versions of anyio swallow that one, and it with it.
        while not over.is_set():
            cancelled = await _cancellation_of(over) or cancelled
    raise cancelled


async def _cancellation_of(over: anyio.Event) -> asyncio.CancelledError | None:
    """Wait; return the cancellation that ended the wait, if one did."""
    try:
        await over.wait()
    except asyncio.CancelledError as error:
        return error
    return None
