"""State slots: one of each request's own, checkpoints, and the copies between them.

A model overwrites its request's own slot as it computes. What others may continue from
is a *checkpoint*: a copy of that slot at a boundary, which a commit hands to the tree.

===========  =========================  ==========================================
slot         is taken                   goes back
===========  =========================  ==========================================
own          with the reservation       when the request ends or starts over
checkpoint   inside a forward, if that  a truncate or an end above it, or a commit
             breaks no promise          that finds one like it in the tree
a load's     when a lookup is agreed:   as any page of the tree
             promised until then
===========  =========================  ==========================================

A hit's state is copied into the own slot at the entry of the first forward after the
hit has settled, and stays where it is, pinned, until that forward has finished. With no
hit, nothing is copied: what the slot holds is then undefined.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from asyncache.core._agenda import Request, SlotCopy
from asyncache.core._errors import OrderError
from asyncache.core._ledger import PageState
from asyncache.core._slack import slot_slack
from asyncache.core._state import State


def may_ask(state: State, request: Request) -> bool:
    """Whether a request's lookup is for the store, and may come to load."""
    lookup = request.lookup
    wants = lookup is not None and lookup.ask_store
    return wants and state.store_attached and not request.barred


def slots_to_load(state: State, request: Request, hit: int) -> int:
    """Return how many slots of each state pool a request's load may take."""
    if not state.tree.states or not may_ask(state, request):
        return 0
    # Beside its own and its hit's. In a pool that can never have so many it would wait
    # for ever: then the store is not asked.
    has_room = _least_slots(state) > 1 + bool(hit)
    return int(has_room)


def _least_slots(state: State) -> int:
    return min(state.ledgers[pool].num_pages for pool in state.tree.states)


def own_slots(state: State, request: Request) -> int:
    """Return how many slots of each state pool a request has yet to take."""
    return int(bool(state.tree.states) and not request.slots.own)


def take_own(state: State, request: Request) -> None:
    """Take a request's own slots; its reservation has found room for them."""
    if own_slots(state, request):
        for pool in state.tree.states:
            request.slots.own.extend(state.take(pool, 1, PageState.REQUEST))


def promise_slot(state: State, request: Request, count: int) -> None:
    """Change how many slots are kept for what a request's lookup may load."""
    state.promised_slots += count - request.slots.promised
    request.slots.promised = count


def check_settled(state: State, requests: Iterable[Request]) -> None:
    """Raise unless the states that a forward begins with are all there."""
    for request in requests if state.tree.states else ():
        if request.lookup is not None or request.needs:
            raise OrderError(
                f"the state of request {request.seq} is on its way: await hit.wait()"
                " before a forward over it"
            )


def restore_own(state: State, requests: Iterable[Request]) -> list[SlotCopy]:
    """Return the copies that bring requests' slots to where their hits end."""
    copies: list[SlotCopy] = []
    for request in requests:
        if request.slots.is_behind:
            request.slots.is_behind = False
            anchor = request.anchor
            # Nothing was published meanwhile: it still ends where the hit does.
            assert anchor is not None
            for pool, own in zip(state.tree.states, request.slots.own, strict=True):
                run = anchor.pages[pool]
                assert run is not None
                copies.append(SlotCopy(pool, run[0], own))
    return copies


def checkpoint(state: State, request: Request, num_tokens: int) -> list[SlotCopy]:
    """Take slots for a copy of a request's state; return no copies if there is no room.

    Raises:
        ValueError: If ``num_tokens`` is no boundary that the forward reaches.
        OrderError: If no forward over the request is open.
    """
    _check_checkpoint(state, request, num_tokens)
    boundary = num_tokens // state.tree.page_tokens
    slots = request.slots.checkpoints.get(boundary)
    if slots is None:
        is_void = request.generation != state.generation
        if is_void or slot_slack(state) < 1:
            return []
        slots = {
            pool: state.take(pool, 1, PageState.REQUEST)[0]
            for pool in state.tree.states
        }
        request.slots.checkpoints[boundary] = slots
    return [
        SlotCopy(pool, own, slots[pool])
        for pool, own in zip(state.tree.states, request.slots.own, strict=True)
    ]


def _check_checkpoint(state: State, request: Request, num_tokens: int) -> None:
    page_tokens = state.tree.page_tokens
    if not state.tree.states:
        raise ValueError("checkpoint: the layout has no StatePool")
    if not any(request in bracket.requests for bracket in state.brackets.values()):
        raise OrderError("checkpoint outside of a forward over the request")
    least = max(request.shared, request.hit) * page_tokens
    if num_tokens % page_tokens or not least < num_tokens <= request.computed:
        raise ValueError(
            f"checkpoint of {num_tokens} tokens: it must be a multiple of"
            f" {page_tokens} above the {least} that are shared, up to the"
            f" {request.computed} that the forward computes"
        )


def drop_checkpoints(state: State, request: Request, span: range) -> None:
    """Give back the checkpoints at boundaries within a span."""
    for boundary in [at for at in request.slots.checkpoints if at in span]:
        for pool, slot in request.slots.checkpoints.pop(boundary).items():
            state.release(pool, array("i", [slot]), PageState.REQUEST)


def give_back(state: State, request: Request) -> None:
    """Give back all slots of a request."""
    for pool, slot in zip(state.tree.states, request.slots.own, strict=False):
        state.release(pool, array("i", [slot]), PageState.REQUEST)
    del request.slots.own[:]
    drop_checkpoints(state, request, range(request.extent + 1))
    request.slots.is_behind = False
