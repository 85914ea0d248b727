"""Commits: computed pages become everyone's, as far as their prefix has landed.

The tree keeps the pages that it has; a request's own pages for the same tokens are
duplicates and stay the request's until it ends, for a page id that a model was given
must not change under it. A commit stops at the first page that is LOADING, its own
load's included, and where pinning resident pages that it duplicates would break a
promise; the rest is *parked*, and tried again whenever something has changed. Nodes end
where the request has taken a checkpoint, for that is where their state belongs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from asyncache.core._agenda import Offload, Request
from asyncache.core._effects import Fact, FactKind
from asyncache.core._ledger import PageState
from asyncache.core._node import Node
from asyncache.core._offloads import offer_again, topmost_unsaved
from asyncache.core._reservations import try_pin
from asyncache.core._slots import drop_checkpoints
from asyncache.core._state import State
from asyncache.core._tree import Walk


def publish(state: State, request: Request) -> None:
    """Insert what a request has committed, up to the first page that is LOADING."""
    if request.generation != state.generation:
        # Computed by what was reset away: it is nobody else's.
        request.want = request.shared
        drop_checkpoints(state, request, range(request.extent + 1))
    # A state that the request has yet to copy must stay at the end of its anchor.
    if (
        request.want > request.shared
        and not request.needs
        and not request.slots.is_behind
    ):
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
    _split_at_checkpoints(state, request, node, shared)
    given = {above: _adopt(state, request, above) for above in tree.above(node, shared)}
    if node.end < end:
        state.effects.append(Fact(FactKind.PUBLISHED, end - node.end))
        for stop in _stops(request, node.end, end):
            node = tree.attach(node, key[node.end * tree.stride : stop * tree.stride])
            given[node] = _give_all(state, request, node, range(tree.num_pools))
        _stand_on(state, request, node)
    # What the tree had already.
    drop_checkpoints(state, request, range(end + 1))
    if any(given.values()):
        _bracket(state, request, given)
    path = list(tree.above(node, shared))
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
    for pool, *_ in state.tree.trailing:
        for node in list(state.tree.above(anchor, start)):
            first = node.start_of(pool)
            if node.start < first < node.end and not isinstance(node.offload, Offload):
                state.tree.split(node, first)


def _split_at_checkpoints(
    state: State, request: Request, anchor: Node, start: int
) -> None:
    """Let nodes end where the request has a state for them."""
    for node in list(state.tree.above(anchor, start)):
        # An offload that runs takes none, and splits for nothing.
        if not isinstance(node.offload, Offload):
            for stop in _stops(request, node.start, node.end)[:-1]:
                state.tree.split(node, stop)


def _stops(request: Request, start: int, end: int) -> list[int]:
    """Return where nodes from ``start`` to ``end`` must end, in order."""
    return [*sorted(at for at in request.slots.checkpoints if start < at < end), end]


def _adopt(state: State, request: Request, node: Node) -> list[int]:
    """Give a node the windows and the state that it lacks; return of which pools."""
    # An offload that runs would call the node stored, without these pages.
    if isinstance(node.offload, Offload):
        return []
    lacking = [pool for pool, _ in state.tree.windows if node.pages[pool] is None]
    given = _give_all(state, request, node, lacking)
    if given:
        node.stored = False
    return given


def _give_all(
    state: State, request: Request, node: Node, pools: Iterable[int]
) -> list[int]:
    """Hand a request's own pages to a node; return of which pools it had any."""
    given = []
    for pool in pools:
        is_state = pool in state.tree.states
        pages = (_own_state if is_state else _own_pages)(request, node, pool)
        if pages:
            state.ledgers[pool].move(pages, PageState.REQUEST, PageState.TREE)
            node.pages[pool] = pages
            state.effects += state.news.cached(node, pool)
            given.append(pool)
    return given


def _own_pages(request: Request, node: Node, pool: int) -> array[int]:
    """Let go of a request's pages for a node: the last ones, if a window has passed."""
    place = slice(max(node.start, request.passed[pool]), node.end)
    pages = request.tables[pool][place]
    request.own[pool][place] = bytes(len(pages))
    return pages


def _own_state(request: Request, node: Node, pool: int) -> array[int]:
    """Let go of a request's checkpoint at the end of a node, if it has one."""
    slots = request.slots.checkpoints.get(node.end, {})
    return array("i", [slots.pop(pool)] if pool in slots else [])


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
