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
READY       a reset, a detach                 gone at once
RUNNING     a reset, a detach                 ends without a trace, when quiet
==========  ================================  ========================================

With a low water a clean node waits until it is needed: see :func:`save_coldest`. A
forgotten node is offered again by the next commit that walks it. A split changes
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
    Stop,
)
from asyncache.core._hashes import tag_of
from asyncache.core._loads import prefix_hashes
from asyncache.core._node import Node
from asyncache.core._reservations import try_pin
from asyncache.core._state import State

GOOD, FAILED, PARENT_MISSING = 1, 0, -1
"""What an offload's claim says."""


def offer_again(state: State, node: Node) -> None:
    """Queue a node that a commit walks, however often its offload has failed."""
    if node.offload is None and node not in state.dirty:
        node.attempts = 0
    consider(state, node)


def consider(state: State, node: Node) -> None:
    """Queue a node if it is due; with a low water, have its leaves looked at again."""
    if state.bounds.low_water:
        state.unsaved.recall(node)
    elif is_due(state, node):
        # One that is queued already keeps its turn.
        state.dirty[node] = None


def is_due(state: State, node: Node) -> bool:
    """Whether a node should be offloaded now."""
    parent, threshold = node.parent, state.bounds.write_threshold
    return (
        state.store_attached
        and node.attached
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
    """Queue the coldest leaves that eviction would lose, while too few would not be.

    What a leaf needs saved first goes first, and the leaf is set aside behind it.
    """
    missing = state.bounds.low_water - num_clean(state)
    room = state.bounds.offloads - state.num_offloading - len(state.dirty)
    if not state.store_attached or missing <= 0 or room <= 0:
        return
    missing -= _num_being_saved(state)
    while room > 0 and missing > 0:
        leaf = state.unsaved.pop()
        if leaf is None:
            return
        node = topmost_unsaved(leaf)
        state.unsaved.set_aside(leaf, node)
        if is_due(state, node) and node not in state.dirty:
            state.dirty[node] = None
            room, missing = room - 1, missing - (node.end - node.start)


def num_clean(state: State) -> int:
    """Return how many pages could be had without losing what no store has."""
    return state.ledgers[state.tree.backbone].num_free + state.tree.clean_pages


def _num_being_saved(state: State) -> int:
    """Return how many pages are queued for the store or on their way."""
    spans = [(node.start, node.end) for node in state.dirty]
    for transfer in state.offloading.values():
        is_void = isinstance(transfer, Offload) and transfer.is_void
        if transfer.anchor is not None and not is_void:
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
            consider(state, node)
            if top not in state.dirty and is_due(state, top):
                state.dirty[top] = None
                queue.append(top)
        elif node.written <= state.num_finished and _try_pin(state, node, node.start):
            _unpin(state, node)
            del state.dirty[node]
            node.offload = Ready(node)
            _open(state, node.offload)


def _open(state: State, transfer: Ready | Offload) -> None:
    state.agenda.add(transfer)
    state.offloading[transfer.seq] = transfer


def _close(state: State, transfer: Ready | Offload) -> list[Node]:
    """Return the nodes that an ended ready or offload covered, parents first."""
    state.agenda.remove(transfer)
    del state.offloading[transfer.seq]
    if transfer.anchor is None:
        return []
    nodes = list(state.tree.above(transfer.anchor, transfer.start))
    for node in nodes:
        node.offload = None
    return nodes[::-1]


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
    anchor = ready.anchor
    if anchor is None:
        state.effects.append(OfferOffload(ready.seq, 0, 0, b""))
    else:
        num_pages, tag = anchor.end - ready.start, tag_of(state.tree.last_hash(anchor))
        state.effects.append(OfferOffload(ready.seq, num_pages, anchor.attempts, tag))


def end_ready(state: State, ready: Ready, *, agreed: bool) -> None:
    """End a ready: an offload follows if all agree and the nodes are still there."""
    anchor, nodes = ready.anchor, _close(state, ready)
    if anchor is None:
        return
    if not agreed:
        # Another rank may have dropped it, and this one's clock still run.
        state.effects.append(Stop(ready.seq))
        # By the next commit, not by the next leaf below: that would never end.
        for node in nodes:
            node.attempts = state.bounds.offload_attempts
        state.effects.append(Fact(FactKind.OFFLOAD_FORGOTTEN, anchor.end - ready.start))
    elif _is_written(state, nodes) and _try_pin(state, anchor, ready.start):
        offload = Offload(anchor, ready.start)
        _open(state, offload)
        for node in nodes:
            node.offload = offload
    else:
        _consider_all(state, nodes)


def _is_written(state: State, nodes: list[Node]) -> bool:
    """Whether no open forward may still write a page of these nodes."""
    return all(node.written <= state.num_finished for node in nodes)


def start_offload(state: State, offload: Offload) -> None:
    """Let the transfer begin: the offload has a place in the ballot."""
    tree, anchor = state.tree, offload.anchor
    hashes = prefix_hashes(state, anchor, offload.start)
    nodes = list(reversed(list(tree.above(anchor, offload.start))))
    pieces = []
    # The backbone first: its pool is where the parent's page is asked for, and other
    # pools need not have that page.
    for pool in sorted(range(tree.num_pools), key=lambda pool: pool != tree.backbone):
        for node in nodes:
            run = node.pages[pool]
            if run is not None and node.loads[pool] is None:
                first = node.start_of(pool)
                taken = hashes[first - offload.start : node.end - offload.start]
                pieces.append(Moved(pool, first, run, taken))
    above = nodes[0].parent
    assert above is not None
    parent = None if above.parent is None else tree.last_hash(above)
    plan = OffloadPlan(offload.seq, offload.start, anchor.end, tuple(pieces), parent)
    state.effects.append(StartOffload(plan))


def end_offload(state: State, offload: Offload) -> None:
    """End a quiet offload: stored, to be tried again, or forgotten."""
    nodes = _close(state, offload)
    if offload.is_void:
        # A store that was attached since has yet to get them.
        _consider_all(state, nodes)
    elif offload.claim == GOOD:
        _stored(state, nodes)
    else:
        _failed(state, nodes, offload.claim)
    _unpin(state, offload.anchor)


def stop_offloads(state: State) -> None:
    """End all that is on its way to the store without a trace."""
    for transfer in list(state.offloading.values()):
        if transfer.started:
            state.effects.append(Stop(transfer.seq))
        if isinstance(transfer, Ready):
            _close(state, transfer)
            continue
        transfer.is_void = True
        if not transfer.started:
            end_offload(state, transfer)
    # Last: one that never started has just had its nodes queued again.
    state.dirty.clear()


def _consider_all(state: State, nodes: list[Node]) -> None:
    for node in nodes:
        consider(state, node)


def _stored(state: State, nodes: list[Node]) -> None:
    for node in nodes:
        node.stored, node.attempts = True, 0
    hashes = tuple(page for node in nodes for page in state.tree.hashes(node))
    state.effects.append(Fact(FactKind.STORED, len(hashes), hashes))
    _consider_all(state, nodes)
    for node in nodes:
        _consider_all(state, list(node.children.values()))


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
    _consider_all(state, [parent, *nodes])
