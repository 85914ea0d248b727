"""Fakes, faults and conformance kits: what tests of and on asyncache are made of."""

from __future__ import annotations

from asyncache.testing._check_device import check_device
from asyncache.testing._check_group import check_group
from asyncache.testing._check_store import check_store
from asyncache.testing._faulty import Fault, FaultyStore
from asyncache.testing._gate import Gate
from asyncache.testing._gate_device import GateDevice
from asyncache.testing._gates import GateStore
from asyncache.testing._leftovers import leftovers
from asyncache.testing._nth import (
    CancelStyle,
    FailPoint,
    InjectedError,
    cancel_nth,
    fail_nth,
)

__all__ = [
    "CancelStyle",
    "FailPoint",
    "Fault",
    "FaultyStore",
    "Gate",
    "GateDevice",
    "GateStore",
    "InjectedError",
    "cancel_nth",
    "check_device",
    "check_group",
    "check_store",
    "fail_nth",
    "leftovers",
]
