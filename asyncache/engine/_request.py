"""A request's scope: what a handler holds from the first lookup to the last token."""

from __future__ import annotations

from functools import partial
from typing import Self

import anyio

from asyncache.core import OrderError
from asyncache.engine._base_hit import BaseHit, Landing
from asyncache.engine._base_request import BaseRequest
from asyncache.engine._gates import Gates


class Hit(BaseHit[anyio.Event]):
    """The leading tokens of a prompt that need no computing."""

    async def wait(self) -> Self:
        await self._landing.settled.wait()
        self._check()
        return self


class Request(BaseRequest[anyio.Event]):
    """One prompt and its pages, for as long as the scope lasts.

    Made by :meth:`KVCache.request` and used in a ``with`` block, once. All calls come
    from the loop of the cache; with several ranks from one task of it, the one that
    steps, while the scope may be any handler's. A call after the end raises
    ClosedError, or AbortedError if it was aborted.
    """

    _is_restoring = False

    async def admitted(self) -> Self:
        """Wait until calls on it are legal: with one rank, they always are.

        Raises:
            OutOfPagesError, TooManyRequestsError: If the loop could not admit it.
            RankError: If a group's ranks failed, or its loop stopped stepping.
            ClosedError: If the cache was closed.
        """
        if self._admitted is not None and self._while_stepping is not None:
            await self._while_stepping(self._admitted)
        self._open_state()
        return self

    async def restore(self, *, deadline_s: float | None = None) -> Hit:
        """Do as :meth:`BaseRequest.restore`: ``await hit.wait()`` follows.

        With several ranks, whoever awaits is no loop that steps: begin there with
        :meth:`restore_nowait`.
        """
        self._open_state()
        if self._is_restoring:
            raise OrderError("a restore of this request is open already")
        if not self._runtime.is_alone:
            raise OrderError("with several ranks: restore_nowait(), then step()")
        landing = self._begin_restore(deadline_s)
        await self._wait_agreed(landing)
        self._open_state()
        return self._hit(landing)

    def restore_nowait(self, *, deadline_s: float | None = None) -> Hit:
        """Do as :meth:`BaseRequest.restore_nowait`."""
        if self._is_restoring:
            raise OrderError("a restore of this request is open already")
        return self._hit(self._begin_restore(deadline_s))

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

    def _hit(self, landing: Landing[anyio.Event]) -> Hit:
        return Hit(
            landing,
            num_tokens=self._hit_tokens,
            gates=partial(Gates, self._runtime.board),
            check_open=self._open_state,
        )

    def _signal(self) -> anyio.Event:
        return anyio.Event()
