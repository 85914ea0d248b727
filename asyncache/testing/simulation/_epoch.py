"""One life of a cache: who uses it, what becomes of it, and what is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import anyio

from asyncache.core import (
    Namespace,
    OrderError,
    StoreError,
)
from asyncache.engine import KVCache, Request
from asyncache.testing.simulation._case import Actor, Case
from asyncache.testing.simulation._client import (
    Client,
    packed,
)
from asyncache.testing.simulation._contents import Era
from asyncache.testing.simulation._device import SimulatedDevice
from asyncache.testing.simulation._laws import LawError, Laws
from asyncache.testing.simulation._linker import SimulatedLinker
from asyncache.testing.simulation._mishaps import Mishap
from asyncache.testing.simulation._model import EPSILON_S, Model, Row
from asyncache.testing.simulation._play import Play

if TYPE_CHECKING:
    from asyncache.testing.simulation._world import World

PATIENCE_S = 60.0
"""Longer than any chain of deadlines, back-offs and stalls."""


class Epoch:
    """A cache from its opening to its close, over a device of its own."""

    def __init__(self, world: World, case: Case, actors: tuple[Actor, ...]) -> None:
        self._world = world
        self._case = case
        self._actors = actors
        self.contents = world.contents
        self.page_tokens = case.layout.page_tokens
        self.clients: dict[Client, None] = {}
        self.num_opened = 0
        self.prefetches: list[tuple[Namespace, bytes]] = []
        layout = replace(case.layout, revision=world.revision)
        self.device = SimulatedDevice(
            layout,
            case.num_pages,
            copies=world.copies,
            weather=world.weather,
            copy_s=world.answer_s,
            host_addressable=case.host_addressable,
        )
        self.cache = KVCache(
            layout,
            device=self.device,
            linker=self.linker(),
            limits=case.limits,
            policy=case.policy,
            writes=case.writes,
            launch=case.launch,
            observer=world,
        )

    def linker(self) -> SimulatedLinker:
        """Return a new linker of its device and the world's store."""
        return SimulatedLinker(
            self._world.store(),
            self.device,
            linger_s=self._world.linger_s,
            layer_groups=self._case.layer_groups,
            batch_bytes=self._case.batch_pages * self._case.page_bytes,
            num_staging=self._case.num_staging,
        )

    @property
    def revision(self) -> str:
        """Of the weights in use."""
        return self._world.revision

    def learn(self, namespace: Namespace, tokens: bytes) -> None:
        """Take note of a prompt that some request has, packed."""
        self.contents.learn(Era(namespace, self.revision), tokens)

    def log(self, text: str) -> None:
        """Write down what whoever runs now did."""
        self._world.log(text)

    def note(self, mishap: Mishap, request: Request) -> None:
        """Take note of what befell a request."""
        state = request._state  # noqa: SLF001 - the simulator looks inside
        self._world.note(mishap, None if state is None else state.seq)

    # Its life.

    async def run(self) -> None:
        """Open the cache, let everyone act, and close it."""
        try:
            async with self._open():
                await self._act()
        except (OSError, StoreError) as error:
            self.log(f"not opened: {error}")

    async def run_in_peace(self, *, is_stored: bool) -> None:
        """Open a cache where nothing goes wrong: all must be well.

        Args:
            is_stored: Whether the prompt that is served now was stored before.
        """
        async with self._open():
            tokens = [7] * (2 * self.page_tokens + 1)
            for is_there in (is_stored, True):
                found = await self._serve_in_peace(tokens)
                if is_there and found != len(tokens) - 1:
                    raise LawError(f"in peace, a hit of {found} for {tokens}")
                await self._check_rest()

    async def _serve_in_peace(self, tokens: list[int]) -> int:
        with self.cache.request(tokens) as request:
            self.num_opened += 1
            client = Client(
                self,
                request,
                list(tokens),
                None,
                num_reserved=len(tokens),
                dice=Random(0),
            )
            return await client.serve_once()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        await self.cache.open()
        runtime = self.cache._runtime  # noqa: SLF001 - the simulator looks inside
        assert runtime is not None
        self._laws = Laws(
            runtime.replica, self.device, self._world.copies, self.contents
        )
        self._world.begin(runtime.replica, self._laws)
        self._models = [self._model() for _ in range(self._case.num_models)]
        async with anyio.create_task_group() as group:
            for model in self._models:
                group.start_soon(model.run)
            if self._case.launch == "batch":
                group.start_soon(self._launch)
            yield
            await self._close()
            group.cancel_scope.cancel()
        self._world.end()

    def _model(self) -> Model:
        return Model(
            self.cache,
            self.device,
            self.contents,
            self._laws,
            forward_s=self._world.forward_s,
            gate_s=self._case.limits.gate_s,
        )

    async def compute(self, row: Row) -> None:
        """Take part in the next forward of some model."""
        await self._world.dice.choice(self._models).compute(row)

    async def idle(self) -> None:
        """Do nothing for about as long as a forward takes, or an answer."""
        await anyio.sleep(self._world.forward_s() + self._world.answer_s())

    async def _launch(self) -> None:
        while not self.cache._is_closed:  # noqa: SLF001 - the simulator looks inside
            self.cache.launch()
            await anyio.sleep(0.003)

    async def _act(self) -> None:
        loop = asyncio.get_running_loop()
        # Tasks of nobody's group, as a server's handlers are: each ends by itself.
        tasks = [
            loop.create_task(
                Play(self, self._world, self._case, actor).act(),
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

    async def _check_rest(self) -> None:
        """Once nobody asks for anything, and nothing goes wrong, all comes to rest."""
        with self._world.weather.paused():
            await self._rest()

    async def _rest(self) -> None:
        if left := await self.cache.drain(deadline_s=PATIENCE_S):
            raise LawError(f"{left} transfers never end: {self._open_stages()}")
        until = anyio.current_time() + PATIENCE_S
        # A client may have hung up under a forward; a lookup that was stopped moves
        # nothing, and may still have to end.
        while self._laws.forwards or self.cache.statistics().transfers:
            if anyio.current_time() > until:
                break
            await anyio.sleep(0.001)
        statistics = self.cache.statistics()
        replica = statistics.replica
        is_clean = not (
            statistics.leaked_pages
            or statistics.transfers
            or replica.num_open
            or replica.promised_pages
        )
        if not is_clean:
            raise LawError(f"left behind: {statistics}, {self._open_stages()}")
        if kept := self._kept():
            raise LawError(f"kept for nobody: {kept}")
        ended = statistics.counters.closed + statistics.counters.aborted
        # A prefetch is a request too, if it found a place.
        if not 0 <= ended - self.num_opened <= len(self.prefetches):
            raise LawError(f"{self.num_opened} requests were opened, {ended} ended")

    def _kept(self) -> dict[str, object]:
        """Return what the engine still keeps of what has ended."""
        runtime = self.cache._runtime  # noqa: SLF001 - the simulator looks inside
        assert runtime is not None
        kept: dict[str, object] = {
            "clocks": runtime._deadlines,  # noqa: SLF001 - as above
            "late": runtime._late,  # noqa: SLF001 - as above
            "given up": runtime._given_up,  # noqa: SLF001 - as above
            "gates": runtime.board._loads,  # noqa: SLF001 - as above
            "waiters": runtime.board._waiters,  # noqa: SLF001 - as above
            "votes": runtime.driver._votes.said(),  # noqa: SLF001 - as above
            "brackets": runtime.driver._open_brackets,  # noqa: SLF001 - as above
        }
        if runtime.transfers is not None:
            kept["claims"] = runtime.transfers._vouched  # noqa: SLF001 - as above
            kept["timers"] = runtime.transfers._timers  # noqa: SLF001 - as above
        return {name: what for name, what in kept.items() if what}

    def _open_stages(self) -> list[str]:
        replica = self._world.replica
        assert replica is not None
        return [f"{seq} {stage}" for seq, stage in replica.look.stages().items()]

    async def _close(self) -> None:
        """Close the cache, within its time, and again until all is still."""
        limit_s = self._case.limits.close_s
        while True:
            began = anyio.current_time()
            is_over = True
            try:
                await self.cache.aclose()
            except OrderError as error:
                self.log(f"close: {error}")
                is_over = False
            took_s = anyio.current_time() - began
            if took_s > limit_s + EPSILON_S:
                raise LawError(f"aclose() took {took_s} s, more than {limit_s}")
            if is_over:
                break
        self.log("closed")
        if self._world.copies.running:
            raise LawError("something still copies after aclose()")

    # What it looks at.

    def check_hit(
        self,
        request: Request,
        era: Era,
        tokens: list[int],
        num_tokens: int,
        *,
        num_computed: int,
    ) -> None:
        """Raise LawError unless a hit that has landed holds what it means.

        Of windows, that is what the token after ``num_computed`` looks back to.
        """
        key, stride = packed(tokens), 4 * self.page_tokens
        num_pages = num_tokens // self.page_tokens
        for pool in self._case.layout.pools:
            window = getattr(pool, "window_tokens", None)
            first = 0
            if window is not None:
                num_whole = num_computed // self.page_tokens
                first = max(0, num_whole - self._case.layout.window_pages(pool))
            table = request.page_table[pool.name]
            for position in range(first, num_pages):
                page, end = table[position], (position + 1) * stride
                wanted = self.contents.page(era, key[:end], pool.name)
                if page < 0 or self.device.page(pool.name, page) != wanted:
                    raise LawError(
                        f"the hit of {request} has other bytes at position {position}"
                        f" of {pool.name!r}, in page {page}"
                    )
