"""Ranks in one event loop, whose messages take their time, overtake and get lost."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from random import Random

import anyio

from asyncache.core import ClosedError, OrderError, RankError
from asyncache.ranks import Group
from asyncache.testing.simulation._wire import NEVER, Round, Station, Wire


class SimulatedNetwork:
    """What joins the ranks of a simulated group, and what a test breaks it with.

    Time is that of the event loop, real or virtual. The same dice and the same calls
    in the same order make the same delays. Faults are injected from within the loop.

    Args:
        num_ranks: Ranks of the group.
        dice: Chooses delays; the network draws from it only while it is called.
        delay_s: Seconds that a message travels, drawn anew for each: the bounds that
            the dice choose between, or a function that is asked instead.
        silence_s: Seconds after its call at which a rank that has no minimum yet gives
            the group up. Larger than two delays, and than ranks are apart.

    Raises:
        ValueError: If there is no rank, a bound is negative or not in order, or
            ``silence_s`` is not positive.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        dice: Random,
        delay_s: Callable[[], float] | tuple[float, float] = (0.0001, 0.001),
        silence_s: float = 5.0,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, not {num_ranks}")
        if not silence_s > 0:
            raise ValueError(f"silence_s must be positive, not {silence_s}")
        if not callable(delay_s):
            if not 0 <= delay_s[0] <= delay_s[1] < NEVER:
                raise ValueError(f"delay_s must be bounds in order, not {delay_s}")
            delay_s = partial(dice.uniform, *delay_s)
        self._wire = Wire([Station(rank) for rank in range(num_ranks)], delay_s)
        self._groups = [
            SimulatedGroup(self._wire, r, silence_s) for r in range(num_ranks)
        ]

    def __repr__(self) -> str:
        """Show each rank."""
        return f"<SimulatedNetwork {self._groups}>"

    def group(self, rank: int) -> SimulatedGroup:
        """Return the group as one rank sees it; the same object each time."""
        return self._groups[rank]

    def silence(self, rank: int) -> None:
        """Lose whatever a rank sends from now on; it still hears the others.

        What it sent before still arrives. There is no way back: a lost part is never
        sent again, so the round that it was for never ends.
        """
        self._wire.stations[rank].is_silent = True

    def kill(self, rank: int) -> None:
        """Let a rank die: its calls raise RankError from now on.

        The others hear of it within one delay, even of a silent rank's death, as of a
        closed connection. What it sent before still arrives.
        """
        died = partial(RankError, f"rank {rank} is dead")
        self._wire.stations[rank].hear(anyio.current_time(), died)
        self._wire.tell(rank, died)


class SimulatedGroup(Group):
    """The group as one rank of a :class:`SimulatedNetwork` sees it.

    A rank's k-th call of ``all_min`` is its part in round k, whatever became of its
    earlier calls.
    """

    def __init__(self, wire: Wire, rank: int, silence_s: float) -> None:
        self.rank = rank
        self.num_ranks = len(wire.stations)
        self._wire = wire
        self._station = wire.stations[rank]
        self._silence_s = silence_s
        self._is_waiting = False
        self._is_closed = False

    def __repr__(self) -> str:
        """Show the rank, how many calls it has made, and what it is up to."""
        state = "waits" if self._is_waiting else "idle"
        if self._station.over_at < NEVER:
            state = f"over: {self._station.error()}"
        return f"<SimulatedGroup {self.rank}, {self._station.num_calls} calls, {state}>"

    async def all_min(self, vector: array[int]) -> None:
        """Replace each item of ``vector``, int32, by its minimum over all ranks.

        The part is copied and sent before the call first waits. A call that is
        cancelled leaves ``vector`` as it was, and its part counts: the others go on,
        the minimum of that round is lost to this rank, and its next call is its part
        in the next round. ``vector`` is written once, in the turn in which the call
        returns.

        Raises:
            RankError: If a rank is gone, silent, or sent another length; the group is
                over then, and every later call raises RankError at once.
            ClosedError: If this rank has left.
            OrderError: If this rank is still in another call, which goes on.
            ValueError: If the items are not int32.
        """
        if vector.typecode != "i":
            raise ValueError(f"items must be int32, 'i', not {vector.typecode!r}")
        if self._is_waiting:
            raise OrderError(f"rank {self.rank} is still in another call of all_min()")
        self._station.check()
        part = self._wire.send(self.rank, array("i", vector))
        self._is_waiting = True
        try:
            minimum = await self._minimum(part)
        finally:
            self._is_waiting = False
        vector[:] = minimum

    async def aclose(self) -> None:
        """Leave the group; a call that waits ends with ClosedError.

        The others' calls raise RankError within one delay, except that a round in which
        every rank has taken part still gives them its minimum.
        """
        if self._is_closed:
            return
        self._is_closed = True
        left = partial(ClosedError, f"rank {self.rank} has left its group")
        self._station.hear(anyio.current_time(), left)
        if not self._station.is_silent:
            gone = partial(RankError, f"rank {self.rank} has left")
            self._wire.say_farewell(self.rank, gone)

    async def _minimum(self, round_: Round) -> array[int]:
        """Wait for the first of the minimum, the group's end, the end of patience."""
        station = self._station
        gives_up_at = anyio.current_time() + self._silence_s
        while True:
            learned_at = round_.learned_at[self.rank]
            # By when they happened, not by what is looked at first: a loop that was
            # busy wakes us late, and must not change who wins.
            moment = min(learned_at, station.over_at, gives_up_at)
            if anyio.current_time() < moment:
                await station.sleep_until(moment)
            elif learned_at == moment:
                return round_.minimum
            elif station.over_at == moment:
                station.check()
            else:
                self._give_up(round_, moment)

    def _give_up(self, round_: Round, moment: float) -> None:
        missing = [r for r, at in enumerate(round_.arrives_at) if at > moment]
        silent = partial(
            RankError, f"nothing of ranks {missing} within {self._silence_s} s"
        )
        self._station.hear(moment, silent)
        if not self._station.is_silent:
            self._wire.tell(self.rank, silent)
