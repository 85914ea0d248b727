"""Ranks that are processes: torch.distributed, on a thread of our own."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Self

from asyncache.core import RankError
from asyncache.ranks._abc import Group
from asyncache.ranks._calls import check_call, check_timeout, left
from asyncache.ranks._gloo import Collective, check_own, meet
from asyncache.threads import Workers, when_over

if TYPE_CHECKING:
    import anyio
    import torch.distributed as dist


class TorchGroup(Group):
    """A group of processes that share an initialised ``torch.distributed``.

    It has gloo connections of its own between the ranks, so that nothing it sends
    meets what the model sends; one thread reduces, in the order of the calls.

    Making one blocks until every rank has: do it before the event loop runs. Once a
    rank is lost, close the group on all others, and make a new one.

    Args:
        ranks: Ranks of the default process group that form this one, all of them by
            default; only these make it, each as often as the others. Counted from 0
            in their order; the order given here means nothing.
        timeout_s: Seconds that a rank waits for the others: to meet here, then for
            each minimum, and at most for a reduce that is under way when it leaves. In
            [0.001, 86400]. The same on all ranks.

    Raises:
        OrderError: If ``torch.distributed`` is not initialised.
        RankError: If not all ranks have come within ``timeout_s``.
        ValueError: If ``timeout_s`` is out of bounds; or if ``ranks`` repeats one, has
            one that does not exist, or lacks this process's own.
    """

    def __init__(
        self, ranks: Sequence[int] | None = None, *, timeout_s: float = 10.0
    ) -> None:
        check_timeout(timeout_s)
        self._take(meet(ranks, timeout_s), timeout_s)

    @classmethod
    def adopt(
        cls,
        process_group: dist.ProcessGroup,
        *,
        timeout_s: float = 10.0,
    ) -> Self:
        """Return a group over a process group that the caller hands over.

        Args:
            process_group: Reduces tensors on the CPU, and is destroyed when this rank
                leaves. Nobody uses it, and nobody else refers to it, from now on: where
                somebody does, the others learn that this rank has left only by its
                silence.
            timeout_s: As for :class:`TorchGroup`.

        Raises:
            ValueError: If ``timeout_s`` is out of bounds, or the process group is the
                default one.
        """
        check_timeout(timeout_s)
        check_own(process_group)
        group = cls.__new__(cls)
        group._take(process_group, timeout_s)  # noqa: SLF001 - our own
        return group

    def _take(self, process_group: dist.ProcessGroup, timeout_s: float) -> None:
        self.rank = process_group.rank()
        self.num_ranks = process_group.size()
        self._timeout_s = timeout_s
        self._collective = Collective(process_group, timeout_s)
        # At the process's end an executor joins its thread, which a reduce keeps for
        # timeout_s; a daemon would be killed inside of gloo.
        self._workers = Workers(1, "asyncache-ranks", owner="group")
        self._num_calls = 0
        self._waits_for: anyio.Event | None = None
        self._over_because: str | None = None
        self._leaving: Future[None] | None = None

    def __repr__(self) -> str:
        """Show the rank, how many calls it has made, and what it is up to."""
        state = "idle" if self._waits_for is None else "waits"
        if self._over_because is not None:
            state = f"over: {self._over_because}"
        if self._leaving is not None:
            state = "left"
        place = f"{self.rank} of {self.num_ranks}"
        return f"<TorchGroup {place}, {self._num_calls} calls, {state}>"

    async def all_min(self, vector: array[int]) -> None:
        """Do as a :class:`Group` does; one reduce, or two if the length is another.

        Raises:
            RankError: If a rank is gone, sent another length, or did not call within
                ``timeout_s``; it ends the connections to all ranks.
            ClosedError: If this rank has left.
            OrderError: If this rank is still in another call, which goes on.
            ValueError: If the items are not int32.
        """
        check_call(
            vector,
            rank=self.rank,
            has_left=self._leaving is not None,
            is_waiting=self._waits_for is not None,
            over_because=self._over_because,
        )
        part = array("i", vector)
        reduced = self._workers.executor.submit(self._reduce, part)
        self._num_calls += 1
        self._waits_for = over = when_over([reduced])
        clock = asyncio.get_running_loop().call_later(self._timeout_s, over.set)
        try:
            await over.wait()
        finally:
            clock.cancel()
            self._waits_for = None
        self._settle(reduced)
        vector[:] = part

    async def aclose(self) -> None:
        """Leave the group, and return when its thread has ended.

        A round in which this rank has taken part goes on first, for ``timeout_s`` at
        most. Cancelled, it leaves none the less, a little later.
        """
        if self._leaving is None:
            self._leaving = self._workers.executor.submit(self._collective.leave)
            if self._waits_for is not None:
                self._waits_for.set()
        await when_over([self._leaving]).wait()
        await self._workers.aclose()
        self._leaving.result()

    def _reduce(self, part: array[int]) -> None:
        """Take part in the next round; runs on the thread."""
        if self._over_because is not None:
            raise RankError(self._over_because)
        try:
            self._collective.take_minimum(part)
        except BaseException as error:
            self._over_because = self._over_because or str(error)
            # Who waits for us, and not for the rank that is lost, has to hear of it.
            self._collective.leave()
            raise

    def _settle(self, reduced: Future[None]) -> None:
        """Raise unless a round has its minimum."""
        if reduced.done():
            reduced.result()
        elif self._leaving is not None:
            raise left(self.rank)
        else:
            self._over_because = f"no minimum within {self._timeout_s} s"
            # What the thread is at may still succeed, and the others go on.
            self._workers.executor.submit(self._collective.leave)
            raise RankError(self._over_because)
