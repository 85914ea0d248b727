"""How the loops of several ranks hear of each other: letters up, batches down."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import anyio

from asyncache.engine import Prompt
from asyncache.testing.simulation._case import Actor


@dataclass(slots=True)
class Letters:
    """What the first rank has been told of, and has yet to put into a batch."""

    prompts: list[Prompt] = field(default_factory=list)
    left: dict[int, bool] = field(default_factory=dict)
    orders: list[Actor] = field(default_factory=list)
    is_mark: bool = False
    is_rest: bool = False
    is_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What every rank does in one gap, in this order.

    Args:
        prompts: Are admitted.
        left: Requests that are dismissed, and whether they were aborted.
        orders: Actors whose parts all ranks play.
        launches: Whether loads that wait for it are started.
        timeout_s: Seconds that a rank without news waits before it casts.
        is_mark: Whether somebody waits for this batch.
        is_rest: Whether all comes to rest now, and is looked at.
        is_end: Whether nothing follows.
    """

    prompts: list[Prompt]
    left: Mapping[int, bool]
    orders: list[Actor]
    launches: bool
    timeout_s: float
    is_mark: bool
    is_rest: bool
    is_end: bool


class Post:
    """Carries letters to the first rank, and its batches to all, in order.

    Args:
        num_ranks: How many.
        delay_s: Returns how long the next one takes, in seconds.
    """

    def __init__(self, num_ranks: int, delay_s: Callable[[], float]) -> None:
        self._delay_s = delay_s
        self._letters = Letters()
        self._boxes: list[deque[Batch]] = [deque() for _ in range(num_ranks)]
        self._up: deque[Callable[[Letters], object]] = deque()
        self._down: list[deque[Batch]] = [deque() for _ in range(num_ranks)]
        self._last_up, self._last_down = 0.0, [0.0] * num_ranks
        self._news = [anyio.Event() for _ in range(num_ranks)]
        self.is_over = False
        """Whether some loop is gone, so that nobody should wait for a batch."""

    def write(self, add: Callable[[Letters], object]) -> None:
        """Add something to the letters of the first rank, after a while."""
        self._up.append(add)
        self._last_up = self._arrives(self._last_up, self._deliver)

    def _arrives(
        self, last_at: float, deliver: Callable[..., object], *to: int
    ) -> float:
        """Deliver something after a while, and after what was sent before."""
        loop = asyncio.get_running_loop()
        at = max(last_at, loop.time() + self._delay_s())
        loop.call_at(at, deliver, *to)
        return at

    def _deliver(self) -> None:
        self._up.popleft()(self._letters)
        self._ring(0)

    def take(self) -> Letters:
        """Return all letters that have come."""
        letters, self._letters = self._letters, Letters()
        return letters

    @property
    def has_letters(self) -> bool:
        """Whether any have come."""
        return self._letters != Letters()

    def send(self, batch: Batch) -> None:
        """Send a batch to all ranks."""
        for rank, sent in enumerate(self._down):
            sent.append(batch)
            at = self._arrives(self._last_down[rank], self._put, rank)
            self._last_down[rank] = at

    def _put(self, rank: int) -> None:
        # Two that come at one moment come in any order, and are still in theirs.
        self._boxes[rank].append(self._down[rank].popleft())
        self._ring(rank)

    async def receive(self, rank: int) -> Batch | None:
        """Return the next batch; None if none will come, because a loop is gone."""
        while not self._boxes[rank]:
            if self.is_over:
                return None
            await self.news(rank)
        return self._boxes[rank].popleft()

    async def news(self, rank: int, timeout_s: float = float("inf")) -> None:
        """Wait until something comes for a rank."""
        self._news[rank] = anyio.Event()
        with anyio.move_on_after(timeout_s):
            await self._news[rank].wait()

    def close(self) -> None:
        """Let everybody hear that a loop is gone."""
        self.is_over = True
        for rank in range(len(self._boxes)):
            self._ring(rank)

    def _ring(self, rank: int) -> None:
        self._news[rank].set()
