"""A simulator: virtual time, seeded order, and a world in which much goes wrong.

For your own loop's tests: :func:`run` runs a coroutine on an event loop without
threads, sockets or real time, whose order is a seed's; :class:`SimulatedDevice`,
:class:`SimulatedStore` and :class:`SimulatedNetwork` are what it may use there.

For ours: :func:`draw` makes a case of a seed, for one rank or several, and
:func:`simulate` plays it, with the laws checked after every step; :func:`shrink` makes
a case that fails a small one.
"""

from __future__ import annotations

from asyncache.testing.simulation._case import Actor, Case, Role, draw
from asyncache.testing.simulation._copies import Copies
from asyncache.testing.simulation._device import POISON, SimulatedDevice
from asyncache.testing.simulation._errors import BusyError, LawError, StuckError
from asyncache.testing.simulation._group import SimulatedGroup, SimulatedNetwork
from asyncache.testing.simulation._loop import (
    SimulatedLoop,
    run,
    torn_down_quietly,
)
from asyncache.testing.simulation._mishaps import (
    CLIENT,
    DEVICE,
    RANK,
    STORE,
    Mishap,
    Weather,
)
from asyncache.testing.simulation._plain import Setting, plain
from asyncache.testing.simulation._reach import can_befall
from asyncache.testing.simulation._shrink import shrink, way_of
from asyncache.testing.simulation._simulate import simulate
from asyncache.testing.simulation._store import Shelf, SimulatedStore
from asyncache.testing.simulation._world import Result

__all__ = [
    "CLIENT",
    "DEVICE",
    "POISON",
    "RANK",
    "STORE",
    "Actor",
    "BusyError",
    "Case",
    "Copies",
    "LawError",
    "Mishap",
    "Result",
    "Role",
    "Setting",
    "Shelf",
    "SimulatedDevice",
    "SimulatedGroup",
    "SimulatedLoop",
    "SimulatedNetwork",
    "SimulatedStore",
    "StuckError",
    "Weather",
    "can_befall",
    "draw",
    "plain",
    "run",
    "shrink",
    "simulate",
    "torn_down_quietly",
    "way_of",
]
