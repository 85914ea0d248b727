"""How a client waits: for its hit, for the next forward, for its turn."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from asyncache.engine import Hit, Request
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._mishaps import Mishap
from asyncache.testing.simulation._model import EPSILON_S, Row
from asyncache.testing.simulation._scene import Scene


class Pace(ABC):
    """The waits of one client."""

    @abstractmethod
    async def restore(self, request: Request, after_s: float) -> Hit:
        """Restore, with a deadline in so many seconds, which must be kept."""

    @abstractmethod
    async def land(self, request: Request, hit: Hit) -> None:
        """Wait for a hit, at most until the deadline of its restore."""

    @abstractmethod
    async def compute(self, row: Row) -> None:
        """Take part in the next forward."""

    @abstractmethod
    async def idle(self) -> None:
        """Do nothing for about as long as a forward takes."""


class AlonePace(Pace):
    """Where there is one rank: a client is a task, and awaits."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._until = 0.0

    async def restore(self, request: Request, after_s: float) -> Hit:
        self._until = anyio.current_time() + after_s
        with self._bounded("restore()", request):
            return await request.restore(deadline_s=after_s)

    async def land(self, request: Request, hit: Hit) -> None:
        with self._bounded("hit.wait()", request):
            await hit.wait()

    async def compute(self, row: Row) -> None:
        await self._scene.compute(row)

    async def idle(self) -> None:
        await self._scene.idle()

    @contextmanager
    def _bounded(self, what: str, request: Request) -> Iterator[None]:
        began, loop = anyio.current_time(), asyncio.get_running_loop()
        # A moment before: afterwards nobody can tell what the request waited for.
        alarm = loop.call_at(
            self._until - EPSILON_S, self._scene.note, Mishap.DEADLINE, request
        )
        try:
            yield
        finally:
            alarm.cancel()
        now = anyio.current_time()
        if now > began and now - self._until > EPSILON_S:
            late_s = now - self._until
            raise LawError(f"{what} of {request} took {late_s} s too long")
