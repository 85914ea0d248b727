"""A thread for copies that are too large for the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from asyncache.core import ClosedError
from asyncache.devices._copy import Copy
from asyncache.threads import outlast, when_over

# Handing a copy to a thread costs about as much as copying this many bytes.
INLINE_BYTES = 256 * 1024


class CopyThread:
    """Runs copies: small ones at once, large ones in order on a thread of its own.

    The thread starts with the first large copy. Copies that wait for it are bounded by
    the callers, who each wait for their own.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="asyncache-copy")
        self._running: set[Future[None]] = set()
        self._is_closed = False

    @property
    def num_running(self) -> int:
        """Copies that are not over yet."""
        return len(self._running)

    def start(self, move: Callable[[], None], *, num_bytes: int) -> Copy:
        """Begin a copy that ``move`` makes.

        Raises:
            ClosedError: If the thread was closed.
        """
        if self._is_closed:
            raise ClosedError("the device is closed")
        if num_bytes <= INLINE_BYTES:
            return _made(move)
        future = self._executor.submit(move)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return _ThreadCopy(future)

    async def aclose(self) -> None:
        """Refuse further copies, and return once none runs, cancelled or not."""
        self._is_closed = True
        try:
            await outlast(when_over(list(self._running)))
        finally:
            self._executor.shutdown(wait=False)


class _MadeCopy(Copy):
    """A copy that was over as soon as it had begun."""

    def block(self) -> None:
        return


class _ThreadCopy(Copy):
    """A copy on a thread."""

    def __init__(self, future: Future[None]) -> None:
        super().__init__()
        self._future = future
        loop = asyncio.get_running_loop()

        def tell(_: Future[None]) -> None:
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(self._told)

        future.add_done_callback(tell)

    def block(self) -> None:
        concurrent.futures.wait([self._future])
        self._told()

    def _told(self) -> None:
        self.finish(self._future.exception())


def _made(move: Callable[[], None]) -> Copy:
    copy = _MadeCopy()
    try:
        move()
    except MemoryError as error:
        copy.finish(error)
    else:
        copy.finish()
    return copy
