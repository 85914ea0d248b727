"""Questions to a server that may never answer: one at a time, and never for long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import anyio

from asyncache.threads import Workers, when_over

_Answer = TypeVar("_Answer")


class Asks:
    """Calls that block, on one thread, each waited for so long at most.

    They touch nothing that is lent, so nobody has to wait for their end. While one is
    late, there is no answer to any.

    Args:
        name: What the thread is called.
    """

    def __init__(self, name: str) -> None:
        self._workers = Workers(1, name, owner="linker")
        self._free: Future[None] | None = None
        """Done when what was late has ended."""

    async def ask(
        self, call: Callable[[], _Answer], *, timeout_s: float
    ) -> _Answer | None:
        """Return what a call returns; None if it takes too long, its turn included.

        Raises:
            ClosedError: If the linker is closed.
        """
        self._workers.check_open()
        if self._free is not None and not self._free.done():
            return None
        answers: list[_Answer] = []
        future = self._workers.executor.submit(lambda: answers.append(call()))
        over = when_over([future])
        try:
            with anyio.move_on_after(timeout_s):
                await over.wait()
        finally:
            # One whose turn has not come yet never runs.
            future.cancel()
        if not over.is_set():
            with suppress(RuntimeError):  # closed meanwhile
                self._free = self._workers.executor.submit(_do_nothing)
        if future.cancelled() or not future.done():
            return None
        future.result()
        return answers[0]

    async def aclose(self, last: Callable[[], None], *, timeout_s: float) -> None:
        """Ask nothing any more; wait for the one that is late, but not for long.

        Args:
            last: Done when none runs any more, however long that takes.
            timeout_s: Seconds to wait for that at most.
        """
        with anyio.move_on_after(timeout_s):
            await self._workers.aclose(last)


def _do_nothing() -> None:
    pass
