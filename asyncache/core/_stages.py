"""Where each open transaction is, in one word: for logs, and for what tests have seen.

A lookup and a wait are where their request is: they are its way to a hit.

=======  ===========================================================================
request  open, waiting (for room), looking up, loading, restored, provisional
         (computes over a load), computing, parked (its commit waits)
load     queued, running, shared (by several requests), draining
ready    queued, offered
offload  queued, running, void (a reset or a detach came since)
=======  ===========================================================================
"""

from __future__ import annotations

from typing import NamedTuple

from asyncache.core._agenda import (
    Load,
    Lookup,
    Offload,
    Ready,
    Request,
    Transaction,
    Wait,
)
from asyncache.core._state import State


class Stage(NamedTuple):
    """The kind of a transaction, and the word for where it is."""

    kind: str
    word: str

    def __str__(self) -> str:
        return f"{self.kind} {self.word}"


STAGES = tuple(
    Stage(kind, word)
    for kind, words in {
        "request": (
            "open",
            "waiting",
            "looking up",
            "loading",
            "restored",
            "provisional",
            "computing",
            "parked",
        ),
        "load": ("queued", "running", "shared", "draining"),
        "ready": ("queued", "offered"),
        "offload": ("queued", "running", "void"),
    }.items()
    for word in words
)
"""All that there are."""


def stages(state: State) -> dict[int, Stage]:
    """Return where each open transaction is, by sequence number."""
    return {seq: _stage(t) for seq, t in state.agenda.open.items()}


def _stage(transaction: Transaction) -> Stage:
    match transaction:
        case Lookup(request=request) | Wait(request=request):
            return Stage("request", _of_request(request))
        case Request():
            return Stage("request", _of_request(transaction))
        case Load():
            return Stage("load", _of_load(transaction))
        case Offload(is_void=True):
            return Stage("offload", "void")
        case Offload():
            return Stage("offload", "running" if transaction.started else "queued")
        case _:
            assert isinstance(transaction, Ready)
            return Stage("ready", "offered" if transaction.started else "queued")


def _of_request(request: Request) -> str:
    if request.lookup is not None:
        return "looking up" if request.lookup.asked else "waiting"
    if request.want > request.shared:
        return "parked"
    if request.needs:
        return "provisional" if request.extent else "loading"
    if request.extent:
        return "computing"
    return "restored" if request.hit else "open"


def _of_load(load: Load) -> str:
    if not load.started:
        return "queued"
    if load.anchor is None or not load.interest:
        return "draining"
    return "shared" if len(load.interest) > 1 else "running"
