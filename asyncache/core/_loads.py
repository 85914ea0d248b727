"""Loads: pages that the store fills, and what happens when some of them do not come.

==========  ==============================  ==========================================
state       event                           next
==========  ==============================  ==========================================
QUEUED      a place in the ballot           RUNNING; the transfer starts
QUEUED      interest 0                      gone, exactly as if it had never been
RUNNING     claim sinks to n > 0            RUNNING; beyond n: detached, quarantined
RUNNING     claim sinks to 0, interest 0    DRAINING; all of it detached, quarantined
RUNNING     quiet, none above it loads      LANDED: pages are the tree's
RUNNING     quiet, one above it loads       RUNNING until that one has ended
DRAINING    quiet                           gone; its pages are free
==========  ==============================  ==========================================

A load owns ranges of positions, not nodes. Below LOADING there is only LOADING, so a
cut dooms the loads below it; whoever stood on them is put back on what is left.
"""

from __future__ import annotations

from asyncache.core._agenda import Load, Piece, Request
from asyncache.core._boundaries import servable
from asyncache.core._effects import (
    Fact,
    FactKind,
    LoadPlan,
    Moved,
    Settled,
    Shortened,
    StartLoad,
    Stop,
)
from asyncache.core._errors import broken
from asyncache.core._hashes import PageHash
from asyncache.core._ledger import PageState
from asyncache.core._node import Node
from asyncache.core._reservations import demote, move_anchor, rest_on, trim_spare
from asyncache.core._state import State


def begin_load(state: State, request: Request, end: int) -> None:
    """Open a load of what a prefix of ``end`` pages lacks, and stand on it."""
    tree = state.tree
    root = tree.root(request.root_hash)
    key = bytes(request.tokens[: end * tree.stride])
    walk = tree.walk(root, key)
    base = tree.end_at(root, walk, walk.covered)
    # Nothing is put below what nobody pins.
    move_anchor(state, request, base)
    _split_at_gaps(state, base, end)
    node = base
    if walk.covered < end:
        node = _attach(state, request, base, key)
    fills = _gaps(state, node, end)
    start = min(position for _, _, position in fills)
    load = Load(
        start,
        max(node.end for node, _, _ in fills),
        is_launched=not state.bounds.launches,
    )
    # Marked and pinned first: else the eviction that makes room could take them.
    for gap, pool, _ in fills:
        gap.loads[pool] = load
    load.anchor = node
    state.pin(node)
    # What only the base's end needs is not kept: room was promised for this end.
    move_anchor(state, request, node)
    for gap, pool, first in fills:
        pages = state.take(pool, gap.end - first, PageState.TRANSIT)
        gap.pages[pool] = pages
        load.pieces.append(Piece(pool, first, pages))
    state.agenda.add(load)
    rest_on(state, request, node, end)


def _split_at_gaps(state: State, base: Node, end: int) -> None:
    """Split nodes that lack a part of a window: what a load fills must be whole."""
    tree = state.tree
    for pool, window in tree.windows:
        for node in list(tree.above(base, max(0, end - window))):
            first = node.start_of(pool)
            if max(node.start, end - window) < first < node.end:
                tree.split(node, first)


def _gaps(state: State, anchor: Node, end: int) -> list[tuple[Node, int, int]]:
    """Return the (node, pool, first position) that a boundary needs and are ABSENT."""
    tree = state.tree
    reach = [(pool, 0) for pool in tree.full]
    reach += [(pool, max(0, end - window)) for pool, window in tree.windows]
    return [
        (node, pool, max(start, node.start))
        for pool, start in reach
        for node in tree.above(anchor, start)
        if node.pages[pool] is None
    ]


def _attach(state: State, request: Request, above: Node, key: bytes) -> Node:
    tail_start, tail = request.tail
    node = state.tree.attach(above, key[above.end * state.tree.stride :])
    node.hashes = tail[node.start - tail_start : node.end - tail_start]
    return node


def start_load(state: State, load: Load) -> None:
    """Let the transfer begin: the load has a place in the ballot."""
    assert load.anchor is not None
    hashes = prefix_hashes(state, load.anchor, load.start)
    moved = tuple(
        Moved(
            pool,
            start,
            pages,
            hashes[start - load.start : start - load.start + len(pages)],
        )
        for pool, start, pages in load.pieces
    )
    plan = LoadPlan(load.seq, load.start, load.end, moved, load.is_prefetch)
    state.effects.append(StartLoad(plan))


def prefix_hashes(state: State, node: Node, start: int) -> list[PageHash]:
    """Return the hashes of the pages from ``start`` to the end of a node."""
    hashes: list[PageHash] = []
    for above in reversed(list(state.tree.above(node, start))):
        hashes += state.tree.hashes(above)[max(0, start - above.start) :]
    return hashes


def sink_load(state: State, load: Load, claim: int) -> None:
    """Take note that only the leading ``claim`` positions are still vouched for."""
    load.claim = claim
    cut(state, load, load.start + claim)


def withdraw(state: State, request: Request) -> None:
    """End a request's interest in the loads that it stands on."""
    needs, request.needs = list(request.needs), {}
    for load in needs:
        del load.interest[request]
    for load in needs:
        if not load.interest:
            cut(state, load, load.start)


def give_up(state: State, request: Request) -> None:
    """Put a request on what has landed by now; its loads go on for others, if any."""
    _put_back(state, [request], resident=True)


def cut(state: State, load: Load, position: int) -> None:
    """Give up what a load brings from ``position`` on, and all loads below that."""
    if load.anchor is None or position >= load.end:
        return
    top = _topmost(state, load, position)
    subtree = [] if top is None else list(state.tree.below(top))
    doomed = {load: None} | {
        other: None for node in subtree for other in node.loads if other is not None
    }
    waiters = {request for other in doomed for request in other.interest}
    affected = sorted(waiters, key=lambda request: request.seq)
    parent = None if top is None else top.parent
    state.effects.append(Fact(FactKind.LOAD_CUT, load.end - position))
    if top is not None:
        state.tree.detach(top)
        _quarantine(state, subtree)
    for other in doomed:
        _shrink(state, other, position if other is load else other.start)
        _stop_if_empty(state, other)
    _put_back(state, affected, resident=False)
    if parent is not None:
        state.offer(parent)


def _topmost(state: State, load: Load, position: int) -> Node | None:
    """Return the node of the backbone where the part that is cut begins."""
    assert load.anchor is not None
    top = None
    for node in state.tree.above(load.anchor, position):
        if node.loads[state.tree.backbone] is load:
            top = node
    if top is not None and top.start < position:
        state.tree.split(top, position)
    return top


def _quarantine(state: State, subtree: list[Node]) -> None:
    """Take the pages of detached nodes into quarantine, each for its own load."""
    for node in subtree:
        for pool, run in enumerate(node.pages):
            if run is not None:
                _hold(state, node, pool)


def _hold(state: State, node: Node, pool: int) -> None:
    load, run = node.loads[pool], node.pages[pool]
    assert run is not None
    if load is None:
        broken("below LOADING there is only LOADING", node)
    state.ledgers[pool].move(run, PageState.TRANSIT, PageState.QUARANTINE)
    load.held.append((pool, run))
    # The backbone stays marked: a detached node must never count as resident.
    node.pages[pool] = None


def _shrink(state: State, load: Load, position: int) -> None:
    """Give up window pages on resident nodes, and move the anchor up."""
    tree, anchor = state.tree, load.anchor
    assert anchor is not None
    for pool, _ in tree.windows:
        for node in list(tree.above(anchor, position)):
            if node.loads[pool] is load and node.pages[pool] is not None:
                if node.start_of(pool) < position:
                    tree.split(node, position)
                _hold(state, node, pool)
                node.loads[pool] = None
    load.pieces = [
        Piece(pool, start, pages[: position - start])
        for pool, start, pages in load.pieces
        if start < position
    ]
    load.anchor = None
    if load.pieces:
        load.anchor = next(node for node in tree.above(anchor) if node.end <= position)
        state.pin(load.anchor)
    state.unpin(anchor)
    load.end = max((piece.end for piece in load.pieces), default=load.start)


def _put_back(state: State, requests: list[Request], *, resident: bool) -> None:
    """Put requests, oldest first, back on what the tree still has of their hits."""
    needs = dict.fromkeys(load for request in requests for load in request.needs)
    fallen = [r for r in requests if _fall(state, r, resident=resident)]
    demote(state, fallen)
    # A load whose boundary nobody can use any more: a window of it is gone.
    for load in needs:
        if not load.interest:
            cut(state, load, load.start)
    for request in fallen:
        num_tokens = request.hit * state.tree.page_tokens
        request.extent = min(request.extent, num_tokens)
        request.computed = min(request.computed, num_tokens)
        request.committed = min(request.committed, num_tokens)
        # A restore that is still open has told its request of no hit yet.
        if request.lookup is None:
            state.effects.append(Shortened(request, request.hit))
        if not request.needs:
            settle(state, request)


def _fall(state: State, request: Request, *, resident: bool) -> bool:
    """Put one request back; return whether its hit fell."""
    tree = state.tree
    root = tree.roots.get(request.root_hash)
    walk = tree.walk(root, request.tokens[: request.hit * tree.stride])
    hit = servable(tree, walk, request.hit, resident=resident)
    if hit == request.hit:
        return False
    for pool in tree.paged:
        request.spare[pool].extend(request.tables[pool][request.hit :])
    node = tree.end_at(root, walk, hit) if root is not None and hit else None
    rest_on(state, request, node, hit)
    trim_spare(state, request)
    request.want = 0
    # A load that failed is not tried again; one that was merely late may be.
    request.barred = request.barred or not resident
    state.parked.pop(request.seq, None)
    return True


def _stop_if_empty(state: State, load: Load) -> None:
    if load.anchor is None:
        load.claim = 0
        state.effects.append(Stop(load.seq))
        if not load.started:
            _end(state, load)


def end_load(state: State, load: Load) -> None:
    """End a quiet load, unless one above it has yet to land."""
    if load.anchor is None:
        _end(state, load)
        return
    above = state.tree.above(load.anchor)
    full = state.tree.full
    if any(node.loads[pool] not in {None, load} for node in above for pool in full):
        return
    _land(state, load)
    _end(state, load)


def _land(state: State, load: Load) -> None:
    anchor, tree = load.anchor, state.tree
    assert anchor is not None
    for node in reversed(list(tree.above(anchor, load.start))):
        for pool, run in enumerate(node.pages):
            if node.loads[pool] is not load:
                continue
            assert run is not None
            node.loads[pool] = None
            state.ledgers[pool].move(run, PageState.TRANSIT, PageState.TREE)
            state.effects += state.news.cached(node, pool)
            if pool == tree.backbone:
                node.stored = True
                # Locked by the load's own pin at least.
                tree.locked_pages += node.end - node.start
    load.anchor = None
    state.unpin(anchor)
    state.effects.append(Fact(FactKind.LANDED, load.end - load.start))
    for request in list(load.interest):
        del request.needs[load]
        if not request.needs:
            settle(state, request)
    load.interest = {}


def _end(state: State, load: Load) -> None:
    state.agenda.remove(load)
    for pool, pages in load.held:
        state.ledgers[pool].give(pages, PageState.QUARANTINE)


def settle(state: State, request: Request) -> None:
    """Tell a request that all it stands on has landed."""
    if request.wait is not None:
        state.agenda.remove(request.wait)
        request.wait = None
        state.effects.append(Settled(request, request.hit))
