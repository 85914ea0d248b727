"""A thread for copies that are too large for the event loop.

The rule: a call returns or raises only when its copy touches no memory any more,
whatever happens to its task, because the memory belongs to others afterwards.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import anyio
import anyio.lowlevel

from asyncache.core import ClosedError

# Handing a copy to a thread costs about as much as copying this many bytes.
INLINE_BYTES = 256 * 1024


class CopyThread:
    """Runs copies: small ones at once, large ones in order on a thread of its own.

    The thread starts with the first large copy. Copies that wait for it are bounded by
    the callers, who each wait for their own.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="asyncache-copy")
        self._num_running = 0
        self._is_closed = False
        self._quiet = anyio.Event()

    @property
    def num_running(self) -> int:
        """Copies whose call has not returned yet."""
        return self._num_running

    async def run(self, copy: Callable[[], None], *, num_bytes: int) -> None:
        """Run ``copy`` to its end, also when the caller is cancelled meanwhile.

        Raises:
            ClosedError: If the thread was closed.
        """
        if self._is_closed:
            raise ClosedError("the device is closed")
        self._num_running += 1
        try:
            # The last moment at which a cancelled call has touched nothing.
            await anyio.lowlevel.checkpoint()
            if num_bytes <= INLINE_BYTES:
                copy()
            else:
                await self._run_in_thread(copy)
        finally:
            self._num_running -= 1
            self._settle()

    async def aclose(self) -> None:
        """Refuse further copies, and return once none runs."""
        self._is_closed = True
        self._settle()
        try:
            await _outlast(self._quiet)
        finally:
            self._executor.shutdown(wait=False)

    def _settle(self) -> None:
        if self._is_closed and not self._num_running:
            self._quiet.set()

    async def _run_in_thread(self, copy: Callable[[], None]) -> None:
        loop, ended = asyncio.get_running_loop(), anyio.Event()

        def tell(_: Future[None]) -> None:
            with suppress(RuntimeError):  # the loop was closed under a waiting task
                loop.call_soon_threadsafe(ended.set)

        job = self._executor.submit(copy)
        job.add_done_callback(tell)
        try:
            await _outlast(ended)
        finally:
            # Still running only if this coroutine was thrown away: it cannot await any
            # more, and blocking is all that keeps the rule.
            concurrent.futures.wait([job])
        job.result()


async def _outlast(event: anyio.Event) -> None:
    """Wait for an event through every cancellation; raise a native one afterwards.

    A scope's cancellation stops at the shield and is raised by the caller's next await.
    ``task.cancel()`` goes through every shield, once a call.
    """
    cancelled = None
    with anyio.CancelScope(shield=True):
        while not event.is_set():
            try:
                await event.wait()
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
