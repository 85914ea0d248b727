"""A lane: how many requests of a store are under way at once, over all its calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from asyncache.threads import Workers

_Item = TypeVar("_Item")


class Lane:
    """Jobs, a bounded number at a time; others wait in order.

    Args:
        num_jobs: The bound.
        workers: Threads for what jobs do with memory: the loop must not wait for it.

    Attributes:
        room: What a job holds, ``async with``, while a request of its is under way.
        workers: The threads.
    """

    def __init__(self, num_jobs: int, workers: Workers) -> None:
        self._num_jobs = num_jobs
        self.room = anyio.Semaphore(num_jobs)
        self.workers = workers

    async def each(
        self, items: Sequence[_Item], job: Callable[[_Item], Awaitable[object]]
    ) -> None:
        """Do a job with room for each item; return when none of them is under way."""

        async def with_room(item: _Item) -> None:
            async with self.room:
                await job(item)

        await self.spread(items, with_room)

    async def spread(
        self, items: Sequence[_Item], job: Callable[[_Item], Awaitable[object]]
    ) -> None:
        """Do as :meth:`each` with jobs that see to their room themselves."""
        waiting = iter(items)

        async def work() -> None:
            for item in waiting:
                await job(item)

        if len(items) == 1:
            await work()
            return
        async with anyio.create_task_group() as tasks:
            for _ in range(min(self._num_jobs, len(items))):
                tasks.start_soon(work)
