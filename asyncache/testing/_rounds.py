"""Calls of a group's ranks, and what may have come of them: what its kit is made of."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from random import Random
from typing import TypeVar

import anyio
import anyio.abc
import anyio.lowlevel

from asyncache.core import AsyncacheError, RankError
from asyncache.ranks import Group

T = TypeVar("T")

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
# Enough for one rank to be a round ahead of another.
MAX_TURNS = 12
"""Turns of the event loop that a rank is late by, at most."""


@dataclass(slots=True)
class Call:
    """One call of one rank, and what came of it: nothing, if it was cancelled."""

    group: Group
    items: list[int]
    vector: array[int] = field(init=False)
    error: AsyncacheError | None = None
    has_returned: bool = False
    ended: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.vector = array("i", self.items)

    def __str__(self) -> str:
        result = self.vector.tolist() if self.error is None else self.error
        return f"rank {self.group.rank} has {result!r:.200}"

    async def run(self) -> None:
        try:
            await self.group.all_min(self.vector)
            self.has_returned = True
        except AsyncacheError as error:
            self.error = error
        finally:
            self.ended.set()


@dataclass(frozen=True, slots=True)
class Subject:
    """A group, and rounds to play on it that are the same in each run."""

    groups: Sequence[Group]
    patience_s: float
    random: Random = field(default_factory=partial(Random, 0))

    def round(self, *, num_items: int = 5) -> list[Call]:
        """Return a call a rank; items differ from rank to rank and round to round."""
        draw = partial(self.random.randint, INT32_MIN, INT32_MAX)
        return [
            Call(group, [draw() for _ in range(num_items)]) for group in self.groups
        ]

    async def play(self, *rounds: Sequence[Call]) -> None:
        """Let each rank make its calls, one after another, at a pace of its own."""
        ranks = list(zip(*rounds, strict=True))
        with self.patience(len(rounds)):
            async with open_tasks() as tasks:
                for calls in self.random.sample(ranks, len(ranks)):
                    turns = [self.random.randrange(MAX_TURNS) for _ in calls]
                    tasks.start_soon(run, calls, turns)

    @contextmanager
    def patience(self, num_calls: int = 1) -> Iterator[None]:
        """Raise AssertionError if so many calls, one after another, take too long."""
        limit_s = self.patience_s * num_calls
        with anyio.move_on_after(limit_s) as scope:
            yield
        expect(not scope.cancelled_caught, f"a call waits for {limit_s} s")


@asynccontextmanager
async def open_tasks() -> AsyncIterator[anyio.abc.TaskGroup]:
    """Open a task group out of which an error comes bare, not in an ExceptionGroup."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def run(calls: Iterable[Call], turns: Iterable[int] = repeat(0)) -> None:
    for call, num_turns in zip(calls, turns, strict=False):
        await wait_turns(num_turns)
        await call.run()


async def wait_turns(count: int) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


def all_but(of_ranks: Sequence[T], culprit: int) -> list[T]:
    return [of_rank for rank, of_rank in enumerate(of_ranks) if rank != culprit]


def _minimum(calls: Sequence[Call]) -> list[int]:
    return list(map(min, zip(*(call.items for call in calls), strict=True)))


def expect_minimum(calls: Sequence[Call]) -> None:
    minimum = _minimum(calls)
    for call in calls:
        is_right = call.has_returned and call.vector.tolist() == minimum
        expect(is_right, f"the minimum is {minimum!r:.200}, {call}")


def expect_rank_errors(calls: Iterable[Call]) -> None:
    for call in calls:
        expect(isinstance(call.error, RankError), f"RankError is due, {call}")


async def expect_over(subject: Subject, groups: Sequence[Group]) -> None:
    for group in groups:
        call = Call(group, [0])
        with subject.patience():
            await call.run()
        expect_rank_errors([call])


def expect_in_step_or_over(rounds: Sequence[Sequence[Call]]) -> None:
    """A rank may be the first to see the end, but a round later all have."""
    is_over = False
    for calls in rounds:
        minimum = _minimum(calls)
        for call in calls:
            if is_over or call.error is not None:
                expect_rank_errors([call])
            else:
                allowed = [minimum] if call.has_returned else [minimum, call.items]
                expect(call.vector.tolist() in allowed, f"not {minimum}, {call}")
        is_over = is_over or any(call.error is not None for call in calls)


def expect(holds: bool, law: str) -> None:  # noqa: FBT001 - a law's truth
    if not holds:
        raise AssertionError(law)
