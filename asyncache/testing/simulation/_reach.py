"""Which mishap can befall a transaction where: what a good workload gets to see."""

from __future__ import annotations

from asyncache.core import Stage
from asyncache.testing.simulation._mishaps import CLIENT, DEVICE, RANK, Mishap

_ASKING = frozenset({Mishap.STALL, Mishap.RAISE, Mishap.SHORT})
"""Befalls whoever asks the store for anything."""
_LOOKUP = _ASKING | {Mishap.HIDE}
_LOAD = _ASKING.union(
    {Mishap.LOSE, Mishap.CORRUPT, Mishap.PARTIAL, Mishap.STUBBORN}, DEVICE
)
# Offloads look whether the page before theirs is stored.
_OFFLOAD = _LOOKUP.union({Mishap.FULL, Mishap.UNREPORTED, Mishap.STUBBORN}, DEVICE)
_CLIENT = frozenset({*CLIENT, Mishap.DEADLINE})
_EVERYWHERE = frozenset(
    {
        Mishap.OUTAGE,
        Mishap.RESET,
        Mishap.REVISION,
        Mishap.DETACH,
        Mishap.CLOSE,
        Mishap.STRANGER,
        Mishap.KILL,
    }
)
"""Befalls all that is open."""
_OPENING = frozenset({Mishap.SHUT, Mishap.STALL, Mishap.RAISE})
"""Befalls all that is open while a store is attached, and there is none as yet."""
_STORELESS = frozenset(
    {
        Stage("request", "open"),
        Stage("request", "waiting"),
        Stage("request", "restored"),
        Stage("request", "computing"),
        Stage("request", "parked"),
        Stage("load", "draining"),
        Stage("offload", "void"),
    }
)
"""Where something can be when the store it was for is gone."""


def can_befall(stage: Stage, mishap: Mishap, num_ranks: int = 1) -> bool:
    """Whether a mishap can strike a transaction that is there, with so many ranks.

    What befalls all at once can befall anything, and a client's own mishaps its request
    wherever that is. The store and the device strike whoever is being served by them: a
    lookup that is asked, a load and an offload from their start on, those too whose end
    is settled already, for they end when nothing moves any more. A store that is opened
    strikes whatever goes on without one.
    """
    if mishap in RANK:
        return num_ranks > 1
    if mishap in _EVERYWHERE or (mishap in _OPENING and stage in _STORELESS):
        return True
    match stage.kind, stage.word:
        case "request", word:
            return mishap in _CLIENT or (word == "looking up" and mishap in _LOOKUP)
        case "load", "running" | "shared" | "draining":
            return mishap in _LOAD
        case "offload", "running" | "void":
            return mishap in _OFFLOAD
        case _:
            return False
