"""What a cache and its requests share: the driver, its transfers and its clocks.

All of it lives in the driver's thread but the transfers, their health and their timers,
which are reached through the queues: they may be in another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar, assert_never
from weakref import WeakValueDictionary

from asyncache.core import (
    ClosedError,
    Ended,
    Fact,
    KVLayout,
    Replica,
    RequestState as State,
    Restored,
    Settled,
    Shortened,
    StartLoad,
    Stop,
)
from asyncache.devices import Device
from asyncache.engine._base_hit import Signal
from asyncache.engine._base_request import BaseRequest, ended
from asyncache.engine._driver import Driver, Failure, News, Started, Told
from asyncache.engine._forwards import Forwards
from asyncache.engine._gates import Board, Progress
from asyncache.engine._health import Health
from asyncache.engine._limits import Limits, check_deadline
from asyncache.engine._observe import (
    Counters,
    Observer,
    Stage,
    Teller,
    TransferKind,
)
from asyncache.engine._prompt import Prompt
from asyncache.engine._queues import PostedVotes, Queues, Timer
from asyncache.engine._reports import Reports
from asyncache.engine._slots import Slots
from asyncache.engine._transfers import Transfers
from asyncache.linkers import Linker

P = ParamSpec("P")
R = TypeVar("R")
Q = TypeVar("Q", bound=BaseRequest[Any])


class Runtime(Generic[Q]):
    """One open cache: lives from its opening to its close, in one thread."""

    is_alone = True
    """Whether there are no other ranks: then all is agreed as it happens."""

    def __init__(
        self,
        layout: KVLayout,
        replica: Replica,
        linker: Linker | None,
        *,
        device: Device,
        limits: Limits,
        observer: Observer | None,
        queues: Queues,
    ) -> None:
        self.queues = queues
        self.replica = replica
        self._layout = layout
        self.limits = limits
        self.slots = Slots(layout, device)
        self.page_tokens = layout.page_tokens
        self.counters = Counters()
        self._teller = Teller(observer, queues, self.counters)
        self._requests: WeakValueDictionary[int, Q] = WeakValueDictionary()
        self._deadlines: dict[int, Timer] = {}
        self._given_up: dict[int, Stage] = {}
        """Where open requests were when they gave up their last restore."""
        self._late: set[int] = set()
        """Requests that gave up a lookup which is still open."""
        self._resting: set[Signal] = set()
        self.reports: Reports[Q] = Reports()
        self.is_closed = False
        self.board = Board(limits.gate_s, queues, self._gate_timed_out, device.new_word)
        self.health = Health(limits, queues.clock, self._teller.pass_on)
        self.driver = Driver(
            replica,
            plans=self,
            tell_request=self._told,
            tell_observer=self._told_news,
            on_settled=self._settled,
            on_failed=self._failed,
            wake=self._wake,
            is_alone=self.is_alone,
        )
        self.forwards = Forwards(
            device, self.driver, queues, self._teller.tell, limits.overdue_s
        )
        self.transfers = None if linker is None else self.new_transfers(linker)

    def new_transfers(self, linker: Linker) -> Transfers:
        """Return what will move pages with a linker."""
        return Transfers(
            linker,
            votes=PostedVotes(self.queues, self.driver),
            board=self.board,
            health=self.health,
            tell=self._teller.pass_on,
            overdue_s=self.limits.overdue_s,
        )

    # Calls.

    def call(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make a call on the replica from an embedder's task.

        Raises:
            ClosedError: If the cache is closed.
            OrderError: If it comes from another thread or loop than the cache's.
            InvariantError: If the cache has failed.
        """
        self.check_usable()
        return self.driver.call(method, *args, **kwargs)

    def check_usable(self) -> None:
        """Raise unless the cache may be called from here."""
        self.queues.check_home()
        if self.driver.failure is not None:
            raise self.driver.failure
        if self.is_closed:
            raise ClosedError("the cache is closed")

    def start(self, plan: Started) -> None:
        """Hand a plan to the transfers; without a store, only a stop can be late."""
        if self.transfers is None:
            assert isinstance(plan, Stop)
            return
        if isinstance(plan, StartLoad):
            self.board.progress(plan.plan.seq)
        self.queues.out(self.transfers.start, plan)

    # Requests.

    def enter(self, request: Q, prompt: Prompt) -> None:
        """Open a scope's request."""
        self._open(request, prompt)

    def _open(self, request: Q, prompt: Prompt) -> None:
        """Open a request in the core."""
        state = self.call(
            self.replica.calls.open,
            prompt.tokens,
            namespace=prompt.namespace,
            num_reserve_tokens=prompt.num_reserve_tokens,
            priority=prompt.priority,
            is_prefetch=prompt.is_prefetch,
        )
        self._requests[state.seq] = request
        request._told_opened(state)  # noqa: SLF001 - scope and runtime are one

    def restore(self, state: State, deadline_s: float | None) -> None:
        """Begin a restore, with a clock that ends it."""
        after_s = check_deadline("deadline_s", deadline_s, self.limits.restore_s)
        self.call(self.replica.calls.restore, state, ask_store=after_s > 0)
        self.counters.restores += 1
        self.counters.lookup_tokens += state.num_tokens
        if state.lookup is None and state.wait is None:
            return
        if after_s == 0:
            self.give_up(state)
            self._gave_up(state)
        else:
            self._deadlines[state.seq] = self.queues.call_later(
                after_s, self._deadline, state
            )

    def _deadline(self, state: State) -> None:
        del self._deadlines[state.seq]
        # Waiting for room is no fault of the store.
        if state.lookup is not None and state.lookup.asked:
            self.queues.out(self.health.failed, TransferKind.LOOKUP)
        elif any(load.started for load in state.needs):
            self.queues.out(self.health.failed, TransferKind.LOAD)
        self.give_up(state)
        self._gave_up(state)

    def _gave_up(self, state: State) -> None:
        """Do what else a deadline brings about: here, all is over by now."""

    def give_up(self, state: State) -> None:
        """Settle a restore on what there is: a vote, and the clock's only power."""
        if self.replica.look.is_open(state.seq):
            self._given_up[state.seq] = _stage(state)
        if state.lookup is not None:
            if self.transfers is not None:
                self.queues.out(self.transfers.stop, state.lookup.seq)
            self._late.add(state.seq)
            self.driver.answer(state.lookup.seq, [])
        elif state.wait is not None:
            self.driver.sink(state.wait.seq, 0)
        self.driver.settle()

    def suspend(self, state: State) -> None:
        """Take all back from a request; its clock too: it would end a later restore."""
        self.call(self.replica.calls.suspend, state)
        self._late.discard(state.seq)
        self._cancel_deadline(state)

    def leave(self, request: Q, *, aborted: bool) -> None:
        """End the scope of a request."""
        if request._state is not None:  # noqa: SLF001 - scope and runtime are one
            self.finish(request._state, aborted=aborted)  # noqa: SLF001 - as above

    def finish(self, state: State, *, aborted: bool) -> None:
        """End a request's scope: a vote, with one rank applied before this returns.

        Unless a scope that nobody holds any more is ended by the garbage collector, in
        another thread or while the core is at work: then it is applied soon.
        """
        if self.driver.is_in_core or not self.queues.is_home():
            self._finish_soon(state, aborted=aborted)
            return
        request = self._requests.get(state.seq)
        if request is not None and self.is_alone:
            # Else what the loop sees of its hit is what all ranks see.
            request._settle_hit()  # noqa: SLF001 - scope and runtime are one
        if aborted:
            # Cancelled in a restore, it gave that up first, and stands on nothing now.
            stage = _stage(state)
            if stage is Stage.OPENED:
                stage = self._given_up.get(state.seq, stage)
            self.counters.count_abort(stage)
        self._end_scope(state, aborted=aborted)

    def _end_scope(self, state: State, *, aborted: bool) -> None:
        if aborted:
            self.driver.sink(state.seq, 0)
        # Its clock goes on if a commit still waits for its loads.
        self.driver.quiet(state.seq)
        self.driver.settle()

    def abandon(self, state: State) -> None:
        """Abort a request that nobody holds any more, from whatever thread."""
        self._finish_soon(state, aborted=True)

    def _finish_soon(self, state: State, *, aborted: bool) -> None:
        self.queues.soon(functools.partial(self.finish, state, aborted=aborted))

    def _cancel_deadline(self, state: State) -> None:
        timer = self._deadlines.pop(state.seq, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Abort every open request, and let nobody wait any longer."""
        for request in self._open_requests():
            request._finish(aborted=True)  # noqa: SLF001 - scope and runtime are one
        self._end_waits()
        self.is_closed = True

    def _open_requests(self) -> list[Q]:
        """Return all whose scopes have not ended, and maybe some more."""
        return list(self._requests.values())

    def _failed(self, error: Failure) -> None:
        """End everything that waits for a replica that will not change any more."""
        for request in self._open_requests():
            request._told_ended(error)  # noqa: SLF001 - scope and runtime are one
        self._end_waits()

    def _end_waits(self) -> None:
        for timer in self._deadlines.values():
            timer.cancel()
        self._deadlines.clear()
        self.forwards.close()
        for signal in self._resting:
            signal.set()
        if self.transfers is not None:
            self.queues.out(self.transfers.stop_all)

    # Gates.

    def _gate_timed_out(self, seq: int) -> None:
        # From the thread of a forward, as likely as not.
        self.queues.soon(self._fail_load, seq)

    def _fail_load(self, seq: int) -> None:
        if self.transfers is not None and self.replica.look.is_open(seq):
            self.queues.out(self.health.failed, TransferKind.LOAD)
            self.driver.sink(seq, 0)
            self.queues.out(self.transfers.stop, seq)

    # Rest.

    def _settled(self) -> None:
        self.board.sweep(self.replica.look.is_open)
        if self._resting and not self.num_moving:
            for signal in self._resting:
                signal.set()

    @property
    def num_moving(self) -> int:
        """Loads and offloads that are open or due."""
        return self.replica.look.num_moving

    @contextmanager
    def resting(self, signal: Signal) -> Iterator[None]:
        """Set a signal once, for a moment, nothing moves between device and store.

        What has begun since then does not count. Also set at the end of the cache.
        """
        self._resting.add(signal)
        try:
            yield
        finally:
            self._resting.discard(signal)
        self.check_usable()

    # What the driver tells.

    def _wake(self) -> None:
        self.queues.wake(self.driver.settle)

    def _told(self, told: Told) -> None:
        state = told.request
        request = self._requests.get(state.seq)
        match told:
            case Restored(num_pages=hit):
                self._restored(state, request, hit)
            case Settled():
                self._cancel_deadline(state)
                if request is not None:
                    request._settle_hit()  # noqa: SLF001 - scope and runtime are one
                    self.reports.note("landed", request)
            case Shortened():
                self.counters.shortened += 1
                if request is not None:
                    request._told_shortened(self._loads(state))  # noqa: SLF001 - as above
                    self.reports.note("shortened", request)
            case Ended(aborted=aborted):
                self._ended(state, request, aborted=aborted)
            case _:
                assert_never(told)

    def _restored(self, state: State, request: Q | None, hit: int) -> None:
        first = min((load.start for load in state.needs), default=hit)
        device_tokens = first * self.page_tokens
        self.counters.device_tokens += device_tokens
        self.counters.store_tokens += hit * self.page_tokens - device_tokens
        if request is not None:
            request._told_restored(device_tokens, self._loads(state))  # noqa: SLF001 - as above
            self.reports.note("agreed", request)
        if state.seq in self._late:
            self._late.discard(state.seq)
            if state.wait is not None:
                # It may stand on what others load, and has no time left for that.
                self.driver.sink(state.wait.seq, 0)

    def _loads(self, state: State) -> list[Progress]:
        return [self.board.progress(load.seq) for load in state.needs]

    def _ended(self, state: State, request: Q | None, *, aborted: bool) -> None:
        self._cancel_deadline(state)
        self._given_up.pop(state.seq, None)
        self._late.discard(state.seq)
        if aborted:
            self.counters.aborted += 1
        else:
            self.counters.closed += 1
        if request is not None:
            request._told_ended(ended(aborted=aborted))  # noqa: SLF001 - as above
            self.reports.ended(request, aborted=aborted)

    def _told_news(self, news: News) -> None:
        if isinstance(news, Fact):
            self.counters.count(news, self.slots.page_bytes)
            self.reports.count(news)
        self._teller.tell(news)


def _stage(state: State) -> Stage:
    if state.lookup is not None:
        return Stage.LOOKING_UP if state.lookup.asked else Stage.WAITING
    if state.needs:
        return Stage.LOADING
    return Stage.COMPUTING if state.extent else Stage.OPENED
