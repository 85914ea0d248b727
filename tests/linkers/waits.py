"""Waiting for what comes about, while the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import anyio.lowlevel

# By when what should end has ended, on the busiest machine; what blocks for Mooncake's
# own time blocks for 30 s.
GRACE_S = 15.0
TICK_S = 0.01
_Answer = TypeVar("_Answer")


@asynccontextmanager
async def beating() -> AsyncIterator[None]:
    """Raise if the event loop stood still for long meanwhile."""
    loop, longest = asyncio.get_running_loop(), 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            before = loop.time()
            await anyio.sleep(TICK_S)
            longest = max(longest, loop.time() - before)

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        try:
            yield
        finally:
            group.cancel_scope.cancel()
    assert longest < GRACE_S / 3


async def until(is_true: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what must come about without any help."""
    with anyio.fail_after(60):
        while not await is_true():
            await anyio.lowlevel.checkpoint()


async def in_thread(call: Callable[..., _Answer], *arguments: object) -> _Answer:
    return await anyio.to_thread.run_sync(call, *arguments)
