"""What a test does to the software driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import (
    c_bool,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_long,
    c_size_t,
    c_uint,
    c_void_p,
)
from enum import IntFlag
from typing import Protocol, SupportsInt

# How long a test waits for a copy to come to the gate before it fails.
PATIENCE_S = 10.0

SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "sc_gate_shut": (None, [c_uint]),
    "sc_gate_open": (None, [c_uint]),
    "sc_gate_pass": (c_bool, [c_uint]),
    "sc_gate_num_held": (c_int, [c_uint]),
    "sc_gate_wait": (c_int, [c_uint, c_int, c_double]),
    "sc_refuse": (c_bool, [c_char_p, c_long, c_int]),
    "sc_poison": (c_bool, [c_char_p, c_long, c_int]),
    "sc_devices": (None, [c_int]),
    "sc_driver_version": (None, [c_int]),
    "sc_pace": (None, [c_double, c_double]),
    "sc_refuse_pageable": (None, [c_int]),
    "sc_lose_wakes": (None, [c_bool]),
    "sc_lock_host_functions": (None, [c_bool]),
    "sc_declare_device": (c_int, [c_void_p, c_size_t, c_int]),
    "sc_undeclare_device": (c_int, [c_void_p]),
    "sc_event_done_ns": (c_int64, [c_void_p]),
    "sc_count": (c_long, [c_char_p]),
    "sc_reset": (None, []),
}

# What is zero once everything was given back.
LIVE = (
    "live_events",
    "live_streams",
    "live_allocations",
    "live_host_allocations",
    "registered_ranges",
    "declared_ranges",
    "retained_contexts",
)


class Tensor(Protocol):
    """What softcuda asks of a torch tensor."""

    nbytes: int

    def data_ptr(self) -> int: ...


class Direction(IntFlag):
    """What a copy connects."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    OTHER = 4
    ANY = 7


class Gate:
    """Holds copies in flight: one half of each is there, the other is not."""

    def __init__(self, library: ctypes.CDLL, directions: Direction) -> None:
        self._library = library
        self._directions = directions

    @property
    def num_held(self) -> int:
        """Copies that stand at the gate now; of each stream at most one."""
        return int(self._library.sc_gate_num_held(self._directions))

    def open(self) -> None:
        """Let everything through from now on."""
        self._library.sc_gate_open(self._directions)

    def wait_held(self, count: int = 1) -> None:
        """Return once so many copies are held.

        Raises:
            TimeoutError: If they do not come.
        """
        held = self._library.sc_gate_wait(self._directions, count, PATIENCE_S)
        if held < count:
            raise TimeoutError(f"{held} of {count} copies came to the gate")

    def let_pass(self, count: int = 1) -> None:
        """Let so many copies through, one by one, in the order in which they come.

        Raises:
            TimeoutError: If they do not come.
        """
        for _ in range(count):
            self.wait_held()
            self._library.sc_gate_pass(self._directions)


class SoftCuda:
    """The software driver, which every thread and every test of the process shares."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
        self._library = library

    @contextmanager
    def gate(self, directions: Direction = Direction.ANY) -> Iterator[Gate]:
        """Hold the copies that go in some directions, until the end of the block."""
        gate = Gate(self._library, directions)
        self._library.sc_gate_shut(directions)
        try:
            yield gate
        finally:
            gate.open()

    def refuse(self, function: str, error: int, *, nth: int = 1) -> None:
        """Have the nth call from now on return an error, and do nothing."""
        if not self._library.sc_refuse(function.encode(), nth, error):
            raise ValueError(f"there is no {function}")

    def poison(self, function: str, error: int, *, nth: int = 1) -> None:
        """Have what the nth call from now on enqueues end with an error.

        The context is dead from then on.
        """
        if not self._library.sc_poison(function.encode(), nth, error):
            raise ValueError(f"{function} enqueues nothing")

    def refuse_pageable(self, error: int) -> None:
        """Have every copy from or to memory that nobody registered return an error."""
        self._library.sc_refuse_pageable(error)

    def set_devices(self, count: int) -> None:
        """Set how many devices there are; with none, cuInit fails."""
        self._library.sc_devices(count)

    def set_driver_version(self, version: int) -> None:
        """Set the version, such as 12040, and with it what cuGetProcAddress finds.

        The bindings ask for each function once in a process, and do not notice.
        """
        self._library.sc_driver_version(version)

    def set_pace(self, *, latency_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        """Set how long a copy takes; 0 bytes per second is as fast as memory."""
        self._library.sc_pace(latency_s, bytes_per_s)

    @contextmanager
    def lost_wakes(self) -> Iterator[None]:
        """Have cuEventSynchronize not return, done or not, until the end of the block.

        cuEventQuery still tells the truth.
        """
        self._library.sc_lose_wakes(True)
        try:
            yield
        finally:
            self._library.sc_lose_wakes(False)

    @contextmanager
    def locked_host_functions(self) -> Iterator[None]:
        """Hold the driver's lock while a host function runs, as real drivers may."""
        self._library.sc_lock_host_functions(True)
        try:
            yield
        finally:
            self._library.sc_lock_host_functions(False)

    def declare(self, tensor: Tensor, *, device: int = 0) -> None:
        """Let a CPU tensor play device memory, until :meth:`undeclare`."""
        start = tensor.data_ptr()
        if self._library.sc_declare_device(start, tensor.nbytes, device):
            raise ValueError("the tensor is empty, known already, or of no device")

    def undeclare(self, tensor: Tensor) -> None:
        """Let a tensor be a CPU tensor again."""
        if self._library.sc_undeclare_device(tensor.data_ptr()):
            raise ValueError("the tensor was not declared")

    def event_done_ns(self, event: SupportsInt) -> int:
        """Return when an event last completed, on the clock of time.monotonic_ns."""
        return int(self._library.sc_event_done_ns(int(event)))

    def count(self, name: str) -> int:
        """Return how often a function was called, or a counter such as batch_items."""
        count = int(self._library.sc_count(name.encode()))
        if count < 0:
            raise ValueError(f"there is no function or counter {name}")
        return count

    def leftovers(self) -> dict[str, int]:
        """Return what was not given back: counts of what lives, where not zero."""
        counts = {name: self.count(name) for name in LIVE}
        return {name: count for name, count in counts.items() if count}

    def reset(self) -> None:
        """Make everything as before the first call, whatever is in flight."""
        self._library.sc_reset()
