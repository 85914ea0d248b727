"""Applying a verdict: the only place where transactions end, and in one order.

Within each kind by sequence number: brackets and quarantine first, so that their pages
count; then loads, parents before children, each cut before it lands; offloads; requests
that gave up waiting, aborted, closed; lookups, whose loads take what is left; readies.
Last comes what follows from the new state: parked commits, reservations, new starts.
"""

from __future__ import annotations

import zlib
from array import array
from typing import TypeVar

from asyncache.core._agenda import (
    Load,
    Lookup,
    Offload,
    Ready,
    Request,
    Transaction,
    Wait,
)
from asyncache.core._brackets import finish_brackets
from asyncache.core._commits import publish_parked
from asyncache.core._errors import RankError
from asyncache.core._loads import end_load, sink_load, start_load
from asyncache.core._offloads import (
    end_offload,
    end_ready,
    offer,
    open_readies,
    save_coldest,
    start_offload,
)
from asyncache.core._requests import close_request, end_request
from asyncache.core._restores import agree, end_wait, grant_waiting
from asyncache.core._state import State
from asyncache.core._votes import (
    HEADER_INTS,
    PROTOCOL,
    Ballot,
    agreed_boundary,
    blank,
)

T = TypeVar("T", bound=Transaction)


def apply(state: State, ballot: Ballot, verdict: array[int]) -> bool:
    """Apply the minimum of all ranks' votes on a ballot.

    Returns:
        Whether every rank goes on with what all of them are at.
    """
    _check_header(verdict)
    state.digest = zlib.crc32(verdict, state.digest)
    state.clock += 1
    finish_brackets(state, verdict[3])
    news = _Verdict(state, ballot, verdict)
    _end_loads(state, news)
    for offload in news.of(Offload):
        offload.claim = news.claim(offload)
        if news.is_quiet(offload):
            end_offload(state, offload)
    _end_requests(state, news)
    for lookup in news.of(Lookup):
        if news.is_quiet(lookup):
            agree(state, lookup, agreed_boundary(ballot, verdict, lookup))
    for ready in news.of(Ready):
        end_ready(state, ready, agreed=bool(news.claim(ready)))
    tend(state)
    return bool(verdict[4])


def _check_header(verdict: array[int]) -> None:
    protocol, least, negated = verdict[:3]
    if protocol != PROTOCOL:
        raise RankError(f"a rank speaks protocol {protocol}, this one {PROTOCOL}")
    if least != -negated:
        raise RankError(f"ranks differ: digests from {least} to {-negated}")


class _Verdict:
    """A verdict read through the table of its own ballot."""

    def __init__(self, state: State, ballot: Ballot, verdict: array[int]) -> None:
        self._agenda = state.agenda
        self._verdict = verdict
        self._news: dict[type[Transaction], list[Transaction]] = {}
        num_ints = 2 * state.agenda.num_places
        if verdict[HEADER_INTS : HEADER_INTS + num_ints] == blank(num_ints):
            # Most steps bring nothing: a decode's, for one.
            return
        # Most of what is open has no news, and is read once to see that.
        for _, transaction in sorted(ballot.table.items()):
            at = HEADER_INTS + 2 * transaction.place
            if verdict[at + 1] or verdict[at] < transaction.claim:
                self._news.setdefault(type(transaction), []).append(transaction)

    def of(self, kind: type[T]) -> list[T]:
        """Return the transactions of a kind that were in the news and still open."""
        news = self._news.get(kind, ())
        return [t for t in news if isinstance(t, kind) and self._agenda.is_open(t)]

    def claim(self, transaction: Transaction) -> int:
        """Return what every rank still vouches for."""
        at = HEADER_INTS + 2 * transaction.place
        return min(self._verdict[at], transaction.claim)

    def is_quiet(self, transaction: Transaction) -> bool:
        """Whether no rank will touch the transaction's pages again."""
        return bool(self._verdict[HEADER_INTS + 2 * transaction.place + 1])


def _end_loads(state: State, news: _Verdict) -> None:
    loads = sorted(news.of(Load), key=lambda load: (load.end, load.seq))
    for load in loads:
        claim = news.claim(load)
        if claim < load.claim:
            sink_load(state, load, claim)
    # A load that only fills windows may stand on pages of one that reaches further.
    for load in sorted(loads, key=lambda load: not _is_full(state, load)):
        if news.is_quiet(load):
            end_load(state, load)


def _is_full(state: State, load: Load) -> bool:
    return any(piece.pool in state.tree.full for piece in load.pieces)


def _end_requests(state: State, news: _Verdict) -> None:
    for wait in news.of(Wait):
        end_wait(state, wait.request)
    requests = news.of(Request)
    for request in requests:
        if not news.claim(request):
            end_request(state, request, aborted=True)
    publish_parked(state)
    for request in requests:
        if news.claim(request) and news.is_quiet(request):
            state.closing[request.seq] = request
    _close_waiting(state)


def _close_waiting(state: State) -> None:
    """Close the requests that left, unless their commits still wait for loads."""
    for seq in sorted(state.closing):
        close_request(state, state.closing[seq])


def tend(state: State) -> None:
    """Do what follows from the new state, in one order on every rank."""
    publish_parked(state)
    # A call may have cut the loads that they waited for.
    _close_waiting(state)
    grant_waiting(state)
    if state.bounds.low_water:
        save_coldest(state)
    if state.dirty:
        open_readies(state)
    for transaction in state.agenda.start_queued():
        if isinstance(transaction, Load):
            start_load(state, transaction)
        elif isinstance(transaction, Offload):
            start_offload(state, transaction)
        else:
            assert isinstance(transaction, Ready)
            offer(state, transaction)
    state.fold_counts()
