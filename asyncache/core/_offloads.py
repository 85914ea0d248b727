"""Offloads: how pages get to the store, parents before children.

==========  ================================  ========================================
state       event                             next
==========  ================================  ========================================
clean       a commit, its parent stored       DIRTY
DIRTY       room among Limits.offloads        READY: each rank waits until it has room
READY       quiet on every rank               RUNNING: pinned, read, written
READY       claim 0                           forgotten
READY       evicted                           forgotten at the next verdict on it
RUNNING     quiet, claim 1                    STORED; its children may follow
RUNNING     quiet, claim 0                    DIRTY again, or forgotten after too many
RUNNING     quiet, claim -1                   its parent is not in the store after
                                              all: that one goes first
any         a reset, a detach                 ends without a trace, when quiet
==========  ================================  ========================================

A forgotten node is offered again by the next commit that walks it. A split changes
nothing: readies and offloads own the positions from ``start`` to their anchor's end.
"""

from __future__ import annotations

from asyncache.core._agenda import Offload, Ready
from asyncache.core._effects import (
    Fact,
    FactKind,
    Moved,
    OfferOffload,
    OffloadPlan,
    StartOffload,
)
from asyncache.core._loads import prefix_hashes
from asyncache.core._reservations import try_pin
from asyncache.core._state import State
from asyncache.core._tree import Node

GOOD, FAILED, PARENT_MISSING = 1, 0, -1
"""What an offload's claim says."""


def offer_again(state: State, node: Node) -> None:
    """Queue a node that a commit walks, however often its offload has failed."""
    if node.offload is None and node not in state.dirty:
        node.attempts = 0
    consider(state, node)


def consider(state: State, node: Node) -> None:
    """Queue a node if it should be offloaded and its parent is stored."""
    if not state.bounds.low_water and _is_due(state, node):
        # One that is queued already keeps its turn.
        state.dirty[node] = None


def _is_due(state: State, node: Node) -> bool:
    parent, threshold = node.parent, state.bounds.write_threshold
    return (
        state.store_attached
        and threshold > 0
        and parent is not None
        and parent.stored
        and not node.stored
        and node.offload is None
        and node.hits >= threshold
        and node.attempts < state.bounds.offload_attempts
        and node.loads[state.tree.backbone] is None
    )


def save_coldest(state: State) -> None:
    """Queue the coldest leaves that eviction would lose, while too few would not be."""
    missing = state.bounds.low_water - state.num_clean()
    if not state.store_attached or missing <= 0:
        return
    missing -= _num_being_saved(state)
    room = state.bounds.offloads - state.num_offloading - len(state.dirty)
    seen: list[Node] = []
    while room > 0 and missing > 0 and len(seen) < 2 * state.bounds.offloads:
        leaf = state.unsaved.pop()
        if leaf is None:
            break
        seen.append(leaf)
        node = topmost_unsaved(leaf)
        if _is_due(state, node) and node not in state.dirty:
            state.dirty[node] = None
            room, missing = room - 1, missing - (node.end - node.start)
    for leaf in seen:
        state.unsaved.offer(leaf)


def _num_being_saved(state: State) -> int:
    """Return how many pages are queued for the store or on their way."""
    spans = [(node.start, node.end) for node in state.dirty]
    for transfer in state.agenda.open.values():
        if isinstance(transfer, Ready | Offload) and transfer.anchor is not None:
            spans.append((transfer.start, transfer.anchor.end))
    return sum(end - start for start, end in spans)


def open_readies(state: State) -> None:
    """Open a ready for dirty nodes, oldest first, as far as the bounds allow."""
    queue = list(state.dirty)
    for node in queue:
        if state.num_offloading >= state.bounds.offloads:
            return
        top = topmost_unsaved(node)
        if top is not node:
            # Split since it was queued, or its parent turned out to be missing.
            del state.dirty[node]
            if top not in state.dirty:
                consider(state, top)
                queue.extend([top] if top in state.dirty else [])
        elif node.written <= state.num_finished and _try_pin(state, node, node.start):
            _unpin(state, node)
            del state.dirty[node]
            node.offload = Ready(node)
            state.agenda.add(node.offload)
            state.num_offloading += 1


def topmost_unsaved(node: Node) -> Node:
    """Return the ancestor that must be offloaded first; its children follow it."""
    parent = node.parent
    while parent is not None and not parent.stored:
        node, parent = parent, parent.parent
    return node


def _try_pin(state: State, anchor: Node, start: int) -> bool:
    """Keep the positions from ``start`` to an anchor, if that breaks no promise."""
    state.reading[anchor] = start
    if try_pin(state, anchor):
        return True
    del state.reading[anchor]
    return False


def _unpin(state: State, anchor: Node) -> None:
    del state.reading[anchor]
    state.unpin(anchor)


def offer(state: State, ready: Ready) -> None:
    """Ask the ranks whether they have room: the ready has a place in the ballot."""
    num_pages = 0 if ready.anchor is None else ready.anchor.end - ready.start
    attempts = 0 if ready.anchor is None else ready.anchor.attempts
    state.effects.append(OfferOffload(ready.seq, num_pages, attempts))


def end_ready(state: State, ready: Ready, *, agreed: bool) -> None:
    """End a ready: an offload follows if all agree and the nodes are still there."""
    state.agenda.remove(ready)
    state.num_offloading -= 1
    anchor = ready.anchor
    if anchor is None:
        return
    agreed = agreed and not ready.is_void
    nodes = list(state.tree.above(anchor, ready.start))
    offload = None
    if not agreed and not ready.is_void:
        state.effects.append(Fact(FactKind.OFFLOAD_FORGOTTEN, anchor.end - ready.start))
    elif agreed and _is_written(state, nodes) and _try_pin(state, anchor, ready.start):
        offload = Offload(anchor, ready.start)
        state.agenda.add(offload)
        state.num_offloading += 1
    for node in nodes:
        node.offload = offload
    if agreed and offload is None:
        consider(state, nodes[-1])


def _is_written(state: State, nodes: list[Node]) -> bool:
    """Whether no open forward may still write a page of these nodes."""
    return all(node.written <= state.num_finished for node in nodes)


def start_offload(state: State, offload: Offload) -> None:
    """Let the transfer begin: the offload has a place in the ballot."""
    tree, anchor = state.tree, offload.anchor
    hashes = prefix_hashes(state, anchor, offload.start)
    nodes = list(reversed(list(tree.above(anchor, offload.start))))
    pieces = []
    for pool in range(tree.num_pools):
        for node in nodes:
            run = node.pages[pool]
            if run is not None and node.loads[pool] is None:
                first = node.start - offload.start
                taken = hashes[first : first + len(run)]
                pieces.append(Moved(pool, node.start, run, taken))
    above = nodes[0].parent
    assert above is not None
    parent = None if above.parent is None else tree.last_hash(above)
    plan = OffloadPlan(offload.seq, offload.start, anchor.end, tuple(pieces), parent)
    state.effects.append(StartOffload(plan))


def end_offload(state: State, offload: Offload) -> None:
    """End a quiet offload: stored, to be tried again, or forgotten."""
    state.agenda.remove(offload)
    state.num_offloading -= 1
    anchor = offload.anchor
    nodes = list(reversed(list(state.tree.above(anchor, offload.start))))
    for node in nodes:
        node.offload = None
    if offload.claim == GOOD and not offload.is_void:
        _stored(state, nodes)
    elif not offload.is_void:
        _failed(state, nodes, offload.claim)
    _unpin(state, anchor)


def _stored(state: State, nodes: list[Node]) -> None:
    for node in nodes:
        node.stored, node.attempts = True, 0
    hashes = tuple(page for node in nodes for page in state.tree.hashes(node))
    state.effects.append(Fact(FactKind.STORED, len(hashes), hashes))
    for node in nodes:
        for child in node.children.values():
            consider(state, child)


def _failed(state: State, nodes: list[Node], claim: int) -> None:
    num_pages = nodes[-1].end - nodes[0].start
    state.effects.append(Fact(FactKind.OFFLOAD_FAILED, num_pages))
    parent = nodes[0].parent
    assert parent is not None
    attempts = nodes[0].attempts + 1
    for node in nodes:
        node.attempts = attempts
    if attempts >= state.bounds.offload_attempts:
        state.effects.append(Fact(FactKind.OFFLOAD_FORGOTTEN, num_pages))
    if claim == PARENT_MISSING and parent.parent is not None:
        parent.stored = False
        consider(state, parent)
    else:
        consider(state, nodes[0])
