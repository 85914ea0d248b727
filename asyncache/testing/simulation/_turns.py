"""Clients of several ranks: each is played by every rank's loop, turn by turn.

What a client decides goes by dice that are the same on every rank, and by what is the
same on every rank, such as how long its hit is. So its calls are the same ones, in the
same gaps, though no rank asks another.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from random import Random
from types import coroutine

import anyio

from asyncache.engine import Hit, Request
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._mishaps import Mishap
from asyncache.testing.simulation._model import Row
from asyncache.testing.simulation._pace import Pace
from asyncache.testing.simulation._party import Party
from asyncache.testing.simulation._scene import Scene

_MOST_LATE = 8
"""Turns that a restore may take after its deadline on the last rank: a lookup and a
wait, each of which is voted on, agreed on, and in a pipelined barrier taken later."""


_PATIENT = 5
"""How many times longer than with one rank a restore may take: each step takes time."""


class Script:
    """A coroutine that a loop takes on from turn to turn, within its own task."""

    def __init__(self, play: Coroutine[object, object, object]) -> None:
        self._play = play
        self.result: object = None
        """What it returned, once it is over."""

    def go_on(self) -> bool:
        """Take its next turn; return whether it is over. Raises what it raises."""
        try:
            awaited = self._play.send(None)
        except StopIteration as end:
            self.result = end.value
            return True
        if awaited is not None:
            raise LawError(f"a client of several ranks awaits {awaited!r}")
        return False

    def close(self) -> None:
        """Let it be over."""
        self._play.close()


@coroutine
def _next_turn() -> Generator[None, None, None]:
    yield


class TurnPace(Pace):
    """Where there are several ranks: each wait is some turns of the loop.

    Args:
        scene: Where it plays.
        party: All ranks.
        join: Takes a row for the forward of this turn.
        dice: What it goes by, the same on every rank.
        runs_ahead: Whether it may go on though its forward has not ended.
    """

    def __init__(
        self,
        scene: Scene,
        party: Party,
        join: Callable[[Row], object],
        *,
        dice: Random,
        runs_ahead: bool,
    ) -> None:
        self._scene = scene
        self._party = party
        self._join = join
        self._dice = dice
        self._runs_ahead = runs_ahead
        self._num_restores = 0
        self._until = 0.0
        self._key = (0, 0)

    async def restore(self, request: Request, after_s: float) -> Hit:
        self._num_restores += 1
        self._key = (request.id, self._num_restores)
        after_s *= _PATIENT
        self._until = anyio.current_time() + after_s
        deadlines = self._party.deadlines
        deadlines[self._key] = max(deadlines[self._key], self._until)
        hit = request.restore_nowait(deadline_s=after_s)
        await self._turns_until(request, lambda: hit.agreed)
        return hit

    async def land(self, request: Request, hit: Hit) -> None:
        await self._turns_until(request, lambda: hit.settled)

    async def compute(self, row: Row) -> None:
        self._join(row)
        await self._turn(row.request)
        may_run_ahead = self._runs_ahead and row.gates is None
        if not (may_run_ahead and self._dice.random() < 0.4):
            while not row.done.is_set():
                await self._turn(row.request)
        if row.error is not None:
            raise row.error

    async def idle(self) -> None:
        for _ in range(self._dice.randint(1, 3)):
            await _next_turn()

    async def _turns_until(self, request: Request, holds: Callable[[], bool]) -> None:
        num_late = 0
        while not holds():
            was_late = anyio.current_time() >= self._until
            await self._turn(request)
            if anyio.current_time() >= self._until and not was_late:
                self._scene.note(Mishap.DEADLINE, request)
            num_late += anyio.current_time() > self._party.deadlines[self._key]
            if num_late > _MOST_LATE:
                raise LawError(
                    f"a restore of {request} goes on {num_late} steps after its end"
                )

    @staticmethod
    async def _turn(request: Request) -> None:
        await _next_turn()
        request.num_tokens  # noqa: B018 - raises if it has ended meanwhile
