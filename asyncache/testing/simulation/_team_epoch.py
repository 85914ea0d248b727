"""One life of the caches of several ranks: who uses them, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random

import anyio

from asyncache.core import RankError, StoreError
from asyncache.testing.simulation._case import Actor, Case, Role
from asyncache.testing.simulation._ending import PATIENCE_S, check_no_tasks
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._group import SimulatedNetwork
from asyncache.testing.simulation._mishaps import Mishap
from asyncache.testing.simulation._party import (
    Party,
    WatchedGroup,
    failed_for_a_reason,
)
from asyncache.testing.simulation._peace import Peace
from asyncache.testing.simulation._play import Play
from asyncache.testing.simulation._post import Letters, Post
from asyncache.testing.simulation._rank import Rank
from asyncache.testing.simulation._rank_loop import RankLoop
from asyncache.testing.simulation._team import Team
from asyncache.testing.simulation._world import World

_FOR_ALL = {
    Role.EVERYONE,
    Role.PREFETCH,
    Role.RESET,
    Role.REVISION,
    Role.DETACH,
    Role.DRAIN,
}
"""Roles that every rank's loop plays, in the same gap."""


class TeamEpoch:
    """The caches of all ranks from their opening to their close."""

    def __init__(
        self,
        worlds: Sequence[World],
        case: Case,
        team: Team,
        actors: Sequence[Actor] = (),
        *,
        is_odd: bool = False,
    ) -> None:
        self._case = case
        self._team = team
        self._actors = actors
        self._worlds = worlds
        self._is_odd = is_odd
        first = worlds[0]
        sound: set[int] = set()
        for world in worlds:
            world.sound = sound
            if world.revision != first.revision:  # it died before it heard of it
                world.revision = first.revision
                world.fill()
        self._party = Party(len(worlds))
        self._network = SimulatedNetwork(
            len(worlds),
            dice=first.dice,
            delay_s=(0.0, team.net_s),
            silence_s=2 * case.limits.barrier_s,
        )
        self._post = Post(len(worlds), lambda: _some(first.dice, team.post_s))
        self._ranks = [self._rank(world) for world in worlds]
        self._loops = [
            RankLoop(rank, case, self._party, self._post) for rank in self._ranks
        ]

    def _rank(self, world: World) -> Rank:
        inner, barrier_s = self._network.group(world.rank), self._case.limits.barrier_s
        group = WatchedGroup(inner, self._party, barrier_s, world.violate)
        is_odd = self._is_odd and world is self._worlds[-1]
        case = self._case.odd() if is_odd else self._case
        return Rank(world, case, self._team, self._party, group)

    async def run(self) -> None:
        """Open the caches, let everyone act, and close them."""
        self._worlds[0].log(f"-- caches open, for {len(self._actors)} actors")
        is_open, differ = await self._open(), self._is_odd
        if is_open and differ:
            raise LawError(
                f"ranks that differ in their {self._team.odd.value} are open"
            )
        if not is_open:
            return
        loops = [
            self._start(f"loop {loop.rank.number}", loop.run()) for loop in self._loops
        ]
        acts = [
            self._start(f"{actor.role.name} {actor.number}", self._act(actor))
            for actor in self._actors
        ]
        await self._see(loops, acts)
        check_no_tasks()

    async def run_in_peace(self, *, is_stored: bool) -> None:
        """Open caches where nothing goes wrong: all must be well.

        Args:
            is_stored: Whether the prompts that are served now were stored before.
        """
        if not await self._open():
            raise LawError("in peace, no cache could be opened")
        peaces = [Peace(rank, self._case, self._party) for rank in self._ranks]
        tasks = [
            self._start(f"peace {rank.number}", peace.run(is_stored=is_stored))
            for rank, peace in zip(self._ranks, peaces, strict=True)
        ]
        await self._wait(tasks, tasks, 4 * PATIENCE_S)
        _check_ended(tasks)
        check_no_tasks()

    @staticmethod
    def _start(name: str, play: Coroutine[object, object, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(play, name=name)

    async def _open(self) -> bool:
        """Open all; return whether they are, which is so of all or of none."""
        async with anyio.create_task_group() as group:
            opened: list[bool] = []
            for rank in self._ranks:
                group.start_soon(self._open_one, rank, opened)
        if len(set(opened)) > 1:
            raise LawError(f"{sum(opened)} of {len(opened)} ranks are open")
        return opened[0]

    async def _open_one(self, rank: Rank, opened: list[bool]) -> None:
        await anyio.sleep(_some(rank.world.dice, self._team.skew_s))
        try:
            await rank.open()
        except (OSError, StoreError) as error:
            rank.world.log(f"not opened: {error}")
        except RankError as error:
            rank.world.log(f"not opened: {error}")
            if not self._is_odd:
                raise
        opened.append(rank.cache._runtime is not None)  # noqa: SLF001 - the simulator looks inside

    async def _see(
        self, loops: list[asyncio.Task[None]], acts: list[asyncio.Task[None]]
    ) -> None:
        """See to it that all comes to its end; raise what anyone raises."""
        dice, rate = self._worlds[0].dice, self._case.rates.get(Mishap.CLOSE, 0.0)
        if acts and dice.random() < 2 * rate:
            await self._wait(acts, loops, dice.random() * 0.1)
            for world in self._worlds:
                world.note(Mishap.CLOSE)
        else:
            await self._wait(acts, loops, PATIENCE_S)
            await self._wait_for_orders(loops)
            await self._wait(self._handling(), loops, PATIENCE_S)
            self._post.write(_rest)
        self._post.write(_end)
        await self._wait(loops, loops, 4 * PATIENCE_S)
        everyone = [*acts, *self._handling(), *loops]
        await self._wait(everyone, loops, PATIENCE_S)
        _check_ended(everyone)

    async def _wait_for_orders(self, loops: list[asyncio.Task[None]]) -> None:
        """Wait until every loop has carried out all that was ordered by now."""
        self._post.write(_mark)
        for loop, task in zip(self._loops, loops, strict=True):
            waits = self._start("mark", _wait_for(loop.marked))
            await asyncio.wait([task, waits], return_when=asyncio.FIRST_COMPLETED)
            waits.cancel()

    def _handling(self) -> list[asyncio.Task[None]]:
        return [task for loop in self._loops for task in loop.handlers.tasks]

    @staticmethod
    async def _wait(
        tasks: list[asyncio.Task[None]], loops: list[asyncio.Task[None]], after_s: float
    ) -> None:
        """Wait for tasks to end; raise at once what ends a loop."""
        until = anyio.current_time() + after_s
        while pending := {task for task in tasks if not task.done()}:
            left_s = until - anyio.current_time()
            if left_s <= 0:
                return
            running = {task for task in loops if not task.done()}
            done, _ = await asyncio.wait(
                pending | running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in sorted(done, key=hash):
                task.result()

    # What actors do.

    async def _act(self, actor: Actor) -> None:
        await anyio.sleep(actor.at_s)
        loop = self._loops[actor.rank]
        if actor.role in _FOR_ALL:
            self._post.write(_order(actor))
        elif actor.role is Role.CLIENT:
            await loop.handlers.serve(actor)
        else:
            await self._trouble(actor, loop)

    async def _trouble(self, actor: Actor, loop: RankLoop) -> None:
        rank, number = loop.rank, actor.rank
        dice = Random(f"actor {self._case.seed} {actor.number}")
        match actor.role:
            case Role.SLOW:
                rank.world.note(Mishap.SLOW)
                rank.sleep_s += dice.choice([0.01, 0.05, 0.5, 1.0])
            case Role.SILENT:
                rank.world.note(Mishap.SILENT)
                self._party.note_fault(f"rank {number} is silent")
                self._network.silence(number)
            case Role.DEAD:
                rank.world.note(Mishap.DEAD)
                self._party.note_fault(f"rank {number} is dead")
                self._network.kill(number)
                loop.die()
            case Role.AHEAD:
                rank.is_ahead = True
            case Role.LEAVE:
                loop.leaves = True
            case _:
                try:
                    await Play(rank.scene, rank.world, self._case, actor, {}).act_now()
                except RankError as error:
                    failed_for_a_reason(self._party, error)


def _check_ended(tasks: list[asyncio.Task[None]]) -> None:
    """Raise what any of them raised, or if one has not ended."""
    if pending := [task.get_name() for task in tasks if not task.done()]:
        raise LawError(f"{pending} never end")
    for task in tasks:
        task.result()


def _some(dice: Random, scale_s: float) -> float:
    return scale_s * dice.expovariate(1.0) if scale_s else 0.0


def _order(actor: Actor) -> Callable[[Letters], object]:
    return lambda letters: letters.orders.append(actor)


async def _wait_for(event: anyio.Event) -> None:
    await event.wait()


def _mark(letters: Letters) -> None:
    letters.is_mark = True


def _rest(letters: Letters) -> None:
    letters.is_rest = True


def _end(letters: Letters) -> None:
    letters.is_end = True
