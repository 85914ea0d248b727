"""What actors do with a cache: clients, operators, and some who mean no good."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from random import Random

import anyio

from asyncache.core import (
    AsyncacheError,
    ClosedError,
    OrderError,
    OutOfPagesError,
    StoreError,
    TooManyRequestsError,
)
from asyncache.engine import Request
from asyncache.testing.simulation._case import Actor, Case, Role
from asyncache.testing.simulation._client import Client
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._hang_up import hanging_up
from asyncache.testing.simulation._mishaps import Mishap
from asyncache.testing.simulation._model import EPSILON_S
from asyncache.testing.simulation._pace import AlonePace
from asyncache.testing.simulation._prompts import NAMESPACES, draw_prompt, packed
from asyncache.testing.simulation._scene import Scene
from asyncache.testing.simulation._world import World

_REFUSALS = (OutOfPagesError, TooManyRequestsError, ClosedError)


class Play:
    """One actor's part in an epoch.

    Args:
        scene: On which it acts.
        world: Around it.
        case: What is decided.
        actor: Who acts.
        clients: Those who are there.
    """

    def __init__(
        self,
        scene: Scene,
        world: World,
        case: Case,
        actor: Actor,
        clients: dict[Client, None],
    ) -> None:
        self._scene = scene
        self._clients = clients
        self._cache = scene.cache
        self._world = world
        self._case = case
        self._actor = actor
        self._rank = world.rank
        self._dice = Random(f"actor {case.seed} {actor.number}")

    async def act(self) -> None:
        """Do it when the time has come."""
        await anyio.sleep(self._actor.at_s)
        await self.act_now()

    async def act_now(self) -> None:
        """Do it; what is refused, is refused."""
        plays: dict[Role, Callable[[], Awaitable[object]]] = {
            Role.CLIENT: self._serve,
            Role.PREFETCH: self._prefetch,
            Role.RESET: self._reset,
            Role.REVISION: self._renew,
            Role.DETACH: self._detach,
            Role.DRAIN: self._drain,
            Role.OUTAGE: self._outage,
            Role.STRANGER: self._interfere,
            Role.KILL: self._kill,
            Role.LOOK: self._look,
        }
        try:
            await plays[self._actor.role]()
        except _REFUSALS as error:
            self._world.log(f"{type(error).__name__}: {error}")
            self._check_refusal(error)

    def _check_refusal(self, error: AsyncacheError) -> None:
        """What is refused is refused for a reason that is there."""
        replica = self._world.replica
        if replica is None or self._actor.role not in {Role.CLIENT, Role.PREFETCH}:
            return
        num_requests = replica.look.statistics().num_requests
        is_full = num_requests >= self._case.limits.requests
        if isinstance(error, TooManyRequestsError) and not is_full:
            raise LawError(f"{num_requests} requests are open: {error}")
        is_closed = self._cache._is_closed  # noqa: SLF001 - the simulator looks inside
        if type(error) is ClosedError and not is_closed:
            raise LawError(f"the cache is open: {error}")

    async def _serve(self) -> None:
        tokens, namespace = draw_prompt(self._dice), self._dice.choice(NAMESPACES)
        reserve = self._dice.choice([0, 0, 2, 5])
        request = self._cache.request(
            tokens,
            namespace=namespace,
            reserve_tokens=reserve,
            priority=self._dice.randrange(3),
        )
        self._world.log(f"opens {tokens} in {namespace!r}")

        async def live() -> None:
            with request:
                self._scene.num_opened += 1
                self._world.log(f"is {request!r}")
                client = Client(
                    self._scene,
                    AlonePace(self._scene),
                    request,
                    tokens,
                    namespace,
                    num_reserved=len(tokens) + reserve,
                    dice=self._dice,
                )
                self._clients[client] = None
                try:
                    await client.live()
                finally:
                    del self._clients[client]

        try:
            await self._hanging_up(live, request)
        finally:
            self._check_ended(request)

    def _check_ended(self, request: Request) -> None:
        """A scope's end is the end, but for a commit that waits for its loads."""
        state, replica = request._state, self._world.replica  # noqa: SLF001 - as above
        if state is None or replica is None or not replica.look.is_open(state.seq):
            return
        if not state.want > state.shared or sys.exc_info()[0] is not None:
            raise LawError(f"{request} has ended, and is open")

    async def _hanging_up(
        self, live: Callable[[], Awaitable[None]], request: Request | None
    ) -> None:
        def note(mishap: Mishap) -> None:
            if request is not None:
                self._scene.note(mishap, request)

        dice = self._dice
        if self._case.team:
            # One rank's loop is cancelled, and the others are not.
            dice = Random(f"cut {self._case.seed} {self._actor.number} {self._rank}")
            live = partial(_outlasting, live)
        await hanging_up(live, self._case, dice, note)

    async def _prefetch(self) -> None:
        tokens, namespace = draw_prompt(self._dice), self._dice.choice(NAMESPACES)
        prompt = (namespace, packed(tokens))
        self._scene.learn(namespace, packed(tokens))
        self._scene.prefetches.append(prompt)

        async def live() -> None:
            began, after_s = anyio.current_time(), self._dice.choice([0.0, 0.05, 0.2])
            found = await self._cache.prefetch(
                tokens, namespace=namespace, deadline_s=after_s
            )
            took_s = anyio.current_time() - began
            self._world.log(f"prefetched {found} of {tokens} in {namespace!r}")
            is_late = took_s > after_s + EPSILON_S and not self._case.team
            if is_late or not 0 <= found < len(tokens):
                raise LawError(f"{found} of {tokens} prefetched in {took_s} s")

        await self._hanging_up(live, None)

    async def _reset(self) -> None:
        self._world.note(Mishap.RESET)
        self._cache.reset()
        self._has_reset()

    async def _renew(self) -> None:
        self._world.note(Mishap.REVISION)
        self._world.revision = self._dice.choice(["", "b", "c"])
        self._world.fill()
        self._cache.reset(revision=self._world.revision)
        self._has_reset()

    def _has_reset(self) -> None:
        self._world.log(f"reset to {self._world.revision!r}")
        for client in self._clients:
            if client.holds_nothing:
                client.renew()
        for namespace, prompt in self._scene.prefetches:
            self._scene.learn(namespace, prompt)
        for tokens in self._world.known_prompts:
            for namespace in NAMESPACES:
                if found := self._cache.match_nowait(tokens, namespace=namespace):
                    raise LawError(f"{found} tokens of {tokens} outlived a reset")

    async def _detach(self) -> None:
        await self.detach()
        await anyio.sleep(self._dice.choice([0.0, 0.01]))
        await self.attach()

    async def detach(self) -> None:
        """Take the store away; with several ranks, until it is gone here too."""
        self._world.note(Mishap.DETACH)
        is_gone = await self._try_to_detach()
        while self._case.team and not is_gone:
            is_gone = await self._try_to_detach()
        self._world.log("detached")

    async def _try_to_detach(self) -> bool:
        is_gone, began = False, anyio.current_time()
        with suppress(OrderError):
            await self._cache.detach()
            is_gone = True
        if anyio.current_time() - began > self._case.limits.close_s + EPSILON_S:
            raise LawError(f"detach() took {anyio.current_time() - began} s")
        return is_gone

    async def attach(self) -> None:
        """Attach a store, if none is."""
        # Another may have attached one meanwhile, or a transfer has yet to stop.
        with suppress(OrderError, OSError, StoreError), anyio.move_on_after(1.0):
            await self._cache.attach(linker=self._scene.linker())
            self._world.log("attached")

    async def _drain(self) -> None:
        if self._case.team:
            await self._hanging_up(self._drain_now, None)
        else:
            await self._drain_now()

    async def _drain_now(self) -> None:
        began, after_s = anyio.current_time(), self._dice.choice([0.0, 0.01, 0.5])
        left = await self._cache.drain(deadline_s=after_s)
        took_s = anyio.current_time() - began
        self._world.log(f"drained in {took_s} s but for {left}")
        replica = self._world.replica
        is_late = took_s >= after_s - EPSILON_S
        is_wrong = took_s > after_s + EPSILON_S or (left and not is_late)
        if is_wrong and not self._case.team:  # else others were late, or slow
            raise LawError(f"drain({after_s}) left {left} after {took_s} s")
        if replica is not None and is_late and left != replica.look.num_moving:
            raise LawError(f"drain() left {left}, not {replica.look.num_moving}")

    async def _outage(self) -> None:
        self._world.note(Mishap.OUTAGE)
        self._world.weather.is_out = True
        self._world.log("the store is out")
        await anyio.sleep(self._dice.choice([0.01, 0.05]))
        self._world.weather.is_out = False
        self._world.log("the store is back")

    async def _interfere(self) -> None:
        names = [f"asyncache {kind}" for kind in ("lookup", "load", "offload")]
        transfers = [t for t in _tasks() if t.get_name().startswith(tuple(names))]
        if transfers:
            task = self._dice.choice(transfers)
            self._world.note(Mishap.STRANGER)
            self._world.log(f"cancels {task.get_name()}")
            task.cancel()

    async def _kill(self) -> None:
        home = self._cache._home  # noqa: SLF001 - the simulator looks inside
        if home is not None:
            self._world.note(Mishap.KILL)
            self._world.log("kills the cache's own task")
            home.cancel()

    async def _look(self) -> None:
        tokens = draw_prompt(self._dice)
        self._cache.match_nowait(tokens)
        self._world.log(
            f"{self._cache!r} {self._cache.statistics().transfers} transfers"
        )
        if self._case.team is None:
            await self._cache.step()


async def _outlasting(live: Callable[[], Awaitable[None]]) -> None:
    try:
        await live()
    finally:
        # What is cancelled as it ends may hear of it a moment later.
        await asyncio.sleep(0)


def _tasks() -> list[asyncio.Task[object]]:
    return sorted(asyncio.all_tasks(), key=hash)
