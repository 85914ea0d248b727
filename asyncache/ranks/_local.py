"""Ranks that are tasks of one event loop."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import Self

import anyio

from asyncache.core import OrderError, RankError
from asyncache.ranks._abc import Group
from asyncache.ranks._calls import check_call, check_timeout, left


class LocalGroup(Group):
    """One rank of a group whose ranks are all in this process, in one event loop.

    Made by :meth:`of`, all ranks at once. The group ends for all ranks at once, too.
    """

    @classmethod
    def of(cls, num_ranks: int, *, timeout_s: float = 10.0) -> list[Self]:
        """Return a group of so many ranks: what each of them holds, in order.

        Args:
            num_ranks: At least 1.
            timeout_s: Seconds of the loop's clock that a call waits for the others;
                in [0.001, 86400].

        Raises:
            ValueError: If an argument is out of its bounds.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, not {num_ranks}")
        check_timeout(timeout_s)
        table = _Table(num_ranks)
        return [cls(table, rank, timeout_s) for rank in range(num_ranks)]

    def __init__(self, table: _Table, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.num_ranks = table.num_ranks
        self._table = table
        self._timeout_s = timeout_s
        self._num_calls = 0
        self._is_waiting = False
        self._has_left = False

    def __repr__(self) -> str:
        """Show the rank, how many calls it has made, and what it is up to."""
        state = "waits" if self._is_waiting else "idle"
        if self._table.over_because is not None:
            state = f"over: {self._table.over_because}"
        place = f"{self.rank} of {self.num_ranks}"
        return f"<LocalGroup {place}, {self._num_calls} calls, {state}>"

    async def all_min(self, vector: array[int]) -> None:
        """Do as a :class:`Group` does; the last rank of a round does not wait at all.

        Raises:
            RankError: If a rank has left, sent another length, or did not call within
                ``timeout_s``.
            ClosedError: If this rank has left.
            OrderError: If this rank is still in another call, which goes on; or if the
                others wait in another event loop.
            ValueError: If the items are not int32.
        """
        check_call(
            vector,
            rank=self.rank,
            has_left=self._has_left,
            is_waiting=self._is_waiting,
            over_because=self._table.over_because,
        )
        round_ = self._table.take(self._num_calls, self.rank, vector)
        self._num_calls += 1
        self._is_waiting = True
        try:
            with anyio.move_on_after(self._timeout_s):
                await self._wait(round_)
        finally:
            self._is_waiting = False
        if not round_.is_complete:
            self._give_up(round_)
        vector[:] = round_.minimum

    async def aclose(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._table.end(f"rank {self.rank} has left")

    @staticmethod
    async def _wait(round_: _Round) -> None:
        if not round_.over.is_set():
            await round_.over.wait()

    def _give_up(self, round_: _Round) -> None:
        if self._has_left:
            raise left(self.rank)
        missing = sorted(set(range(self.num_ranks)) - round_.ranks)
        silent = f"nothing of ranks {missing} within {self._timeout_s} s"
        raise RankError(self._table.end(silent))


@dataclass(slots=True)
class _Round:
    """What the ranks that have called so far make of it."""

    minimum: array[int]
    ranks: set[int] = field(default_factory=set)
    is_complete: bool = False
    over: anyio.Event = field(default_factory=anyio.Event)
    """Set when it is complete, or never will be."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)


@dataclass(slots=True)
class _Table:
    """Where the ranks of a group meet."""

    num_ranks: int
    over_because: str | None = None
    _open: dict[int, _Round] = field(default_factory=dict)

    def take(self, number: int, rank: int, part: array[int]) -> _Round:
        """Take a rank's part in a round; raise RankError if its length is another."""
        round_ = self._open.get(number)
        if round_ is None:
            round_ = self._open[number] = _Round(array("i", part))
        elif round_.loop is not asyncio.get_running_loop():
            raise OrderError(f"rank {rank} calls from another event loop")
        elif len(part) == len(round_.minimum):
            round_.minimum = array("i", map(min, round_.minimum, part))
        else:
            num_items = len(round_.minimum)
            uneven = f"rank {rank} sent {len(part)} items, others {num_items}"
            raise RankError(self.end(uneven))
        round_.ranks.add(rank)
        if len(round_.ranks) == self.num_ranks:
            round_.is_complete = True
            round_.over.set()
            del self._open[number]
        return round_

    def end(self, reason: str) -> str:
        """End the group, unless it has ended; return why it did."""
        if self.over_because is None:
            self.over_because = reason
            for round_ in self._open.values():
                round_.over.set()
            self._open.clear()
        return self.over_because
