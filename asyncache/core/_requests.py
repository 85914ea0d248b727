"""Requests: what a prompt may do with its pages between open and end.

=========  ===============================  =========================================
state      call or vote                     next
=========  ===============================  =========================================
OPEN       restore                          RESTORING
RESTORING  agreed, or given up              OPEN; stands on a hit
OPEN       first extend                     COMPUTING; restore is refused from now on
COMPUTING  extend, append, truncate,        COMPUTING
           commit
any        suspend                          OPEN, with nothing but its tokens
any        claim 0                          ABORTED: all it holds goes back
any        quiet                            CLOSED, once no commit of it is parked on
                                            a load: all it holds goes back
=========  ===============================  =========================================
"""

from __future__ import annotations

from array import array
from itertools import compress

from asyncache.core._agenda import Request
from asyncache.core._commits import offer_hit, publish
from asyncache.core._effects import Ended
from asyncache.core._errors import OrderError, OutOfPagesError
from asyncache.core._hashes import Namespace
from asyncache.core._layout import check_at_least
from asyncache.core._ledger import PageState
from asyncache.core._loads import withdraw
from asyncache.core._node import Node
from asyncache.core._reservations import (
    move_anchor,
    restore_limit,
    trim_spare,
    try_reserve,
    update_remainder,
)
from asyncache.core._restores import begin_restore, forget_restore
from asyncache.core._slack import page_slack
from asyncache.core._slots import drop_checkpoints, give_back
from asyncache.core._state import State

MAX_PRIORITY = 2**31 - 1


def open_request(
    state: State,
    tokens: bytes,
    namespace: Namespace,
    *,
    num_reserve_tokens: int,
    priority: int,
    is_prefetch: bool,
) -> Request:
    """Open a request that holds nothing yet."""
    if num_reserve_tokens < 0:
        raise ValueError(f"reserve_tokens must be at least 0, not {num_reserve_tokens}")
    check_at_least(-MAX_PRIORITY, "priority", priority)
    if priority > MAX_PRIORITY:
        raise ValueError(f"priority must be at most {MAX_PRIORITY}, not {priority}")
    num_tokens = len(tokens) // 4
    num_reserve = pages_of(state, num_tokens + num_reserve_tokens)
    _check_fits_pool(state, num_reserve)
    num_pools = len(state.ledgers)
    request = Request(
        tokens, namespace, num_pools, num_reserve, priority, is_prefetch=is_prefetch
    )
    state.renew(request)
    state.agenda.add_request(request)
    state.clock += 1
    root = state.tree.roots.get(request.root_hash)
    limit = restore_limit(state, request) * state.tree.stride
    walk = state.tree.walk(root, tokens[:limit])
    _touch(state, [node for node in walk.path if node.end <= walk.covered])
    return request


def _touch(state: State, path: list[Node]) -> None:
    """Mark nodes as used now; of them, only the last can be a leaf."""
    for node in path:
        node.used = state.clock
    if path:
        state.offer(path[-1])


def restore(state: State, request: Request, *, ask_store: bool) -> None:
    """Begin to restore a request; legal until it computes."""
    if request.extent:
        raise OrderError(
            f"restore comes before extend; the request has pages for {request.extent}"
            " tokens: suspend() it first"
        )
    if request.lookup is not None or request.wait is not None:
        raise OrderError("a restore of this request is open already")
    _size_reservation(state, request)
    _start_over(state, request)
    begin_restore(state, request, ask_store=ask_store)


def extend(state: State, request: Request, num_tokens: int) -> int:
    """Add pages until the first ``num_tokens`` have one; return how many were added."""
    _check_extend(request, num_tokens)
    have = len(request.tables[state.tree.backbone])
    needed = pages_of(state, num_tokens) - have
    if not request.promise:
        _reserve_now(state, request)
    beyond = needed - request.remainder - len(request.spare[state.tree.backbone])
    if beyond > 0:
        _check_slack(state, needed, beyond)
    _pass_windows(state, request)
    for pool in state.tree.paged:
        _add_pages(state, request, pool, needed)
    request.extent = num_tokens
    update_remainder(state, request)
    return max(0, needed)


def _check_extend(request: Request, num_tokens: int) -> None:
    if num_tokens < request.extent:
        raise ValueError(
            f"extend to {num_tokens} tokens, but the request has pages for"
            f" {request.extent}: use truncate() to give pages back"
        )
    if num_tokens > request.num_tokens:
        raise ValueError(
            f"extend to {num_tokens} tokens, but only {request.num_tokens} are known:"
            " append() them first"
        )
    _check_no_restore(request, "extend")


def _check_no_restore(request: Request, call: str) -> None:
    if request.lookup is not None:
        raise OrderError(f"{call} while a restore is open: await it first")


def _pass_windows(state: State, request: Request) -> None:
    """Give back the window pages that what is computed next does not look back to.

    A forward has computed, or computes in an open bracket, what was extended before.
    """
    if request.needs:
        # Its hit may fall: the pages above it are what it goes on with.
        return
    for pool, _, window_tokens in state.tree.trailing:
        edge = (request.computed - window_tokens) // state.tree.page_tokens
        if request.want > request.shared:
            # A commit that is parked still has to publish the rest.
            edge = min(edge, request.shared)
        behind = slice(request.passed[pool], edge)
        if behind.start < edge:
            table, own = request.tables[pool], request.own[pool]
            pages = array("i", compress(table[behind], own[behind]))
            state.release(pool, pages, PageState.REQUEST)
            table[behind] = array("i", [-1]) * (edge - behind.start)
            own[behind] = bytes(edge - behind.start)
            request.passed[pool] = edge


def _reserve_now(state: State, request: Request) -> None:
    _size_reservation(state, request)
    ahead = any(seq < request.seq for seq in state.waiting)
    if ahead or not try_reserve(state, request, match=False):
        if page_slack(state) >= request.num_reserve and not ahead:
            raise OutOfPagesError(
                "need a state slot, and none is neither used nor promised: wait, or"
                " suspend a request",
                needed=1,
                available=0,
            )
        available = 0 if ahead else max(0, page_slack(state))
        raise OutOfPagesError(
            f"need {request.num_reserve} pages, {available} are neither used nor"
            " promised: wait, or suspend a request",
            needed=request.num_reserve,
            available=available,
        )


def _check_slack(state: State, needed: int, beyond: int) -> None:
    slack = page_slack(state)
    if slack < beyond:
        raise OutOfPagesError(
            f"need {needed} pages, {beyond} of them beyond the reservation,"
            f" {max(0, slack)} are neither used nor promised: suspend a request",
            needed=beyond,
            available=max(0, slack),
        )


def _add_pages(state: State, request: Request, pool: int, num_pages: int) -> None:
    if num_pages <= 0:
        return
    spare = request.spare[pool]
    pages = spare[:num_pages]
    del spare[:num_pages]
    pages.extend(state.take(pool, num_pages - len(pages), PageState.REQUEST))
    request.tables[pool].extend(pages)
    request.own[pool].extend(b"\1" * num_pages)


def append(request: Request, tokens: bytes) -> None:
    """Add known tokens."""
    request.tokens += tokens


def commit(state: State, request: Request, num_tokens: int) -> int:
    """Publish the whole pages of the first ``num_tokens``; return the shared tokens."""
    if num_tokens < request.committed:
        raise ValueError(
            f"commit of {num_tokens} tokens falls below the {request.committed} that"
            " were committed"
        )
    if num_tokens > max(request.extent, request.hit * state.tree.page_tokens):
        raise ValueError(
            f"commit of {num_tokens} tokens, but only {request.extent} have pages:"
            " extend() first"
        )
    state.clock += 1
    is_first, request.committed = not request.committed, num_tokens
    request.want = max(request.want, num_tokens // state.tree.page_tokens)
    publish(state, request)
    if is_first:
        # A hit may be all that it commits, and its nodes due by now, or forgotten.
        offer_hit(state, request)
    return request.shared * state.tree.page_tokens


def truncate(state: State, request: Request, num_tokens: int) -> None:
    """Forget the tokens past ``num_tokens``, and the pages that only they needed."""
    _check_no_restore(request, "truncate")
    shared = max(request.shared, request.hit) * state.tree.page_tokens
    least = max(1, shared, _least_in_windows(state, request))
    if not least <= num_tokens <= request.num_tokens:
        raise ValueError(
            f"truncate to {num_tokens} tokens: it must lie between the {least} that are"
            " shared, or before which a window has passed, and the"
            f" {request.num_tokens} that are known"
        )
    del request.tokens[num_tokens * 4 :]
    keep = pages_of(state, num_tokens)
    for pool in state.tree.paged:
        table = request.tables[pool]
        request.spare[pool].extend(table[keep:])
        del table[keep:], request.own[pool][keep:]
    boundary = num_tokens // state.tree.page_tokens
    drop_checkpoints(state, request, range(boundary + 1, request.extent + 1))
    request.extent = min(request.extent, num_tokens)
    request.computed = min(request.computed, num_tokens)
    request.committed = min(request.committed, num_tokens)
    request.want = min(request.want, boundary)
    publish(state, request)
    trim_spare(state, request)


def _least_in_windows(state: State, request: Request) -> int:
    """Return the fewest tokens whose windows still have all of their pages."""
    return max(
        (
            request.passed[pool] * state.tree.page_tokens + window_tokens
            for pool, _, window_tokens in state.tree.trailing
            if request.passed[pool]
        ),
        default=0,
    )


def suspend(state: State, request: Request) -> None:
    """Give back all that a request holds but its tokens, so that it can start over."""
    _start_over(state, request)
    request.barred = False


def end_request(state: State, request: Request, *, aborted: bool) -> None:
    """End a request. An abort commits nothing; what was committed before stays."""
    _release(state, request)
    state.closing.pop(request.seq, None)
    state.agenda.remove(request)
    for bracket in state.brackets.values():
        bracket.requests.pop(request, None)
    state.effects.append(Ended(request, aborted))


def close_request(state: State, request: Request) -> None:
    """End a request normally, once no commit of it waits for its own loads."""
    if request.needs and request.want > request.shared:
        state.closing[request.seq] = request
    else:
        end_request(state, request, aborted=False)


def _start_over(state: State, request: Request) -> None:
    _release(state, request)
    request.hit = request.extent = request.committed = request.want = 0
    request.computed, request.passed = 0, [0] * len(request.passed)
    state.renew(request)


def _release(state: State, request: Request) -> None:
    for bracket in state.brackets.values():
        bracket.is_awaited |= request in bracket.requests
    forget_restore(state, request)
    state.parked.pop(request.seq, None)
    withdraw(state, request)
    move_anchor(state, request, None)
    for pool, table in enumerate(request.tables):
        own = request.own[pool]
        pages = array(
            "i", [page for page, mine in zip(table, own, strict=True) if mine]
        )
        pages.extend(request.spare[pool])
        state.release(pool, pages, PageState.REQUEST)
        del table[:], request.spare[pool][:]
        request.own[pool] = bytearray()
    give_back(state, request)
    request.promise = 0
    update_remainder(state, request)


def pages_of(state: State, num_tokens: int) -> int:
    """Return how many pages hold so many tokens."""
    return -(-num_tokens // state.tree.page_tokens)


def _size_reservation(state: State, request: Request) -> None:
    """Let the reservation cover what was appended since the request was opened."""
    num_reserve = max(request.num_reserve, pages_of(state, request.num_tokens))
    _check_fits_pool(state, num_reserve)
    request.num_reserve = num_reserve


def _check_fits_pool(state: State, num_reserve: int) -> None:
    num_pages = min(state.ledgers[pool].num_pages for pool in state.tree.paged)
    if num_reserve > num_pages:
        raise OutOfPagesError(
            f"a prompt of {num_reserve} pages cannot fit a pool of {num_pages}",
            needed=num_reserve,
            available=num_pages,
        )
