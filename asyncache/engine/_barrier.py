"""The drain barrier of several ranks: one ballot, one minimum, one verdict a step.

=========  =================================  =========================================
state      event                              next
=========  =================================  =========================================
RESTING    a step, nothing to agree on        RESTING: no collective
RESTING    a step, else                       REDUCING: a task of the engine's reduces
REDUCING   the minimum; this step, or when    RESTING: the verdict is applied
           pipelined the next, takes it
REDUCING   the step that waits is cancelled   REDUCING: the next step waits on
REDUCING   no minimum within ``barrier_s``,   BROKEN: nothing is applied any more
           or the group is over
RESTING    the verdict shows that ranks       BROKEN
           differ
=========  =================================  =========================================

A call may come between two steps and nowhere else, for on every rank it has to find the
same state. So a step that was cut short is owed: no call is made until it was repeated.
What steps by itself, such as a drain, is never cut short in the middle of a step.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import anyio
import anyio.lowlevel

from asyncache.core import Ballot, ClosedError, OrderError, RankError
from asyncache.engine._driver import Driver
from asyncache.engine._patience import wait_out
from asyncache.ranks import Group


class Round(NamedTuple):
    """A ballot under way, the vector that becomes its verdict, and who reduces it."""

    ballot: Ballot
    vector: array[int]
    task: asyncio.Task[None]


class Barrier:
    """Takes one rank's driver through its steps.

    Args:
        driver: Whose votes are cast, and to which verdicts are applied.
        group: The ranks.
        timeout_s: Seconds to wait for the slowest rank's part.
        is_pipelined: Whether a step takes the minimum of the one before, so that the
            reduce runs under the forward between them.
    """

    def __init__(
        self, driver: Driver, group: Group, *, timeout_s: float, is_pipelined: bool
    ) -> None:
        self._driver = driver
        self._group = group
        self._timeout_s = timeout_s
        self._is_pipelined = is_pipelined
        self._round: Round | None = None
        self._reducing: asyncio.Task[None] | None = None
        self._is_closed = False
        self._is_stepping = False
        self._is_owed = False
        self._goes_on = True
        self._loop_task: asyncio.Task[object] | None = None
        self._news = anyio.Event()
        self._closing: asyncio.Task[None] | None = None
        self.num_steps = 0
        """Steps that came to their end."""

    # The gap between two steps.

    def check_gap(self) -> None:
        """Raise OrderError unless a call may be made here and now.

        Calls come from one task, the loop; the first that makes one is it.
        """
        self._check_task()
        if self._is_stepping:
            raise OrderError("a step() is under way: call before it, or after")
        if self._is_owed:
            raise OrderError("a step() was cut short: await it again, then call")

    def _check_task(self) -> None:
        task = asyncio.current_task()
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = task
        if task is None or task is not self._loop_task:
            raise OrderError(
                "with several ranks calls come from one task, the loop:"
                f" {self._loop_task!r} made the first, this is {task!r}"
            )

    # Steps.

    async def step(self, *, patience_s: float = 0.0, goes_on: bool = True) -> bool:
        """Agree with the other ranks on all that is open.

        Args:
            patience_s: Seconds to wait at most for something to say, before casting.
            goes_on: False to give up what all ranks are at.

        Returns:
            Whether all ranks go on, as far as their votes are known.

        Raises:
            OrderError: If another task steps, or is the loop.
            RankError: If the ranks differ, or one is gone or silent.
        """
        self._check_task()
        if self._is_stepping:
            raise OrderError("a step() is under way already")
        if not self._is_owed:
            self._goes_on = True
        self._is_stepping = self._is_owed = True
        try:
            await self._take_step(patience_s, goes_on=goes_on)
        finally:
            self._is_stepping = False
        self._is_owed = False
        self.num_steps += 1
        return self._goes_on

    async def _take_step(self, patience_s: float, *, goes_on: bool) -> None:
        if self._is_pipelined:
            await self._collect()
        if self._round is None:
            await self._await_news(patience_s)
            self._cast(goes_on=goes_on)
        if not self._is_pipelined:
            await self._collect()
        self._check()

    async def step_through(
        self, *, patience_s: float, goes_on: bool
    ) -> asyncio.CancelledError | None:
        """Step to the end, whatever cancels the caller; return what did."""
        return await self._go_through(
            lambda: self.step(patience_s=patience_s, goes_on=goes_on)
        )

    async def flush(self) -> asyncio.CancelledError | None:
        """Take the minimum that is under way; return what cancelled the caller."""
        self.check_gap()
        return await self._go_through(self._take_minimum)

    async def _take_minimum(self) -> None:
        await self._collect()
        self._check()

    @staticmethod
    async def _go_through(
        work: Callable[[], Awaitable[object]],
    ) -> asyncio.CancelledError | None:
        """Do something that may be repeated until it came to its end.

        A shield holds off a scope, and a loop holds off ``task.cancel()``.
        """
        cancelled, is_done = None, False
        while not is_done:
            try:
                with anyio.CancelScope(shield=True):
                    await work()
                    is_done = True
                await anyio.lowlevel.checkpoint_if_cancelled()
            except asyncio.CancelledError as error:
                cancelled = error
        return cancelled

    @property
    def goes_on(self) -> bool:
        """Whether all ranks went on in the last step, as far as votes are known."""
        return self._goes_on

    @property
    def is_at_rest(self) -> bool:
        """Whether further steps would change nothing; the same on every rank."""
        return self._round is None and not self._driver.replica.look.needs_verdict

    def notify(self) -> None:
        """Take note that this rank has something to say."""
        self._news.set()

    async def _await_news(self, patience_s: float) -> None:
        # The others wait already if they have news: not until they give this one up.
        patience_s = min(patience_s, self._timeout_s / 2)
        if patience_s > 0 and not self._has_news:
            with anyio.move_on_after(patience_s):
                await self._news.wait()
        self._news = anyio.Event()

    @property
    def _has_news(self) -> bool:
        driver = self._driver
        return self._news.is_set() or (
            # Else it is cast with the next ballot, whenever there is one.
            driver.has_news and driver.replica.look.needs_verdict
        )

    def _cast(self, *, goes_on: bool) -> None:
        self._check()
        if self._driver.replica.look.needs_verdict:
            ballot, vector = self._driver.cast(goes_on=goes_on)
            self._round = Round(ballot, vector, self._reduce(vector))

    async def _collect(self) -> None:
        if self._round is None:
            await asyncio.sleep(0)
            return
        await asyncio.wait([self._round.task])
        self._take_verdict()

    def _take_verdict(self) -> None:
        assert self._round is not None
        ballot, verdict, _ = self._round
        self._round = None
        self._check()
        self._goes_on = self._driver.conclude(ballot, verdict)

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError("the cache is closed")
        if self._driver.failure is not None:
            raise self._driver.failure

    # What is no step.

    async def agree(
        self, *, is_fine: bool
    ) -> tuple[bool, asyncio.CancelledError | None]:
        """Return whether all is fine on every rank, and what cancelled the caller.

        The others count on this rank's part, and it has to know what they know: so no
        cancellation cuts this short.

        Raises:
            RankError: If a rank is gone or silent.
        """
        cancelled = None
        if self._round is not None:
            cancelled = await self._outlast(self._round.task)
            self._take_verdict()
            # It may have shown that the ranks differ: then they are through.
            self._check()
        vector = array("i", [is_fine])
        cancelled = await self._outlast(self._reduce(vector)) or cancelled
        self._check()
        return bool(vector[0]), cancelled

    async def _outlast(self, task: asyncio.Task[None]) -> asyncio.CancelledError | None:
        cancelled = await wait_out(task, 2 * self._timeout_s)
        # Its callback may be yet to come, and without a minimum there is no verdict.
        self._reduced(task)
        return cancelled

    def _reduce(self, vector: array[int]) -> asyncio.Task[None]:
        # Whoever waits for it may be cancelled: the others count on this rank's part.
        task = asyncio.create_task(  # noqa: TID251 - its owner is this barrier
            reduce(self._group, vector, self._timeout_s), name="asyncache reduce"
        )
        task.add_done_callback(self._reduced)
        self._reducing = task
        return task

    def _reduced(self, task: asyncio.Task[None]) -> None:
        error: BaseException | None
        if not task.done():
            error = RankError(f"no minimum within {2 * self._timeout_s} s")
        elif task.cancelled():
            error = RankError("the reduce was cancelled by a stranger")
        else:
            error = task.exception()
        if error is not None and not self._is_closed:
            assert isinstance(error, RankError)
            self._driver.fail(error)

    def close(self) -> asyncio.Task[None]:
        """Take no more steps, and leave; return who does that."""
        self._is_closed = True
        return self.leave()

    def leave(self) -> asyncio.Task[None]:
        """Leave the group, so that the others hear of it; return who does that."""
        if self._closing is None:
            self._closing = asyncio.create_task(  # noqa: TID251 - as above
                self._leave(), name="asyncache leave"
            )
        return self._closing

    async def _leave(self) -> None:
        await self._group.aclose()
        if self._reducing is not None:
            await asyncio.wait([self._reducing])


async def reduce(group: Group, vector: array[int], timeout_s: float) -> None:
    """Replace a vector by its minimum over all ranks.

    Raises:
        RankError: If there is none within ``timeout_s``, or the group is over.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await group.all_min(vector)
    except TimeoutError:
        raise RankError(f"a rank is silent: no minimum within {timeout_s} s") from None
    except RankError:
        raise
    except Exception as error:
        # A group may be anyone's: whatever it raises, there is no minimum.
        raise RankError(f"the group of ranks failed: {error!r}") from error
