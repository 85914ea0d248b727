"""Who may take pages: promises that never exceed what can be had.

A request starts to load or to compute only against a reservation of its whole prompt,
granted in sequence order. From then on ``slack``, the pages that are free or evictable
less all that is promised and not yet taken, is never negative, so that taking what was
promised never fails and requests that wait can never lock the pool.
"""

from __future__ import annotations

from array import array

from asyncache.core._agenda import Load, Request
from asyncache.core._boundaries import servable
from asyncache.core._effects import Hurry
from asyncache.core._ledger import PageState
from asyncache.core._node import Node
from asyncache.core._slack import keeps_promises, page_slack, slot_slack
from asyncache.core._slots import own_slots, promise_slot, slots_to_load, take_own
from asyncache.core._state import State


def restore_limit(state: State, request: Request) -> int:
    """Return the longest hit in pages: the last token is always computed."""
    return (request.num_tokens - 1) // state.layout.page_tokens


def try_reserve(state: State, request: Request, *, match: bool) -> bool:
    """Promise a request its whole prompt if there is room, standing on what is there.

    Its own state slots are taken at once, and one is promised for what it may load.
    Without ``match`` it stands on nothing, and computes all of it.
    """
    tree, node, hit = state.tree, None, 0
    if match:
        root = tree.roots.get(request.root_hash)
        limit = restore_limit(state, request)
        walk = tree.walk(root, request.tokens[: limit * tree.stride])
        hit = servable(tree, walk, limit)
        if root is not None and hit:
            node = tree.end_at(root, walk, hit)
    state.pin(node)
    loaded = slots_to_load(state, request, hit)
    fits = (
        page_slack(state) >= request.num_reserve - hit
        and slot_slack(state) >= own_slots(state, request) + loaded
    )
    if fits:
        request.promise = request.num_reserve
        rest_on(state, request, node, hit)
        promise_slot(state, request, loaded)
        take_own(state, request)
    state.unpin(node)
    return fits


def try_pin(state: State, node: Node) -> bool:
    """Pin a prefix, unless that would break a promise."""
    state.pin(node)
    if keeps_promises(state):
        return True
    state.unpin(node)
    return False


def rest_on(state: State, request: Request, node: Node | None, hit: int) -> None:
    """Put a request on a resident or loading prefix; its page table is just that."""
    move_anchor(state, request, node)
    had, request.hit = request.hit, hit
    for pool in state.tree.paged:
        table = request.tables[pool]
        del table[:]
        if node is not None:
            table.extend(state.tree.pages_on(node, pool))
        request.own[pool] = bytearray(hit)
    for pool, window, _ in state.tree.trailing:
        # Below its window nothing keeps these pages in place.
        blank = request.passed[pool] = max(0, hit - window)
        request.tables[pool][:blank] = array("i", [-1]) * blank
    request.slots.is_behind = bool(hit and state.tree.states)
    _stand(state, request, loads_under(state, node, hit))
    if node is not None:
        for above in state.tree.above(node):
            above.used = state.clock
            # Once a restore, though it may first stand on a part of its hit.
            above.hits += above.end > had
            above.priority = max(above.priority, request.priority)
    update_remainder(state, request)


def move_anchor(state: State, request: Request, node: Node | None) -> None:
    """Pin another prefix for a request in place of the one it has."""
    if node is not None and node.parent is None:
        node = None
    state.pin(node)
    state.unpin(request.anchor)
    request.anchor = node


def _stand(state: State, request: Request, needs: dict[Load, None]) -> None:
    for load in request.needs:
        if load not in needs:
            del load.interest[request]
    for load in needs:
        load.interest[request] = None
        if load.is_prefetch and not request.is_prefetch:
            load.is_prefetch = False
            if load.started:
                state.effects.append(Hurry(load.seq))
    request.needs = needs


def loads_under(state: State, node: Node | None, hit: int) -> dict[Load, None]:
    """Return the loads that a prefix stands on, nearest to the root first."""
    if node is None:
        return {}
    reach = dict.fromkeys(state.tree.full, 0)
    reach |= {pool: max(0, hit - window) for pool, window in state.tree.windows}
    found = []
    for above in state.tree.above(node):
        for pool, start in reach.items():
            load = above.loads[pool]
            if load is not None and above.end > start:
                found.append(load)
    return dict.fromkeys(reversed(found))


def update_remainder(state: State, request: Request) -> None:
    """Keep the sum of promises after a request's pages or promise changed."""
    backbone = state.tree.backbone
    taken = len(request.tables[backbone]) + len(request.spare[backbone])
    remainder = max(0, request.promise - taken)
    state.promised += remainder - request.remainder
    request.remainder = remainder


def trim_spare(state: State, request: Request) -> None:
    """Give back spare pages that no promise covers."""
    room = max(0, request.promise - len(request.tables[state.tree.backbone]))
    for pool, spare in enumerate(request.spare):
        state.release(pool, spare[room:], PageState.REQUEST)
        del spare[room:]
    update_remainder(state, request)


def demote(state: State, requests: list[Request]) -> None:
    """Take promises back, youngest first, until they can all be kept again.

    Needed only after hits fell. Pages of a load that was cut are in quarantine for as
    long as something may still write them, and the requests that stood on them would
    need others in their place. A shorter hit may also pin a window or a state that
    was evictable;
    where even the promises do not make up for that, the hit is given up.
    """
    youngest_first = sorted(requests, key=lambda r: r.seq, reverse=True)
    for request in youngest_first:
        if page_slack(state) >= 0:
            break
        _take_promise(state, request)
    for request in youngest_first:
        if keeps_promises(state):
            break
        _drop_hit(state, request)


def _take_promise(state: State, request: Request) -> None:
    request.promise -= request.remainder
    update_remainder(state, request)


def _drop_hit(state: State, request: Request) -> None:
    rest_on(state, request, None, 0)
    _take_promise(state, request)


def _room(state: State, request: Request) -> tuple[int, ...] | None:
    """Return what a refusal depends on; None where windows make that too much."""
    if state.tree.windows:
        return None
    counts = [count for ledger in state.ledgers for count in ledger.counts]
    prompt = (request.seq, request.num_tokens, state.generation)
    return (*prompt, state.promised, state.tree.version, *counts)


def grant(state: State) -> list[Request]:
    """Reserve for waiting requests in sequence order; return those that got theirs."""
    granted: list[Request] = []
    for seq in sorted(state.waiting):
        request = state.waiting[seq]
        room = _room(state, request)
        # Asked after every call: who was refused is, until something has changed.
        if room is not None and room == state.refused:
            break
        if not try_reserve(state, request, match=True):
            # Read anew, for the attempt pinned and unpinned.
            state.refused = _room(state, request)
            break
        del state.waiting[seq]
        granted.append(request)
    return granted
