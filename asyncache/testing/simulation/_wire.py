"""When a simulated message arrives: the parts of a round, its minimum, bad news.

All of it is settled as it is sent, so there is no task that carries messages about, and
none to be cancelled.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import anyio

from asyncache.core import AsyncacheError, RankError

NEVER = math.inf
"""The moment, in seconds of the loop's clock, at which what is lost arrives."""


@dataclass(slots=True)
class Station:
    """What one rank has heard, or is about to hear."""

    rank: int
    num_calls: int = 0
    is_silent: bool = False
    over_at: float = NEVER
    """From when on the group is over for this rank, by the loop's clock."""
    error: Callable[[], AsyncacheError] = AsyncacheError
    """Makes what its calls raise from then on."""
    last_learned_at: float = -NEVER
    _changed: anyio.Event | None = None

    def check(self) -> None:
        """Raise if the group is over, as far as this rank has heard by now."""
        if self.over_at <= anyio.current_time():
            raise self.error()

    def hear(self, at: float, error: Callable[[], AsyncacheError]) -> None:
        """Let the group be over for this rank from a moment on."""
        if at < self.over_at:
            self.over_at, self.error = at, error
            self.wake()

    async def sleep_until(self, moment: float) -> None:
        """Sleep, at the longest until a moment, for it may change."""
        self._changed = anyio.Event()
        with anyio.CancelScope(deadline=moment):
            await self._changed.wait()

    def wake(self) -> None:
        """Let a sleeper look again."""
        if self._changed is not None:
            self._changed.set()


@dataclass(slots=True)
class Round:
    """The parts of one round, by rank."""

    arrives_at: list[float]
    learned_at: list[float]
    num_parts: int = 0
    minimum: array[int] = field(default_factory=partial(array, "i"))


@dataclass(slots=True)
class Wire:
    """The rounds that some ranks have not called for yet, and the way to all ranks."""

    stations: list[Station]
    delay_s: Callable[[], float]
    _rounds: dict[int, Round] = field(default_factory=dict)

    def send(self, rank: int, part: array[int]) -> Round:
        """Take a rank's next part on its way; return the round that it is for."""
        station, nowhere = self.stations[rank], [NEVER] * len(self.stations)
        number, station.num_calls = station.num_calls, station.num_calls + 1
        round_ = self._rounds.setdefault(number, Round(nowhere, nowhere.copy()))
        if not station.is_silent:
            self._add(round_, rank, part)
        round_.num_parts += 1
        if round_.num_parts == len(self.stations):
            self._finish(self._rounds.pop(number))
        return round_

    def _add(self, round_: Round, rank: int, part: array[int]) -> None:
        others = [at for at in round_.arrives_at if at < NEVER]
        round_.arrives_at[rank] = arrival = anyio.current_time() + self.delay_s()
        if not others:
            round_.minimum = part
        elif len(part) == len(round_.minimum):
            round_.minimum = array("i", map(min, round_.minimum, part))
        else:
            self._refuse(round_, max(arrival, *others), rank, len(part))

    def _refuse(self, round_: Round, at: float, rank: int, num_items: int) -> None:
        others = len(round_.minimum)
        uneven = f"rank {rank} sent {num_items} items, others {others}"
        round_.arrives_at[rank] = NEVER
        for station in self.stations:
            station.hear(at + self.delay_s(), partial(RankError, uneven))

    def _finish(self, round_: Round) -> None:
        """All parts are on their way, or lost: settle when which rank learns of it."""
        there_at = max(round_.arrives_at)
        if there_at == NEVER:
            return
        for station in self.stations:
            station.last_learned_at = there_at + self.delay_s()
            round_.learned_at[station.rank] = station.last_learned_at
            station.wake()

    def tell(self, rank: int, error: Callable[[], AsyncacheError]) -> None:
        """Tell all ranks but one that the group is over; may overtake a minimum."""
        now = anyio.current_time()
        for station in self._others(rank):
            station.hear(now + self.delay_s(), error)

    def say_farewell(self, rank: int, error: Callable[[], AsyncacheError]) -> None:
        """Tell all ranks but one that it has left, after what it had a part in."""
        now = anyio.current_time()
        for station in self._others(rank):
            at = max(now + self.delay_s(), station.last_learned_at)
            station.hear(at, error)

    def _others(self, rank: int) -> list[Station]:
        return [station for station in self.stations if station.rank != rank]
