"""Calls: what the loop tells every rank, in the same order and the same gaps.

A call changes the state completely or, if it raises, not at all; with its arguments it
is folded into the digest.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from asyncache.core import _brackets, _requests, _resets, _slots, _verdicts
from asyncache.core._agenda import Load, Request, SlotCopy
from asyncache.core._errors import ClosedError
from asyncache.core._hashes import Namespace
from asyncache.core._state import State


class Calls:
    """The calls of one replica."""

    def __init__(self, state: State) -> None:
        self._state = state

    def open(
        self,
        tokens: bytes,
        *,
        namespace: Namespace = None,
        num_reserve_tokens: int = 0,
        priority: int = 0,
        is_prefetch: bool = False,
    ) -> Request:
        """Open a request for packed tokens; it holds nothing yet.

        What a prefetch has loaded, nobody waits for: that may take its time.

        Raises:
            TypeError: If ``priority`` is no int.
            ValueError: If ``num_reserve_tokens`` is negative, or ``priority`` does not
                fit 32 bits.
            OutOfPagesError: If the prompt and its reserve can never fit a pool.
            TooManyRequestsError: If ``bounds.requests`` are open.
        """
        request = _requests.open_request(
            self._state,
            tokens,
            namespace,
            num_reserve_tokens=num_reserve_tokens,
            priority=priority,
            is_prefetch=is_prefetch,
        )
        sums = (zlib.crc32(tokens), zlib.crc32(request.root_hash))
        facts = (len(tokens), num_reserve_tokens, priority, is_prefetch, *sums)
        self._called(b"open", request, *facts)
        return request

    def restore(self, request: Request, *, ask_store: bool = True) -> None:
        """Begin to restore; :class:`Restored` and :class:`Settled` follow as effects.

        Raises:
            OrderError: If the request has extended, or a restore of it is open.
            OutOfPagesError: If what was appended can never fit a pool.
        """
        self._check_open(request)
        _requests.restore(self._state, request, ask_store=ask_store)
        self._called(b"restore", request, ask_store)

    def extend(self, request: Request, num_tokens: int) -> int:
        """Give the first ``num_tokens`` pages; return how many were added.

        Raises:
            ValueError: If ``num_tokens`` falls, or is more than are known.
            OrderError: If a restore waits for its answer.
            OutOfPagesError: If what is not reserved is not there.
        """
        self._check_open(request)
        added = _requests.extend(self._state, request, num_tokens)
        self._called(b"extend", request, num_tokens)
        return added

    def append(self, request: Request, tokens: bytes) -> None:
        """Add known tokens, packed."""
        self._check_open(request)
        _requests.append(request, tokens)
        self._called(b"append", request, len(tokens), zlib.crc32(tokens))

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Forget the tokens past ``num_tokens``.

        Raises:
            ValueError: If it is below what is shared or what a window has passed, or
                more than are known.
            OrderError: If a restore waits for its answer.
        """
        self._check_open(request)
        _requests.truncate(self._state, request, num_tokens)
        self._called(b"truncate", request, num_tokens)

    def commit(self, request: Request, num_tokens: int) -> int:
        """Publish the first ``num_tokens``; return how many are shared by now.

        Raises:
            ValueError: If ``num_tokens`` falls, or is more than have pages.
        """
        self._check_open(request)
        shared = _requests.commit(self._state, request, num_tokens)
        self._called(b"commit", request, num_tokens)
        return shared

    def suspend(self, request: Request) -> None:
        """Give back all that a request holds but its tokens."""
        self._check_open(request)
        _requests.suspend(self._state, request)
        self._called(b"suspend", request)

    def abort(self, request: Request) -> None:
        """Abort a request by a call of every rank, in place of a vote."""
        self._check_open(request)
        _requests.end_request(self._state, request, aborted=True)
        self._called(b"abort", request)

    def close(self, request: Request) -> None:
        """Close a request by a call of every rank, in place of a vote.

        One with a commit that waits for its own loads ends when they have.
        """
        self._check_open(request)
        _requests.close_request(self._state, request)
        self._called(b"close", request)

    def forward(self, requests: Sequence[Request]) -> int:
        """Open a bracket around a forward; return its number.

        What is to be copied as it begins is in ``look.copies(number)``.

        Raises:
            OrderError: If the layout has states, and a request's is still on its way.
        """
        for request in requests:
            self._check_open(request)
        _slots.check_settled(self._state, requests)
        number = _brackets.open_bracket(self._state, requests)
        self._called(b"forward", None, *(request.seq for request in requests))
        return number

    def checkpoint(self, request: Request, num_tokens: int) -> list[SlotCopy]:
        """Keep the state after ``num_tokens`` for a later commit.

        Returns:
            What is to be copied, inside the forward; nothing if there is no room.

        Raises:
            ValueError: If ``num_tokens`` is no boundary that the forward reaches.
            OrderError: If no forward over the request is open.
        """
        self._check_open(request)
        copies = _slots.checkpoint(self._state, request, num_tokens)
        self._called(b"checkpoint", request, num_tokens, len(copies))
        return copies

    def attach(self) -> None:
        """From now on look up, load and offload, what is resident first."""
        _resets.attach(self._state)
        self._called(b"attach", None)

    def detach(self) -> None:
        """Have no store any more: what is on its way is dropped."""
        _resets.detach(self._state)
        self._called(b"detach", None)

    def launch(self) -> list[Load]:
        """Let the loads that wait for it start, and return them."""
        queued = self._state.agenda.queued.values()
        loads = [t for t in queued if isinstance(t, Load) and not t.is_launched]
        for load in loads:
            load.is_launched = True
        self._called(b"launch", None, *(load.seq for load in loads))
        return loads

    def reset(self, revision: str | None = None) -> None:
        """Forget every prefix. With a revision of the weights, the stored ones too.

        Raises:
            TypeError: If the revision is no str.
            ValueError: If it cannot be encoded as UTF-8.
        """
        _resets.reset(self._state, revision)
        text = (revision or "").encode()
        self._called(b"reset", None, revision is not None, zlib.crc32(text))

    def _check_open(self, request: Request) -> None:
        if not self._state.agenda.is_open(request):
            raise ClosedError(f"request {request.seq} has ended: open another")

    def _called(self, name: bytes, request: Request | None, *facts: int) -> None:
        state = self._state
        state.fold(name, 0 if request is None else request.seq, *facts)
        _verdicts.tend(state)
