"""The loop of one of several ranks, from the opening of its cache to its end."""

from __future__ import annotations

import asyncio
from random import Random

import anyio

from asyncache.core import RankError
from asyncache.testing.simulation._case import Case
from asyncache.testing.simulation._ending import (
    PATIENCE_S,
    check_rest,
    close,
    open_stages,
)
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._handlers import Handlers
from asyncache.testing.simulation._mishaps import Mishap
from asyncache.testing.simulation._party import Party, failed_for_a_reason
from asyncache.testing.simulation._post import Batch, Post
from asyncache.testing.simulation._rank import Rank

_PACE_S = 0.001
_MOST_STEPS = 5_000


class RankLoop:
    """Takes a rank through its batches; on the first rank, makes them.

    Args:
        rank: Whose loop it is.
        case: What is decided.
        party: All ranks.
        post: How they hear of each other.

    Attributes:
        handlers: Who holds scopes there.
        has_failed: Whether its cache ended with a RankError.
        marked: Set once the batch has come that somebody waits for.
        leaves: Whether it is to go while the others stay.
    """

    def __init__(self, rank: Rank, case: Case, party: Party, post: Post) -> None:
        self.rank = rank
        self.has_failed = False
        self.leaves = False
        self.marked = anyio.Event()
        self._case = case
        self._party = party
        self._post = post
        self._dice = Random(f"batches {case.seed}")
        self.handlers = Handlers(rank, case, party, post)
        self._task: asyncio.Task[object] | None = None
        self._is_dead = self._is_ending = False

    def die(self) -> None:
        """Let it be cancelled, and its cache be closed."""
        self._is_dead = True
        if self._task is not None and not self._is_ending:
            self._task.cancel()

    async def run(self) -> None:
        """Do what the batches say, until the last of them, and close the cache."""
        self._task = asyncio.current_task()
        try:
            await self._run()
        except RankError as error:
            self.rank.world.log(f"failed: {error}")
            self.has_failed = True
            failed_for_a_reason(self._party, error)
        except asyncio.CancelledError:
            if not self._is_dead:
                raise
        self._is_ending = True
        await self._end()

    async def _run(self) -> None:
        while not self.leaves:
            batch = await self._next()
            if batch is None:
                await self._find_out()
                return
            await self.rank.turn(batch)
            self.handlers.take_in()
            self.handlers.collect()
            if batch.is_mark:
                self.marked.set()
            if batch.is_rest:
                await rest(self.rank, self._party)
            if batch.is_end:
                # Others may be in their last step as yet.
                self._party.note_fault("ranks close")
                return
        self._party.note_fault("a rank has left")
        self.rank.world.note(Mishap.LEAVE)
        self._post.close()

    async def _end(self) -> None:
        if self.has_failed or self._is_dead:
            self._post.close()
        for place in self.rank.places.values():
            place.end()
        await close(self.rank.scene, self.rank.world, self._case)
        await self.rank.finish_forwards()
        self.rank.world.end()

    async def _next(self) -> Batch | None:
        if self.rank.number == 0 and not self._post.is_over:
            await anyio.sleep(_PACE_S)
            if self.rank.is_idle and not self._post.has_letters:
                await self._post.news(0, 1.0)
            letters, dice = self._post.take(), self._dice
            self._post.send(
                Batch(
                    prompts=letters.prompts,
                    left=letters.left,
                    orders=letters.orders,
                    launches=dice.random() < 0.5,
                    timeout_s=dice.choice([0.0, 0.002, 0.02, 0.02]),
                    is_mark=letters.is_mark,
                    is_rest=letters.is_rest,
                    is_end=letters.is_end,
                )
            )
        return await self._post.receive(self.rank.number)

    async def _find_out(self) -> None:
        """Step until this rank has heard, too, that another is gone."""
        replica = self.rank.world.replica
        assert replica is not None
        self.rank.group.is_lost = True
        for _ in range(10):
            if not replica.look.needs_verdict:
                return
            await self.rank.step(0.01)
        raise LawError(f"rank {self.rank.number} goes on, though another is gone")


async def rest(rank: Rank, party: Party) -> None:
    """Let a rank come to rest; then nothing may be left, and nothing be agreed on."""
    replica = rank.world.replica
    assert replica is not None
    with rank.world.weather.paused():
        await rank.finish_forwards()
        if left := await rank.cache.drain(deadline_s=PATIENCE_S):
            raise LawError(f"{left} transfers never end: {open_stages(rank.world)}")
        for _ in range(_MOST_STEPS):
            if not replica.look.needs_verdict and not rank.places:
                break
            await rank.step(0.01)
        await rank.step(0.0)
        num_calls = rank.group.num_calls
        for _ in range(3):
            await rank.step(0.0)
        if rank.group.num_calls != num_calls:
            raise LawError("ranks agree, and there is nothing to agree on")
        # A lookup that was stopped moves nothing, and may still have to end.
        until = anyio.current_time() + PATIENCE_S
        while rank.cache.statistics().transfers and anyio.current_time() < until:  # noqa: ASYNC110 - no event of ours tells
            await anyio.sleep(0.001)
        if not party.is_uneven:
            check_rest(rank.scene, rank.world)
