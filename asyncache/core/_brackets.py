"""Forward brackets: no page changes hands under a running forward.

``with cache.forward(requests)`` opens a numbered bracket on every rank. While it is
open, the prefixes of its requests stay pinned, with the states that it begins with, and
pages that anyone gives back wait in quarantine under the newest number. They go free
when every rank has finished that bracket: on a CPU when the block was left, on CUDA
when the event at its end has fired.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncache.core._agenda import Bracket, Request
from asyncache.core._ledger import PageState
from asyncache.core._slots import restore_own
from asyncache.core._state import State


def open_bracket(state: State, requests: Sequence[Request]) -> int:
    """Open a bracket around a forward of some requests; return its number."""
    state.num_brackets += 1
    pins = [request.anchor for request in requests if request.anchor is not None]
    for node in pins:
        state.pin(node)
    bracket = Bracket(state.num_brackets, pins, dict.fromkeys(requests))
    bracket.copies = restore_own(state, bracket.requests)
    for request in bracket.requests:
        request.computed = request.extent
    state.brackets[bracket.number] = bracket
    return bracket.number


def finish_brackets(state: State, number: int) -> None:
    """End all brackets up to a number: every rank has finished them."""
    for finished in [n for n in state.brackets if n <= number]:
        bracket = state.brackets.pop(finished)
        state.num_finished = finished
        for node in bracket.pins:
            state.unpin(node)
        for pool, pages in bracket.held:
            state.ledgers[pool].give(pages, PageState.QUARANTINE)
