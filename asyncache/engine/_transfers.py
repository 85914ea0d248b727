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
from typing import TYPE_CHECKING, Protocol

import anyio

from asyncache.core import (
    FAILED,
    GOOD,
    PARENT_MISSING,
    AskStore,
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
from asyncache.engine._observe import Event, TransferFailed, TransferKind
from asyncache.linkers import Linker, Outcome

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

_CLAIMS = {
    Outcome.STORED: GOOD,
    Outcome.FAILED: FAILED,
    Outcome.REJECTED: FAILED,
    Outcome.PARENT_MISSING: PARENT_MISSING,
}


class VoteBox(Protocol):
    """Where votes go: the driver, in whatever thread it lives."""

    def sink(self, seq: int, claim: int) -> None:
        """Vouch for no more than ``claim``."""

    def quiet(self, seq: int) -> None:
        """Promise not to touch the transaction's pages again."""

    def answer(self, seq: int, boundaries: list[int]) -> None:
        """Say which boundaries a lookup found restorable."""


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
    ) -> None:
        self._linker = linker
        self._votes = votes
        self._board = board
        self._health = health
        self._tell = tell
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._group: TaskGroup | None = None
        self._stop = anyio.Event()
        self._is_stopping = False

    @property
    def num_running(self) -> int:
        """Transfers that have begun and not ended."""
        return len(self._scopes)

    # The group's own task.

    async def run(self, ready: Callable[[], None]) -> None:
        """Hold the task group until :meth:`stop_all`; ends when every transfer has."""
        async with anyio.create_task_group() as group:
            self._group = group
            ready()
            await self._stop.wait()
            self._is_stopping = True
            group.cancel_scope.cancel()

    def stop_all(self) -> None:
        """Stop every transfer, and begin no other."""
        self._stop.set()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    # Plans in.

    def start(self, plan: Started) -> None:
        """Begin, or stop, a transfer."""
        match plan:
            case AskStore(lookup):
                self._own(lookup.seq, self._lookup, lookup)
            case StartLoad(load):
                self._board.begin(load.seq)
                self._own(load.seq, self._load, load)
            case StartOffload(offload):
                self._own(offload.seq, self._offload, offload)
            case OfferOffload():
                self._offer(plan)
            case Stop(seq):
                self.stop(seq)

    def stop(self, seq: int) -> None:
        """Let a transfer end early; it votes once nothing of it moves any more."""
        # Who waits at its gates need not wait any longer: it will not land.
        self._board.end(seq)
        scope = self._scopes.get(seq)
        if scope is not None:
            scope.cancel()

    def _own(
        self, seq: int, work: Callable[..., Awaitable[None]], plan: object
    ) -> None:
        if self._group is None or self._stop.is_set():
            # Nobody will run it; a lookup or load that never began touches nothing.
            self._votes.sink(seq, 0)
            self._votes.quiet(seq)
            self._board.end(seq)
            return
        self._scopes[seq] = anyio.CancelScope()
        self._group.start_soon(self._run, seq, work, plan)

    async def _run(
        self, seq: int, work: Callable[..., Awaitable[None]], plan: object
    ) -> None:
        try:
            with self._scopes[seq]:
                await work(plan)
        except asyncio.CancelledError:
            # Ours only if the group ends. Else a third party cancelled something that
            # the transfer awaited, and in an anyio group that would take all the
            # others along, silently.
            if self._is_stopping:
                raise
        finally:
            del self._scopes[seq]
            self._board.end(seq)
            self._votes.quiet(seq)

    # Plans carried out. Each votes its claim on every way out.

    async def _lookup(self, plan: LookupPlan) -> None:
        boundaries: list[int] = []
        try:
            if not self._health.is_down:
                present = await self._linker.lookup(plan)
                boundaries = restorable(plan, present)
                self._health.succeeded()
        except Exception as error:  # noqa: BLE001 - a store is foreign code
            self._failed(TransferKind.LOOKUP, plan.end - plan.start, error)
        finally:
            self._votes.answer(plan.seq, boundaries)

    async def _load(self, plan: LoadPlan) -> None:
        good, num_pages = 0, plan.end - plan.start
        try:
            good = await self._linker.load(
                plan, lambda layer: self._board.landed(plan.seq, layer)
            )
            self._health.succeeded()
        except Exception as error:  # noqa: BLE001 - a store is foreign code
            self._failed(TransferKind.LOAD, num_pages, error)
        finally:
            self._votes.sink(plan.seq, good)

    async def _offload(self, plan: OffloadPlan) -> None:
        claim, num_pages = FAILED, plan.end - plan.start
        try:
            outcome = await self._linker.offload(plan)
            claim = _CLAIMS[outcome]
            self._judge(outcome, num_pages)
        except Exception as error:  # noqa: BLE001 - a store is foreign code
            self._failed(TransferKind.OFFLOAD, num_pages, error)
        finally:
            self._votes.sink(plan.seq, claim)

    def _judge(self, outcome: Outcome, num_pages: int) -> None:
        if outcome is Outcome.REJECTED:
            self._health.rejected(num_pages)
        elif outcome is Outcome.FAILED:
            self._failed(TransferKind.OFFLOAD, num_pages, None)
        else:
            self._health.succeeded()

    def _failed(
        self, kind: TransferKind, num_pages: int, error: Exception | None
    ) -> None:
        self._tell(TransferFailed(kind, num_pages, error))
        self._health.failed()

    def _offer(self, plan: OfferOffload) -> None:
        """Agree to an offload as soon as the store may be tried."""
        delay_s = self._health.offload_delay_s(plan.attempts)
        if not delay_s:
            self._votes.quiet(plan.seq)
        elif not self._stop.is_set():
            loop = asyncio.get_running_loop()
            self._timers[plan.seq] = loop.call_later(delay_s, self._offer_again, plan)

    def _offer_again(self, plan: OfferOffload) -> None:
        del self._timers[plan.seq]
        # The failures are waited out; what is left is a store that is still down.
        self._offer(OfferOffload(plan.seq, plan.num_pages, attempts=0))
