"""Attach, detach and reset: the calls after which what was known is known no more.

==========  ==========================================================================
call        what becomes of what is there
==========  ==========================================================================
attach      resident nodes are offered to the store, parents first
detach      lookups end as misses, loads are cut, readies are gone, offloads end
            without a trace; no node counts as stored
reset       as detach, but the store stays; all unpinned pages are free at once, pinned
            ones leave the tree and are free when their last pin goes
==========  ==========================================================================

Open requests go on. One that holds pages across a reset is of an older generation: it
shares nothing until it starts over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from asyncache.core._agenda import Load, Lookup, Request, Transaction
from asyncache.core._effects import Fact, FactKind, Stop
from asyncache.core._hashes import root_hash
from asyncache.core._loads import cut
from asyncache.core._offloads import consider, stop_offloads
from asyncache.core._restores import agree
from asyncache.core._state import State

T = TypeVar("T", bound=Transaction)


def attach(state: State) -> None:
    """From now on look up, load and offload; begin with what is resident."""
    state.store_attached = True
    for node in state.tree.nodes():
        consider(state, node)


def detach(state: State) -> None:
    """Have no store any more, and keep no trace of it."""
    state.store_attached = False
    _stop_transfers(state)
    _forget_store(state)
    # With a low water, saved leaves went first, and now there are none.
    for node in state.tree.nodes():
        state.offer(node)


def _forget_store(state: State) -> None:
    """Count no node as stored."""
    for node in state.tree.nodes():
        if node.clean:
            assert node.parent is not None
            node.parent.unclean += 1
        node.stored, node.clean, node.attempts = False, False, 0
    state.tree.clean_pages = 0


def reset(state: State, revision: str | None) -> None:
    """Forget every prefix; with a revision, the store's pages too are other ones."""
    layout = state.layout
    if revision is not None:
        layout = replace(layout, revision=revision)
        # It may be no text that can be hashed, and nothing has changed yet.
        root_hash(layout)
    _stop_transfers(state)
    nodes = state.tree.clear()
    state.leaves.clear()
    state.unsaved.clear()
    state.free_orphans(nodes)
    state.generation += 1
    for bracket in state.brackets.values():
        bracket.is_awaited = True
    state.layout = layout
    for request in _open(state, Request):
        if not any(map(len, [*request.tables, *request.spare])):
            state.renew(request)
    num_pages = sum(node.end - node.start for node in nodes)
    state.effects.append(Fact(FactKind.RESET, num_pages))


def _stop_transfers(state: State) -> None:
    for lookup in _open(state, Lookup):
        if lookup.asked:
            state.effects.append(Stop(lookup.seq))
            agree(state, lookup, 0)
    for load in _open(state, Load):
        cut(state, load, load.start)
    # None of them has failed: what the store has may be loaded next time.
    for request in _open(state, Request):
        request.barred = False
    stop_offloads(state)


def _open(state: State, kind: type[T]) -> list[T]:
    return [t for t in state.agenda.open.values() if isinstance(t, kind)]
