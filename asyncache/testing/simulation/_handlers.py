"""Handlers on one of several ranks: they hold scopes, and let go of them at any time.

A handler makes no call on the cache: the loop serves its request, on every rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random

import anyio

from asyncache.core import (
    AsyncacheError,
    ClosedError,
    OutOfPagesError,
    RankError,
    TooManyRequestsError,
)
from asyncache.engine import Prompt, Request, ScopeId
from asyncache.testing.simulation._case import Actor, Case
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._hang_up import hanging_up
from asyncache.testing.simulation._mishaps import Mishap
from asyncache.testing.simulation._model import EPSILON_S
from asyncache.testing.simulation._party import Party
from asyncache.testing.simulation._place import Place
from asyncache.testing.simulation._post import Letters, Post
from asyncache.testing.simulation._prompts import NAMESPACES, draw_prompt
from asyncache.testing.simulation._rank import Rank

_REFUSALS = (OutOfPagesError, TooManyRequestsError, ClosedError, RankError)


class _HungUpError(Exception):
    """What a handler raises that has had enough."""


class Handlers:
    """The handlers of one rank.

    Args:
        rank: Where they are.
        case: What is decided.
        party: All ranks.
        post: How the first rank hears of them.

    Attributes:
        tasks: Those of requests that every rank has a scope of.
    """

    def __init__(self, rank: Rank, case: Case, party: Party, post: Post) -> None:
        self._rank = rank
        self._case = case
        self._party = party
        self._post = post
        self._posted: set[ScopeId] = set()
        self.tasks: list[asyncio.Task[None]] = []

    def collect(self) -> None:
        """Write to the first rank who waits here, and who has left."""
        cache = self._rank.cache
        with suppress(RankError, ClosedError):
            for prompt in cache.waiting():
                if prompt.scope is not None and prompt.scope not in self._posted:
                    self._posted.add(prompt.scope)
                    self._post.write(_asks(prompt))
            for seq, aborted in cache.left().items():
                self._post.write(_left(seq, aborted=aborted))

    def take_in(self) -> None:
        """Give a handler here to each new request of which every rank has a scope."""
        places, self._rank.new_places = self._rank.new_places, []
        for place in places:
            task = asyncio.get_running_loop().create_task(
                self._hold(place), name=f"EVERYONE {place.number}"
            )
            self.tasks.append(task)

    async def serve(self, actor: Actor) -> None:
        """Have a request of this rank's own be served."""
        dice = Random(f"actor {self._case.seed} {actor.number}")
        try:
            request = self._rank.cache.request(
                draw_prompt(dice),
                namespace=dice.choice(NAMESPACES),
                reserve_tokens=dice.choice([0, 0, 2, 5]),
                priority=dice.randrange(3),
            )
        except (ClosedError, RankError) as error:
            self._check_refusal(error)
            return

        async def live() -> None:
            with suppress(_HungUpError), self._entered(request):
                scope = request._prompt.scope  # noqa: SLF001 - the simulator looks inside
                assert scope is not None
                self._party.actors[scope] = actor.number
                self.collect()
                await request.admitted()
                await _attend(self._rank.places[request.id], dice)

        await self._live(live, request, dice)

    @contextmanager
    def _entered(self, request: Request) -> Iterator[None]:
        is_aborted = True
        try:
            with request:
                yield
                is_aborted = False
        finally:
            self._party.note_left(request, aborted=is_aborted)

    async def _hold(self, place: Place) -> None:
        rank = self._rank.number
        dice = Random(f"actor {self._case.seed} {place.number} {rank}")

        async def live() -> None:
            with suppress(_HungUpError), self._entered(place.request):
                await _attend(place, dice)

        await self._live(live, place.request, dice)

    async def _live(
        self, live: Callable[[], Awaitable[None]], request: Request, dice: Random
    ) -> None:
        def note(mishap: Mishap) -> None:
            if request._state is not None:  # noqa: SLF001 - the simulator looks inside
                self._rank.scene.note(mishap, request)

        try:
            await hanging_up(live, self._case, dice, note)
        except _REFUSALS as error:
            self._rank.world.log(f"{type(error).__name__}: {error}")
            self._check_refusal(error)
        finally:
            self.collect()

    def _check_refusal(self, error: AsyncacheError) -> None:
        if isinstance(error, RankError) and not self._party.fault:
            idle_s = anyio.current_time() - self._rank.last_step_at
            if idle_s < self._case.limits.step_s - EPSILON_S:
                raise LawError(f"{error}: the last was {idle_s} s ago") from error


async def _attend(place: Place, dice: Random) -> None:
    """Wait until a request was served, or have enough before."""
    for _ in range(dice.choice([1, 3, 8, 99, 99, 99, 99])):
        if place.is_over:
            return
        await place.more()
    if dice.random() < 0.5:
        raise _HungUpError


def _asks(prompt: Prompt) -> Callable[[Letters], object]:
    return lambda letters: letters.prompts.append(prompt)


def _left(seq: int, *, aborted: bool) -> Callable[[Letters], object]:
    def add(letters: Letters) -> None:
        letters.left[seq] = aborted or letters.left.get(seq, False)

    return add
