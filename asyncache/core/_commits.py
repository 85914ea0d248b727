"""Commits: computed pages become everyone's, as far as their prefix has landed.

The tree keeps the pages that it has; a request's own pages for the same tokens are
duplicates and stay the request's until it ends, for a page id that a model was given
must not change under it. A commit stops at the first page that is LOADING, its own
load's included, and where pinning resident pages that it duplicates would break a
promise; the rest is *parked*, and tried again whenever something has changed.
"""

from __future__ import annotations

from asyncache.core._agenda import Offload, Request
from asyncache.core._effects import Fact, FactKind
from asyncache.core._ledger import PageState
from asyncache.core._node import Node
from asyncache.core._offloads import offer_again, topmost_unsaved
from asyncache.core._reservations import try_pin
from asyncache.core._state import State
from asyncache.core._tree import Walk


def publish(state: State, request: Request) -> None:
    """Insert what a request has committed, up to the first page that is LOADING."""
    if request.generation != state.generation:
        # Computed by what was reset away: it is nobody else's.
        request.want = request.shared
    if request.want > request.shared and not request.needs:
        _publish(state, request)
    if request.want > request.shared:
        state.parked[request.seq] = request
    else:
        state.parked.pop(request.seq, None)


def offer_hit(state: State, request: Request) -> None:
    """Offer the nodes that a request stands on to the store, unless they are there."""
    if request.anchor is not None and not request.needs:
        for above in reversed(list(state.tree.above(request.anchor))):
            offer_again(state, above)


def publish_parked(state: State) -> None:
    """Try parked commits again: a load has ended."""
    for request in list(state.parked.values()):
        publish(state, request)


def _publish(state: State, request: Request) -> None:
    # From the anchor on: a decode publishes page by page, at any depth.
    tree, shared = state.tree, request.shared
    base = request.anchor or tree.root(request.root_hash)
    key = bytes(request.tokens[: request.want * tree.stride])
    walk = tree.walk(base, key)
    end = _first_loading(state, walk, request.want)
    if end <= shared:
        return
    node = tree.end_at(base, walk, min(end, walk.covered))
    if not _try_stand_on(state, request, node):
        return
    _split_at_gaps(state, node, shared)
    path = list(tree.above(node, shared))
    given = {above: _adopt_windows(state, request, above) for above in path}
    if node.end < end:
        node = tree.attach(node, key[node.end * tree.stride :])
        for pool in range(tree.num_pools):
            _give(state, request, node, pool)
        path.insert(0, node)
        given[node] = list(range(tree.num_pools))
        state.effects.append(Fact(FactKind.PUBLISHED, node.end - node.start))
        _stand_on(state, request, node)
    if any(given.values()):
        _bracket(state, request, given)
    for above in path:
        above.used = state.clock
        above.hits += 1
        above.priority = max(above.priority, request.priority)
    offer_again(state, topmost_unsaved(path[-1]))
    for above in reversed(path):
        offer_again(state, above)


def _try_stand_on(state: State, request: Request, node: Node) -> bool:
    """Pin resident pages in place of the request's anchor, unless no promise allows."""
    if node is request.anchor or node.parent is None:
        return True
    if not try_pin(state, node):
        return False
    state.unpin(request.anchor)
    request.anchor = node
    return True


def _stand_on(state: State, request: Request, node: Node) -> None:
    """Pin pages that were the request's own a moment ago: that breaks no promise."""
    if request.anchor is None:
        state.pin(node)
    else:
        state.move_pin(request.anchor, node)
    request.anchor = node


def _first_loading(state: State, walk: Walk, end: int) -> int:
    """Return where a commit must stop: at LOADING, or at its end."""
    for node in walk.path:
        if node.loads[state.tree.backbone] is not None:
            return node.start
    return end


def _split_at_gaps(state: State, anchor: Node, start: int) -> None:
    """Split nodes that lack a part of their window pages: what is given is whole."""
    for pool, _ in state.tree.windows:
        for node in list(state.tree.above(anchor, start)):
            first = node.start_of(pool)
            if node.start < first < node.end and not isinstance(node.offload, Offload):
                state.tree.split(node, first)


def _adopt_windows(state: State, request: Request, node: Node) -> list[int]:
    """Give a node the window pages that it lacks; return of which pools."""
    # An offload that runs would call the node stored, without these pages.
    if isinstance(node.offload, Offload):
        return []
    lacking = [pool for pool, _ in state.tree.windows if node.pages[pool] is None]
    for pool in lacking:
        _give(state, request, node, pool)
        node.stored = False
    return lacking


def _give(state: State, request: Request, node: Node, pool: int) -> None:
    """Hand a request's own pages to a node of the same positions."""
    place = slice(node.start, node.end)
    pages = request.tables[pool][place]
    state.ledgers[pool].move(pages, PageState.REQUEST, PageState.TREE)
    request.own[pool][place] = bytes(len(pages))
    node.pages[pool] = pages


def _bracket(state: State, request: Request, given: dict[Node, list[int]]) -> None:
    """Keep pages in place that an open forward of this request may still write.

    No other pages: more that eviction cannot have might break a promise. The anchor is
    pinned by the request already, with the windows at its end.
    """
    anchor = request.anchor
    assert anchor is not None
    for bracket in state.brackets.values():
        if request in bracket.requests:
            state.pin(anchor)
            bracket.pins.append(anchor)
            for node, pools in given.items():
                if pools:
                    # Positions, for a split may leave half of the node to another.
                    bracket.writes.append((node, node.start, pools))
                    node.written = max(node.written, bracket.number)
