"""Attach, detach and reset: the calls after which what was known is known no more.

==========  ==========================================================================
call        what becomes of what is there
==========  ==========================================================================
attach      resident nodes are offered to the store, parents first
detach      lookups end as misses, loads are cut, offloads end without a trace; no node
            counts as stored
reset       as detach, but the store stays; all unpinned pages are free at once, pinned
            ones leave the tree and are free when their last pin goes
==========  ==========================================================================

Open requests go on. One that holds pages across a reset is of an older generation: it
shares nothing until it starts over.
"""

from __future__ import annotations

from dataclasses import replace

from asyncache.core._agenda import Load, Lookup, Offload, Ready, Request
from asyncache.core._effects import Fact, FactKind, Stop
from asyncache.core._ledger import PageState
from asyncache.core._loads import cut
from asyncache.core._offloads import consider
from asyncache.core._restores import agree
from asyncache.core._state import State
from asyncache.core._tree import Node


def attach(state: State) -> None:
    """From now on look up, load and offload; begin with what is resident."""
    state.store_attached = True
    for node in state.tree.nodes():
        consider(state, node)


def detach(state: State) -> None:
    """Have no store any more, and keep no trace of it."""
    state.store_attached = False
    _stop_transfers(state)
    for node in state.tree.nodes():
        if node.stored and not node.locks:
            state.tree.idle_unsaved += node.end - node.start
        node.stored, node.attempts = False, 0


def reset(state: State, revision: str | None) -> None:
    """Forget every prefix; with a revision, the store's pages too are other ones."""
    _stop_transfers(state)
    num_pages = _drop_tree(state)
    state.generation += 1
    if revision is not None:
        state.layout = replace(state.layout, revision=revision)
    for request in _open(state, Request):
        if not request.promise:
            state.renew(request)
    state.effects.append(Fact(FactKind.RESET, num_pages))


def _stop_transfers(state: State) -> None:
    state.dirty.clear()
    for lookup in _open(state, Lookup):
        if lookup.asked:
            state.effects.append(Stop(lookup.seq))
            agree(state, lookup, 0)
    for load in _open(state, Load):
        cut(state, load, load.start)
    for transfer in [*_open(state, Ready), *_open(state, Offload)]:
        transfer.is_void = True
        state.effects.append(Stop(transfer.seq))


def _open(state: State, kind: type) -> list:  # type: ignore[type-arg]  # of that kind
    return [t for t in state.agenda.open.values() if isinstance(t, kind)]


def _drop_tree(state: State) -> int:
    """Let every node leave the tree; return how many positions there were."""
    nodes, tree = list(state.tree.nodes()), state.tree
    for node in nodes:
        node.attached = False
        # A ready pins nothing, and an offload finds its nodes by itself.
        if isinstance(node.offload, Ready):
            node.offload.anchor = None
            node.offload = None
    tree.roots.clear()
    tree.num_nodes = 0
    for node in nodes:
        if not node.locks:
            state.free_orphan(node)
    _free_unguarded(state, nodes)
    return sum(node.end - node.start for node in nodes)


def _free_unguarded(state: State, nodes: list[Node]) -> None:
    """Free window pages of pinned nodes that no pin needs: nobody would find them."""
    for pool, _ in state.tree.windows:
        held = state.guarded(pool)
        for node in nodes:
            run = node.pages[pool]
            if run is not None and held.isdisjoint(run):
                state.ledgers[pool].give(run, PageState.TREE)
                node.pages[pool] = None
