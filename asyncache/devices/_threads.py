"""A thread for copies that are too large for the event loop.

The rule: a call returns or raises only when its copy touches no memory any more,
whatever happens to its task, because the memory belongs to others afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel

from asyncache.core import ClosedError
from asyncache.threads import Stop, Workers, outlast

# Handing a copy to a thread costs about as much as copying this many bytes.
INLINE_BYTES = 256 * 1024


class CopyThread:
    """Runs copies: small ones at once, large ones in order on a thread of its own.

    The thread starts with the first large copy. Copies that wait for it are bounded by
    the callers, who each wait for their own.
    """

    def __init__(self) -> None:
        self._workers = Workers(1, "asyncache-copy", owner="device")
        self._num_running = 0
        self._is_closed = False
        self._quiet = anyio.Event()

    @property
    def num_running(self) -> int:
        """Copies whose call has not returned yet."""
        return self._num_running

    async def run(self, copy: Callable[[], None], *, num_bytes: int) -> None:
        """Run ``copy`` to its end, or not at all if it is cancelled before it began.

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
                await self._workers.run(_call, [copy])
        finally:
            self._num_running -= 1
            self._settle()

    async def aclose(self) -> None:
        """Refuse further copies, and return once none runs, cancelled or not."""
        self._is_closed = True
        self._settle()
        try:
            await outlast(self._quiet)
        finally:
            self._workers.executor.shutdown(wait=False)

    def _settle(self) -> None:
        if self._is_closed and not self._num_running:
            self._quiet.set()


def _call(copy: Callable[[], None], _: Stop) -> None:
    copy()
