"""What a request is to whoever serves it, whether it awaits or blocks.

Leaving the scope is synchronous and never fails: it is a vote, and with one rank it is
applied at once. A normal end closes the request; an exception, a cancellation of either
kind, or a generator that is closed aborts it. In every case its pages, its pins and its
part in transfers go back, and what something still writes waits in quarantine.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self

from asyncache.core import (
    AbortedError,
    AsyncacheError,
    ClosedError,
    DeviceError,
    OrderError,
    RankError,
    RequestState as State,
)
from asyncache.engine._base_hit import BaseHit, Landing, S
from asyncache.engine._gates import Progress
from asyncache.engine._prompt import Prompt
from asyncache.engine._tokens import TokenSource, check_count, pack

if TYPE_CHECKING:
    from asyncache.engine._runtime import Runtime


class BaseRequest(ABC, Generic[S]):
    """One prompt and its pages, for as long as the scope lasts.

    Made by its cache and used in a ``with`` block, once. All calls come from the loop
    or the thread of the cache. A call after the end raises ClosedError, or AbortedError
    if it was aborted.
    """

    def __init__(
        self,
        runtime: Runtime[Self],
        prompt: Prompt,
    ) -> None:
        self._runtime = runtime
        self._prompt = prompt
        self._state: State | None = None
        self._is_entered = False
        self._is_left = False
        self._end: AsyncacheError | None = None
        self._landing: Landing[S] | None = None
        self._num_forwards = 0
        self._admitted: S | None = None
        """Set once it is admitted or over; there if it had to wait for that."""
        self._while_stepping: Callable[[S], Awaitable[None]] | None = None

    def __repr__(self) -> str:
        """Show what the request holds."""
        if self._state is None:
            return "<Request, not entered>"
        if self._end is not None:
            return f"<Request {self._state.seq}, {type(self._end).__name__}>"
        return (
            f"<Request {self._state.seq}: {self.num_tokens} tokens,"
            f" {self._hit_tokens(self._landing)} hit, {self._state.extent} with pages>"
        )

    def __enter__(self) -> Self:
        """Open the request; it holds nothing yet.

        With several ranks it waits for the loop to admit it: see ``cache.waiting()``.

        Raises:
            OrderError: If the scope was entered before.
            TooManyRequestsError: If ``Limits.requests`` are open.
            OutOfPagesError: If the prompt can never fit the pool.
        """
        if self._is_entered:
            raise OrderError("a request's scope is entered once")
        if self._end is not None:
            # It was refused when it was admitted, before anyone entered it.
            raise copy(self._end)
        if self._state is None:
            self._runtime.enter(self, self._prompt)
        self._is_entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._finish(aborted=kind is not None)

    def __del__(self) -> None:
        if self._state is not None and self._end is None and not self._is_left:
            # First, for a warning may be an error.
            self._runtime.abandon(self._state)
            warnings.warn(f"{self!r} was never left", ResourceWarning, stacklevel=2)

    # What it is now.

    @property
    def id(self) -> int:
        """Its number, the same on every rank; no other request of the cache has it."""
        return self._open_state().seq

    @property
    def is_open(self) -> bool:
        """Whether calls on it are legal: it was admitted, and has not ended."""
        return self._state is not None and self._end is None

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: the prompt and what was appended."""
        return self._open_state().num_tokens

    @property
    def page_table(self) -> Mapping[str, array[int]]:
        """Page ids by pool: position -> page, int32, shape [num_pages_so_far].

        Owned by the cache and grown in place by :meth:`extend`. An id never changes
        while the request is open; a hit that is cut, :meth:`truncate` and
        :meth:`suspend` make the table shorter. -1 where a window needs no page, or none
        any more: :meth:`extend` says when. Do not hold a buffer of it across calls: it
        could not grow. State pools have no pages, but a :attr:`state_slot`.
        """
        return self._runtime.slots.tables(self._open_state())

    @property
    def state_slot(self) -> Mapping[str, int]:
        """The slot of each state pool that the model overwrites as it computes.

        The request's own from its reservation, or its first extend, until it ends or
        starts over; empty before. The first forward over a hit finds the hit's state in
        it; with no hit, it holds anything.
        """
        return self._runtime.slots.own(self._open_state())

    @property
    def reserved(self) -> bool:
        """Whether the pages of the whole prompt are promised: extend cannot fail.

        A promise may be taken back when a hit falls while something still writes its
        pages: then :meth:`suspend` and restore again, or extend while there is room.
        """
        state = self._open_state()
        return state.promise >= state.num_reserve

    @property
    def settled(self) -> bool:
        """Whether all that its computing stands on has landed: its tokens are true."""
        return not self._open_state().needs

    # What it may do.

    @abstractmethod
    def restore(self, *, deadline_s: float | None = None) -> object:
        """Find the longest prefix that is resident or stored, and begin to load it.

        Waits for a reservation of the whole prompt, then for the store's answer. The
        hit that it returns may still be on its way: wait for it, or for its gates
        layer by layer. Past the deadline it is what has landed by then; without a
        reservation that is nothing, and :attr:`reserved` is False.

        Args:
            deadline_s: Seconds from now until the hit settles whatever happens; 0 for
                what is resident now. ``Limits.restore_s`` if None.

        Raises:
            OrderError: If the request has computed already, or restores at this moment.
            OutOfPagesError: If the tokens appended by now can never fit the pool.
            ClosedError: If the request ended meanwhile.
        """

    def extend(self, num_tokens: int) -> int:
        """Give the first ``num_tokens`` tokens pages; return how many were added.

        Never fails within the reservation. Of a window pool, pages go back that lie
        wholly behind the window of what forwards have not begun to compute: publish
        with :meth:`commit`, before, what others should find.

        Raises:
            OutOfPagesError: If there is no room now; nothing was changed.
            OrderError: If a restore is open.
            ValueError: If it falls, or exceeds the known tokens.
        """
        state = self._open_state()
        num_tokens = check_count("num_tokens", num_tokens)
        return self._runtime.call(self._runtime.replica.calls.extend, state, num_tokens)

    def append(self, tokens: TokenSource) -> None:
        """Add known tokens, such as the one just sampled.

        Raises:
            TypeError, ValueError: As for the ``request`` of the cache.
        """
        state = self._open_state()
        self._runtime.call(self._runtime.replica.calls.append, state, pack(tokens))

    def truncate(self, num_tokens: int) -> None:
        """Forget the tokens past ``num_tokens`` and give back the pages they had.

        A state is not rolled back: the slot keeps what the model has made of it, and
        checkpoints past ``num_tokens`` are dropped.

        Raises:
            OrderError: If a restore is open.
            ValueError: If it is below what is shared or what a window has passed, or
                above what is known.
        """
        state = self._open_state()
        num_tokens = check_count("num_tokens", num_tokens)
        self._runtime.call(self._runtime.replica.calls.truncate, state, num_tokens)

    def commit(self, num_tokens: int) -> int:
        """Share the whole pages of the first ``num_tokens``, which were computed.

        Over a hit that is not settled this is only recorded: it happens when the hit
        has landed, and not at all if it is cut.

        Returns:
            Tokens that are shared by now.

        Raises:
            ValueError: If it falls, or exceeds the tokens that have pages.
        """
        state = self._open_state()
        num_tokens = check_count("num_tokens", num_tokens)
        return self._runtime.call(self._runtime.replica.calls.commit, state, num_tokens)

    def checkpoint(self, num_tokens: int, *, stream: int | None = None) -> bool:
        """Keep a copy of the state after ``num_tokens``, for a commit to share.

        To be called in a forward over the request, at the moment when that is the state
        in its slots. A prefix is found again only where a state was kept.

        Args:
            num_tokens: A multiple of ``page_tokens``, more than are shared, at most
                what had pages when the forward began.
            stream: Handle of the stream that the forward runs on.

        Returns:
            Whether there was room for it; without, only a hit is lost.

        Raises:
            OrderError: If no forward over the request is open.
            ValueError: If ``num_tokens`` is no such boundary, or there are no states.
            DeviceError: If the state could not be copied; the request is aborted.
        """
        state, runtime = self._open_state(), self._runtime
        num_tokens = check_count("num_tokens", num_tokens)
        if not self._num_forwards:
            raise OrderError("checkpoint in a forward: with cache.forward([request])")
        copies = runtime.call(runtime.replica.calls.checkpoint, state, num_tokens)
        try:
            runtime.slots.copy(copies, stream)
        except DeviceError:
            # A commit would share what the slot held before.
            self._finish(aborted=True)
            raise
        return bool(copies)

    def suspend(self) -> None:
        """Give back pages, pins and reservation; keep the scope and the tokens.

        What was committed stays resident while there is room. :meth:`restore` may be
        called again.
        """
        self._runtime.suspend(self._open_state())
        self._settle_hit()
        self._landing = None

    def restore_nowait(self, *, deadline_s: float | None = None) -> BaseHit[S]:
        """Begin to restore, and return at once; steps and waits carry it on.

        Until the hit is ``agreed``, the request can neither extend nor truncate.

        Args:
            deadline_s: As for :meth:`restore`.

        Raises:
            OrderError: If the request has computed already, or restores at this moment.
            OutOfPagesError: If the tokens appended by now can never fit the pool.
        """
        return self._hit(self._begin_restore(deadline_s))

    # What the two faces of restore() are made of.

    @abstractmethod
    def _hit(self, landing: Landing[S]) -> BaseHit[S]:
        """Return a hit of this face's kind."""

    @abstractmethod
    def _signal(self) -> S:
        """Return a signal of this face's kind."""

    def _begin_restore(self, deadline_s: float | None) -> Landing[S]:
        state = self._open_state()
        previous, landing = self._landing, Landing(self._signal)
        self._landing = landing
        try:
            self._runtime.restore(state, deadline_s)
        except BaseException:
            self._landing = previous
            raise
        return landing

    def _give_up(self, landing: Landing[S]) -> None:
        """Settle a restore whose wait was cut short: the scope may go on."""
        if self._landing is landing and self._state is not None:
            self._runtime.give_up(self._state)

    # Called by the cache and its runtime.

    def _told_waiting(
        self, prompt: Prompt, while_stepping: Callable[[S], Awaitable[None]]
    ) -> None:
        self._prompt, self._admitted = prompt, self._signal()
        self._while_stepping = while_stepping

    def _told_absent(self) -> None:
        """Take note that its scope is another rank's, which is all that can end it."""
        self._is_left = True

    def _told_opened(self, state: State) -> None:
        self._state = state
        self._told_admitted()

    def _told_admitted(self) -> None:
        if self._admitted is not None:
            self._admitted.set()

    def _told_late(self, error: RankError) -> None:
        """Take note that nobody steps: whoever waits for the hit need not wait on."""
        if self._landing is not None and not self._landing.is_settled:
            self._landing.give_up(error)

    def _told_restored(self, num_device_tokens: int, loads: list[Progress]) -> None:
        landing = self._landing
        assert landing is not None
        landing.num_device_tokens = num_device_tokens
        landing.loads = loads
        landing.agree()

    def _told_shortened(self, loads: list[Progress]) -> None:
        # It may stand on loads now that its longer hit had no use for.
        if self._landing is not None:
            self._landing.loads = loads

    def _settle_hit(self) -> None:
        if self._landing is not None:
            self._landing.settle()

    def _told_ended(self, error: AsyncacheError) -> None:
        if self._end is None:
            self._end = error
        self._told_admitted()
        self._settle_hit()

    def _loads(self) -> list[Progress]:
        return [] if self._landing is None else self._landing.loads

    def _finish(self: Self, *, aborted: bool) -> None:
        if self._end is None and not self._is_left:
            self._is_left = True
            if self._runtime.is_alone:
                # Else it is open, here as on the other ranks, until all have agreed.
                self._end = ended(aborted=aborted)
            self._runtime.leave(self, aborted=aborted)

    def _hit_tokens(self, landing: Landing[S] | None) -> int:
        if self._state is None or landing is not self._landing:
            return 0
        return self._state.hit * self._runtime.page_tokens

    def _open_state(self) -> State:
        if self._end is not None:
            # A copy: each that is raised gathers a traceback.
            raise copy(self._end)
        if self._state is None:
            raise OrderError(
                "the loop has yet to admit the request"
                if self._is_entered
                else "use the request in a with block"
            )
        return self._state


def ended(*, aborted: bool) -> ClosedError:
    """Return what a call on a request raises after its end."""
    if aborted:
        return AbortedError("the request was aborted")
    return ClosedError("the request has ended")
