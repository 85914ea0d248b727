"""Restores: from a prompt to the longest prefix that every rank can serve.

==========  ================================  ========================================
state       event                             next
==========  ================================  ========================================
WAITING     a reservation                     ASKED; or AGREED, if there is no store,
                                              or nothing is left to look up
WAITING     claim 0 (late), quiet             AGREED(0): a miss
ASKED       quiet on every rank               AGREED(boundary): stand on it, loading
                                              what is not resident
AGREED      all of it resident                settled
AGREED      else                              a wait, until its loads end
wait        claim 0 (this request gives up)   settled on what has landed
==========  ================================  ========================================
"""

from __future__ import annotations

from itertools import groupby

from asyncache.core._agenda import Lookup, Request, Wait
from asyncache.core._boundaries import servable
from asyncache.core._effects import (
    Asked,
    AskStore,
    LookupPlan,
    Restored,
    Settled,
    Stop,
)
from asyncache.core._hashes import PageHash, hash_pages
from asyncache.core._loads import begin_load, cut, give_up, prefix_hashes, settle
from asyncache.core._node import Node
from asyncache.core._reservations import grant, rest_on, restore_limit
from asyncache.core._slots import may_ask, promise_slot
from asyncache.core._state import State
from asyncache.core._tree import Walk


def begin_restore(state: State, request: Request, *, ask_store: bool) -> None:
    """Open a restore: wait for a reservation, then look up what is not resident."""
    limit = restore_limit(state, request)
    lookup = Lookup(request, limit, ask_store=ask_store)
    request.lookup = lookup
    state.agenda.add_restore(lookup)
    state.waiting[request.seq] = request


def grant_waiting(state: State) -> None:
    """Go on with each restore whose reservation has come."""
    for request in grant(state):
        lookup = request.lookup
        assert lookup is not None
        if not _ask(state, lookup):
            agree(state, lookup, 0)


def _ask(state: State, lookup: Lookup) -> bool:
    """Put a lookup to the store; return False if there is nothing to ask."""
    request, tree = lookup.request, state.tree
    lookup.start = request.hit
    has_slot = bool(request.slots.promised) or not tree.states
    if not (has_slot and may_ask(state, request)) or request.hit >= lookup.end:
        return False
    root = tree.roots.get(request.root_hash)
    walk = tree.walk(root, request.tokens[: lookup.end * tree.stride])
    lookup.covered = walk.covered
    request.tail = _tail(state, request, walk, lookup.end)
    lookup.asked = True
    asks, windows = _asks(state, lookup, walk)
    plan = LookupPlan(lookup.seq, lookup.start, lookup.end, asks, windows)
    state.effects.append(AskStore(plan))
    return True


def _tail(
    state: State, request: Request, walk: Walk, end: int
) -> tuple[int, list[PageHash]]:
    """Return where a prompt leaves the tree, and the hashes of its pages from there."""
    tree, node = state.tree, _last_whole(walk)
    start = 0 if node is None else node.end
    parent = request.root_hash if node is None else tree.last_hash(node)
    tokens = bytes(request.tokens[start * tree.stride : end * tree.stride])
    return start, hash_pages(tokens, page_tokens=tree.page_tokens, parent=parent)


def _last_whole(walk: Walk) -> Node | None:
    """Return the deepest node that the walk covers whole."""
    for node in reversed(walk.path):
        if node.end <= walk.covered:
            return node
    return None


def _asks(
    state: State, lookup: Lookup, walk: Walk
) -> tuple[tuple[Asked, ...], tuple[tuple[int, int, int, bytes], ...]]:
    tree, (tail_start, tail) = state.tree, lookup.request.tail
    full = tail[lookup.covered - tail_start :]
    asks = [Asked(pool, lookup.covered, full) for pool in tree.full]
    windows = []
    for pool, window in tree.windows:
        origin = max(0, lookup.start + 1 - window)
        present = _presence(walk, pool, origin, lookup.end)
        windows.append((pool, window, origin, bytes(present)))
        node = _last_whole(walk)
        known = [] if node is None else prefix_hashes(state, node, origin)
        hashes = (known + tail)[-(lookup.end - origin) :]
        for is_there, run in groupby(range(len(present)), present.__getitem__):
            if not is_there:
                missing = list(run)
                start = origin + missing[0]
                asks.append(Asked(pool, start, [hashes[index] for index in missing]))
    return tuple(asks), tuple(windows)


def _presence(walk: Walk, pool: int, origin: int, end: int) -> bytearray:
    """Return a byte a position from ``origin`` on, 1 where the tree has the page."""
    present = bytearray(end - origin)
    for node in walk.path:
        first = max(origin, node.start_of(pool))
        for position in range(first, min(node.end, walk.covered)):
            present[position - origin] = 1
    return present


def agree(state: State, lookup: Lookup, boundary: int) -> None:
    """End a lookup: stand on the agreed boundary, or on what is resident."""
    request = lookup.request
    state.waiting.pop(request.seq, None)
    state.agenda.remove(lookup)
    request.lookup = None
    # A cut may have taken its promise back while it was looked up: then what it would
    # load into, or keep from eviction, is promised to others.
    if boundary > request.hit and request.promise >= request.num_reserve:
        _stand_on(state, lookup, boundary)
    promise_slot(state, request, 0)
    state.effects.append(Restored(request, request.hit))
    if request.needs:
        request.wait = Wait(request)
        state.agenda.add_restore(request.wait)
    else:
        state.effects.append(Settled(request, request.hit))


def _stand_on(state: State, lookup: Lookup, boundary: int) -> None:
    had = lookup.request.needs
    _move_to(state, lookup, boundary)
    # A longer hit has other windows: only this request may have needed those it had.
    for load in had:
        if not load.interest:
            cut(state, load, load.start)


def _move_to(state: State, lookup: Lookup, boundary: int) -> None:
    request, tree = lookup.request, state.tree
    root = tree.roots.get(request.root_hash)
    walk = tree.walk(root, request.tokens[: boundary * tree.stride])
    resident = servable(tree, walk, boundary)
    # What was evicted since the store was asked, it was not asked for.
    if resident < boundary and walk.covered >= min(lookup.covered, boundary):
        begin_load(state, request, boundary)
    elif root is not None and resident > request.hit:
        rest_on(state, request, tree.end_at(root, walk, resident), resident)


def end_wait(state: State, request: Request) -> None:
    """Stop waiting: the request settles on what has landed."""
    give_up(state, request)
    settle(state, request)


def forget_restore(state: State, request: Request) -> None:
    """Drop a request's open lookup or wait, on a call or at the request's end."""
    state.waiting.pop(request.seq, None)
    if request.lookup is not None:
        if request.lookup.asked:
            state.effects.append(Stop(request.lookup.seq))
        state.agenda.remove(request.lookup)
        request.lookup = None
        promise_slot(state, request, 0)
    if request.wait is not None:
        state.agenda.remove(request.wait)
        request.wait = None
