"""One life of a cache: who uses it, what becomes of it, and what is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import anyio

from asyncache.core import Namespace, StoreError
from asyncache.testing.simulation._case import Actor, Case
from asyncache.testing.simulation._client import Client
from asyncache.testing.simulation._contents import Era
from asyncache.testing.simulation._ending import (
    PATIENCE_S,
    check_no_tasks,
    check_rest,
    close,
    open_stages,
)
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._mishaps import Mishap
from asyncache.testing.simulation._pace import AlonePace
from asyncache.testing.simulation._play import Play
from asyncache.testing.simulation._prompts import packed
from asyncache.testing.simulation._scene import Scene
from asyncache.testing.simulation._world import World


class Epoch:
    """A cache from its opening to its close, over a device of its own."""

    def __init__(self, world: World, case: Case, actors: tuple[Actor, ...]) -> None:
        self._world = world
        self._case = case
        self._actors = actors
        self._scene = Scene(world, case)
        self._clients: dict[Client, None] = {}

    async def run(self) -> None:
        """Open the cache, let everyone act, and close it."""
        self._world.log(f"-- a cache opens, for {len(self._actors)} actors")
        try:
            async with self._open():
                await self._act()
        except (OSError, StoreError) as error:
            self._world.log(f"not opened: {error}")

    async def run_in_peace(self, *, is_stored: bool) -> None:
        """Open a cache where nothing goes wrong: all must be well.

        Args:
            is_stored: Whether the prompts that are served now were stored before.
        """
        async with self._open():
            if is_stored:
                await self._sit_out_an_outage()
            tokens = [7] * (2 * self._scene.page_tokens + 1)
            for namespace in (None, "a"):
                for is_there in (is_stored, True):
                    found = await self._serve_in_peace(tokens, namespace)
                    if is_there and self._is_kept(tokens, namespace):
                        self._expect(found, tokens, "served")
                    await self._check_rest()
                if self._is_kept(tokens, namespace):
                    await self._ask_in_peace(tokens, namespace)

    def _is_kept(self, tokens: list[int], namespace: Namespace) -> bool:
        """Whether there was room for a copy of the state where a prompt is to be found.

        Without, as where an offload reads the only other slot, it is computed again.
        """
        boundary = len(tokens) - 1
        prefix = (Era(namespace, self._world.revision), packed(tokens[:boundary]))
        return prefix not in self._world.contents.unkept

    async def _sit_out_an_outage(self) -> None:
        """Serve without the store for a while: it must be asked again afterwards."""
        self._world.weather.is_out = True
        await self._serve_in_peace([8] * (2 * self._scene.page_tokens + 1), None)
        self._world.weather.is_out = False
        await anyio.sleep(2 * self._case.limits.breaker_s)

    async def _ask_in_peace(self, tokens: list[int], namespace: Namespace) -> None:
        cache = self._scene.cache
        self._expect(cache.match_nowait(tokens, namespace=namespace), tokens, "matched")
        found = await cache.prefetch(tokens, namespace=namespace)
        self._expect(found, tokens, "prefetched")
        self._scene.num_opened += 1

    def _expect(self, found: int, tokens: list[int], what: str) -> None:
        if found != len(tokens) - 1:
            raise LawError(f"in peace, {found} tokens of {tokens} were {what}")

    async def _serve_in_peace(self, tokens: list[int], namespace: Namespace) -> int:
        with self._scene.cache.request(tokens, namespace=namespace) as request:
            self._scene.num_opened += 1
            client = Client(
                self._scene,
                AlonePace(self._scene),
                request,
                list(tokens),
                namespace,
                num_reserved=len(tokens),
                dice=Random(0),
            )
            return await client.serve_once()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        async with self._scene.opened():
            yield
            await self._close()

    async def _act(self) -> None:
        loop = asyncio.get_running_loop()
        # Tasks of nobody's group, as a server's handlers are: each ends by itself.
        tasks = [
            loop.create_task(
                self._play(actor).act(),
                name=f"{actor.role.name} {actor.number}",
            )
            for actor in self._actors
        ]
        dice, rate = self._world.dice, self._case.rates.get(Mishap.CLOSE, 0.0)
        abrupt = bool(tasks) and dice.random() < 2 * rate
        if abrupt:
            await asyncio.wait(tasks, timeout=dice.random() * 0.1)
            self._world.note(Mishap.CLOSE)
            await self._close()
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=PATIENCE_S)
            if pending:
                raise LawError(f"{[t.get_name() for t in pending]} never end")
        for task in tasks:
            if not task.cancelled():
                task.result()
        if not abrupt:
            await self._check_rest()

    def _play(self, actor: Actor) -> Play:
        return Play(self._scene, self._world, self._case, actor, self._clients)

    async def _check_rest(self) -> None:
        """Once nobody asks for anything, and nothing goes wrong, all comes to rest."""
        with self._world.weather.paused():
            await self._rest()

    async def _rest(self) -> None:
        # A client may have hung up under a forward, whose end may make more to offload.
        await self._until(lambda: not self._scene.laws.forwards)
        if left := await self._scene.cache.drain(deadline_s=PATIENCE_S):
            raise LawError(f"{left} transfers never end: {open_stages(self._world)}")
        # A lookup that was stopped moves nothing, and may still have to end.
        await self._until(lambda: not self._scene.cache.statistics().transfers)
        check_rest(self._scene, self._world)

    @staticmethod
    async def _until(holds: Callable[[], bool]) -> None:
        until = anyio.current_time() + PATIENCE_S
        while not holds() and anyio.current_time() < until:  # noqa: ASYNC110 - no event of ours tells
            await anyio.sleep(0.001)

    async def _close(self) -> None:
        await close(self._scene, self._world, self._case)
        check_no_tasks()
