"""Transfers: one task a plan, each of which ends in votes.

Tasks live in a task group that has a task of its own, so that no failure in here and no
cancellation out there ever crosses. An owner never raises: whatever a store, a linker
or a third party's ``cancel()`` does to it becomes this transfer's failure.

=========  =========================  ==============================================
transfer   goes on until              then votes
=========  =========================  ==============================================
lookup     answered, stopped, failed  its boundaries; none if it failed
load       nothing touches its pages  how much of it is good, and quiet
offer      the store may be tried     quiet
offload    nothing touches its pages  stored, failed or parent missing, and quiet
=========  =========================  ==============================================
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar, assert_never

import anyio

from asyncache.core import (
    FAILED,
    GOOD,
    PARENT_MISSING,
    AskStore,
    Hurry,
    LoadPlan,
    LookupPlan,
    OfferOffload,
    OffloadPlan,
    StartLoad,
    StartOffload,
    Stop,
    restorable,
)
from asyncache.engine._driver import Started
from asyncache.engine._gates import Board
from asyncache.engine._health import Health
from asyncache.engine._late import Late
from asyncache.engine._observe import (
    Event,
    Overdue,
    StoreSmaller,
    TransferFailed,
    TransferKind,
)
from asyncache.engine._queues import VoteBox
from asyncache.linkers import Linker, Outcome

Plan = TypeVar("Plan", LookupPlan, LoadPlan, OffloadPlan)
_CLAIMS = {
    Outcome.STORED: GOOD,
    Outcome.FAILED: FAILED,
    Outcome.REJECTED: FAILED,
    Outcome.PARENT_MISSING: PARENT_MISSING,
}


class Transfers:
    """Runs the plans of one rank against a linker."""

    def __init__(
        self,
        linker: Linker,
        *,
        votes: VoteBox,
        board: Board,
        health: Health,
        tell: Callable[[Event], None],
        overdue_s: float,
    ) -> None:
        self._linker = linker
        self._votes = votes
        self._board = board
        self._health = health
        self._tell = tell
        self._late = Late(overdue_s, _now, _call_later, self._overdue)
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._vouched: set[int] = set()
        """Transfers that voted their claim, and have yet to be over."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        """Of offers that wait until the store may be tried."""
        self._group: asyncio.TaskGroup | None = None
        self._opening: anyio.CancelScope | None = None
        self._stop: anyio.Event | None = None
        self._is_stopped = False

    @property
    def num_running(self) -> int:
        """Transfers that have begun and not ended."""
        return len(self._scopes)

    @property
    def is_running(self) -> bool:
        """Whether transfers may begin."""
        return self._group is not None and not self._is_stopped

    # The group's own task.

    async def open(self) -> None:
        """Open the linker; :meth:`stop_all` cuts that short."""
        with anyio.CancelScope() as scope:
            self._opening = scope
            try:
                if not self._is_stopped:
                    await self._linker.open()
                    if missing_bytes := self._linker.missing_bytes:
                        self._tell(StoreSmaller(missing_bytes))
            finally:
                # Later it may be stopped where there is no loop any more.
                self._opening = None

    async def run(self, ready: Callable[[], None]) -> None:
        """Hold the task group until :meth:`stop_all`; ends when every transfer has."""
        self._stop = stop = anyio.Event()
        if self._is_stopped:
            stop.set()
        try:
            # Not anyio's: a stranger's cancellation of one task would end that group.
            async with asyncio.TaskGroup() as group:
                self._group = group
                ready()
                try:
                    await stop.wait()
                finally:
                    # Also if this task was killed: nothing begins any more.
                    self.stop_all()
        finally:
            self._late.close()
            self._group = None

    def stop_all(self) -> None:
        """Stop every transfer, and begin no other."""
        self._is_stopped = True
        if self._opening is not None:
            self._opening.cancel()
        if self._stop is not None:
            self._stop.set()
        for scope in self._scopes.values():
            scope.cancel()
        for seq, timer in self._timers.items():
            timer.cancel()
            self._votes.sink(seq, 0)
        self._timers.clear()

    # Plans in.

    def start(self, plan: Started) -> None:
        """Begin, or stop, a transfer."""
        match plan:
            case AskStore(lookup):
                self._own(TransferKind.LOOKUP, self._lookup, lookup)
            case StartLoad(load):
                self._own(TransferKind.LOAD, self._load, load)
            case Hurry(seq):
                self._linker.hurry(seq)
            case StartOffload(offload):
                self._own(TransferKind.OFFLOAD, self._offload, offload)
            case OfferOffload():
                self._offer(plan)
            case Stop(seq):
                self.stop(seq)
            case _:
                assert_never(plan)

    def stop(self, seq: int) -> None:
        """Let a transfer end early; it votes once nothing of it moves any more."""
        # Who waits at its gates need not wait any longer: it will not land.
        self._board.end(seq)
        scope, timer = self._scopes.get(seq), self._timers.pop(seq, None)
        if scope is not None:
            scope.cancel()
        if timer is not None:
            timer.cancel()
            self._votes.sink(seq, 0)

    def _own(
        self, kind: TransferKind, work: Callable[[Plan], Awaitable[None]], plan: Plan
    ) -> None:
        if self._group is None or self._is_stopped:
            # Nobody will run it, and there may be no loop any more; what never began
            # touches nothing.
            self._over(plan.seq)
        else:
            self._scopes[plan.seq] = anyio.CancelScope()
            self._late.begin(plan.seq, Overdue(kind, plan.end - plan.start))
            task = self._group.create_task(
                self._run(kind, work, plan),
                name=f"asyncache {kind.name.lower()} {plan.seq}",
            )
            task.add_done_callback(lambda _: self._bury(kind, plan))

    def _bury(self, kind: TransferKind, plan: Plan) -> None:
        """End a transfer that was cancelled before its first step, and so never ran."""
        if plan.seq in self._scopes:
            if not self._is_stopped:
                self._failed(kind, plan, asyncio.CancelledError())
            self._over(plan.seq)

    async def _run(
        self, kind: TransferKind, work: Callable[[Plan], Awaitable[None]], plan: Plan
    ) -> None:
        try:
            with self._scopes[plan.seq]:
                await work(plan)
        except asyncio.CancelledError as error:
            # Ours only if all are stopped. Else a third party cancelled this task, or
            # something that the transfer awaited.
            if self._is_stopped:
                raise
            self._failed(kind, plan, error)
        except Exception as error:  # noqa: BLE001 - a store is foreign code
            self._failed(kind, plan, error)
        finally:
            self._over(plan.seq)

    def _over(self, seq: int) -> None:
        """Vote: it touches nothing any more, and vouches for what it said at most."""
        self._scopes.pop(seq, None)
        self._late.end(seq)
        self._board.end(seq)
        if seq not in self._vouched:
            self._votes.sink(seq, 0)
        self._vouched.discard(seq)
        self._votes.quiet(seq)

    # Plans carried out. One that raises, or is cancelled, vouches for nothing.

    async def _lookup(self, plan: LookupPlan) -> None:
        trial = self._health.begin_asking()
        if trial is None:
            return
        try:
            boundaries = restorable(plan, await self._linker.lookup(plan))
            self._health.succeeded(TransferKind.LOOKUP)
        finally:
            trial.end()
        self._votes.answer(plan.seq, boundaries)
        self._vouched.add(plan.seq)

    async def _load(self, plan: LoadPlan) -> None:
        num_good = await self._linker.load(plan, self._board.landing(plan.seq))
        self._vouch(plan.seq, max(0, min(num_good, plan.end - plan.start)))
        self._health.succeeded(TransferKind.LOAD)

    async def _offload(self, plan: OffloadPlan) -> None:
        outcome = await self._linker.offload(plan)
        self._vouch(plan.seq, _CLAIMS[outcome])
        self._judge(outcome, plan)

    def _vouch(self, seq: int, claim: int) -> None:
        self._votes.sink(seq, claim)
        self._vouched.add(seq)

    def _judge(self, outcome: Outcome, plan: OffloadPlan) -> None:
        if outcome is Outcome.REJECTED:
            self._health.rejected(plan.end - plan.start, plan.tag)
        elif outcome is Outcome.FAILED:
            self._failed(TransferKind.OFFLOAD, plan, None)
        else:
            self._health.succeeded(TransferKind.OFFLOAD)

    def _failed(
        self, kind: TransferKind, plan: Plan, error: BaseException | None
    ) -> None:
        self._tell(TransferFailed(kind, plan.end - plan.start, error))
        self._health.failed(kind)

    def _overdue(self, overdue: Overdue) -> None:
        self._tell(overdue)
        assert overdue.kind is not None
        self._health.failed(overdue.kind)

    def _offer(self, plan: OfferOffload) -> None:
        """Agree to an offload as soon as the store may be tried."""
        delay_s = self._health.offload_delay_s(plan.attempts, plan.tag)
        if self._is_stopped:
            self._votes.sink(plan.seq, 0)
        elif not delay_s:
            self._votes.quiet(plan.seq)
        else:
            loop = asyncio.get_running_loop()
            self._timers[plan.seq] = loop.call_later(delay_s, self._offer_again, plan)

    def _offer_again(self, plan: OfferOffload) -> None:
        del self._timers[plan.seq]
        # The failures are waited out; what is left is a store that is still down.
        self._offer(replace(plan, attempts=0))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _call_later(after_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(after_s, call)


async def live(
    linker: Linker, transfers: Transfers, opened: Callable[[], None]
) -> None:
    """Open a linker, run transfers until they are stopped, and close it again.

    Args:
        linker: What the transfers move pages with.
        transfers: Stopped by :meth:`Transfers.stop_all`.
        opened: Called once transfers may begin, or will not.
    """
    try:
        try:
            await transfers.open()
            await transfers.run(opened)
        finally:
            await linker.aclose()
    finally:
        opened()
