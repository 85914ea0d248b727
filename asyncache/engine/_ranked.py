"""An open cache of several ranks: calls in the loop's gaps, and what ends is voted on.

What a lone rank's :class:`Runtime` does at once has to wait here until all have agreed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import anyio

from asyncache.core import (
    KVLayout,
    OutOfPagesError,
    RankError,
    Replica,
    RequestState as State,
    TooManyRequestsError,
)
from asyncache.devices import Device
from asyncache.engine._barrier import Barrier
from asyncache.engine._base_hit import Signal
from asyncache.engine._base_request import BaseRequest, ended
from asyncache.engine._driver import Failure
from asyncache.engine._limits import Limits
from asyncache.engine._lobby import Lobby
from asyncache.engine._observe import Observer
from asyncache.engine._prompt import Prompt
from asyncache.engine._queues import Queues
from asyncache.engine._runtime import Runtime
from asyncache.engine._tokens import check_count
from asyncache.linkers import Linker
from asyncache.ranks import Group

P = ParamSpec("P")
R = TypeVar("R")
Q = TypeVar("Q", bound=BaseRequest[Any])


class RankedRuntime(Runtime[Q]):
    """One rank's part of an open cache.

    Args:
        group: The ranks.
        name: What their caches are called, and no others.
        is_pipelined: Whether a step takes the minimum of the one before.
        aborts_by_call: Whether the loop ends requests, in place of their scopes' votes.

    The other arguments are those of :class:`Runtime`.
    """

    is_alone = False

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
        group: Group,
        name: int,
        is_pipelined: bool,
        aborts_by_call: bool,
    ) -> None:
        super().__init__(
            layout,
            replica,
            linker,
            device=device,
            limits=limits,
            observer=observer,
            queues=queues,
        )
        self._aborts_by_call = aborts_by_call
        self.lobby: Lobby[Q] = Lobby(group.rank, num_ranks=group.num_ranks, cache=name)
        self.barrier = Barrier(
            self.driver,
            group,
            timeout_s=self.limits.barrier_s,
            is_pipelined=is_pipelined,
        )

    def call(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make a call on the replica, as every rank does.

        Raises:
            OrderError: If it does not come from the loop's task, between two steps.
            RankError: If the ranks have failed.
        """
        self.check_usable()
        self.barrier.check_gap()
        return self.driver.call(method, *args, **kwargs)

    # Scopes.

    def enter(self, request: Q, prompt: Prompt) -> None:
        """Have the loop find a scope's prompt."""
        self.check_usable()
        waiting = self.lobby.enter(request, prompt)
        request._told_waiting(waiting, self._while_stepping)  # noqa: SLF001 - scope and runtime are one
        self.barrier.notify()

    def admit(self, request: Q, prompt: Prompt) -> None:
        """Open a request, as every rank does, whoever has its scope."""
        try:
            self._open(request, prompt)
        except (OutOfPagesError, TooManyRequestsError) as error:
            # On every rank, for it depends on what all of them know.
            request._told_ended(error)  # noqa: SLF001 - scope and runtime are one
            return
        if not self.lobby.is_ours(prompt):
            request._told_absent()  # noqa: SLF001 - scope and runtime are one
            if not self._aborts_by_call:
                self.driver.quiet(request.id)

    def leave(self, request: Q, *, aborted: bool) -> None:
        """End a scope; one that still waits is gone at once."""
        super().leave(request, aborted=aborted)
        if request._state is None:  # noqa: SLF001 - scope and runtime are one
            self.lobby.leave(request._prompt)  # noqa: SLF001 - as above
            request._told_ended(ended(aborted=aborted))  # noqa: SLF001 - as above

    def _end_scope(self, state: State, *, aborted: bool) -> None:
        if not self._aborts_by_call:
            super()._end_scope(state, aborted=aborted)
        elif self.replica.look.is_open(state.seq):
            self.lobby.note_left(state.seq, aborted=aborted)
            self.barrier.notify()

    def dismiss(self, left: Mapping[int, bool]) -> None:
        """End requests by a call of every rank; who has ended by now is left alone."""
        self.barrier.check_gap()
        _check_left(left)
        calls = self.replica.calls
        for seq, aborted in left.items():
            self.lobby.forget_left(seq)
            state = self.replica.look.request(seq)
            if state is not None:
                self.call(calls.abort if aborted else calls.close, state)

    def _ended(self, state: State, request: Q | None, *, aborted: bool) -> None:
        super()._ended(state, request, aborted=aborted)
        self.lobby.forget_left(state.seq)

    def _open_requests(self) -> list[Q]:
        """Return all whose scopes have not ended, and maybe some more."""
        return [*super()._open_requests(), *self.lobby.requests()]

    def close(self) -> None:
        """Abort every open request; the other ranks are not asked any more."""
        requests = self._open_requests()
        super().close()
        self.barrier.close()
        for request in requests:
            request._told_ended(ended(aborted=True))  # noqa: SLF001 - scope and runtime are one

    def _failed(self, error: Failure) -> None:
        super()._failed(error)
        self.barrier.leave()

    def is_restoring(self, request: Q) -> bool:
        """Whether a request's restore is open; the same on every rank."""
        state = request._state  # noqa: SLF001 - scope and runtime are one
        if state is None or not self.replica.look.is_open(state.seq):
            return False
        return state.lookup is not None or state.wait is not None

    def launch_for(self, request: Q) -> None:
        """Start what a request waits for, if it waits for the loop to do so."""
        state = request._state  # noqa: SLF001 - scope and runtime are one
        if state is not None and not all(load.is_launched for load in state.needs):
            self.call(self.replica.calls.launch)

    # Loops that step, or should.

    def _wake(self) -> None:
        self.barrier.notify()
        super()._wake()

    def _gave_up(self, state: State) -> None:
        """Let nobody wait on for a restore that is due, if the loop does not step."""
        if state.lookup is not None or state.wait is not None:
            self._deadlines[state.seq] = self.queues.call_later(
                self.limits.step_s, self._expect_step, state, self.barrier.num_steps
            )

    def _expect_step(self, state: State, num_steps: int) -> None:
        del self._deadlines[state.seq]
        request = self._requests.get(state.seq)
        if self.barrier.num_steps > num_steps:
            self._gave_up(state)
        elif request is not None:
            request._told_late(self._no_step())  # noqa: SLF001 - scope and runtime are one

    async def _while_stepping(self, event: Signal) -> None:
        """Wait for an event, for as long as the loop steps.

        Raises:
            RankError: If it did not for ``Limits.step_s``.
        """
        assert isinstance(event, anyio.Event)
        while not event.is_set():
            num_steps = self.barrier.num_steps
            with anyio.move_on_after(self.limits.step_s):
                await event.wait()
            if not event.is_set() and self.barrier.num_steps == num_steps:
                raise self._no_step()

    def _no_step(self) -> RankError:
        return RankError(f"no step() for {self.limits.step_s} s")


def _check_left(left: Mapping[int, bool]) -> None:
    if not isinstance(left, Mapping):
        raise TypeError(f"left must map ids to bools, not be {type(left).__name__}")
    for seq, aborted in left.items():
        check_count("a request's id", seq)
        if not isinstance(aborted, bool):
            raise TypeError(f"aborted must be a bool, not {aborted!r}, of {seq}")
