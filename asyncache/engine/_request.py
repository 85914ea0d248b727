"""A request's scope: what a handler holds from the first lookup to the last token."""

from __future__ import annotations

from typing import Self

import anyio

from asyncache.core import OrderError
from asyncache.engine._base_request import BaseHit, BaseRequest, Landing


class Hit(BaseHit[anyio.Event]):
    """The leading tokens of a prompt that need no computing."""

    async def wait(self) -> Self:
        await self._landing.settled.wait()
        self._check_open()
        return self


class Request(BaseRequest[anyio.Event]):
    """One prompt and its pages, for as long as the scope lasts.

    Made by :meth:`KVCache.request` and used in a ``with`` block, once. All calls come
    from the loop of the cache. A call after the end raises ClosedError, or AbortedError
    if it was aborted.
    """

    _is_restoring = False

    async def restore(self, *, deadline_s: float | None = None) -> Hit:
        """Do as :meth:`BaseRequest.restore`: ``await hit.wait()`` follows."""
        self._open_state()
        if self._is_restoring:
            raise OrderError("a restore of this request is open already")
        landing = self._begin_restore(deadline_s)
        await self._wait_agreed(landing)
        self._open_state()
        return Hit(
            landing,
            num_tokens=self._hit_tokens,
            gates=self._runtime.gates,
            check_open=self._open_state,
        )

    async def _wait_agreed(self, landing: Landing[anyio.Event]) -> None:
        self._is_restoring = True
        try:
            await landing.agreed.wait()
        except BaseException:
            # Cancelled, and the scope may go on: then it goes on with what is there.
            self._give_up(landing)
            raise
        finally:
            self._is_restoring = False

    def _signal(self) -> anyio.Event:
        return anyio.Event()
