"""What a test does to the software driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import (
    POINTER,
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
from typing import ClassVar, Protocol, SupportsInt

# How long a test waits for what must come before it fails.
PATIENCE_S = 10.0
MAX_DEVICES = 8  # as in softcuda.h


class Knobs(ctypes.Structure):
    """What a test sets, as in softcuda.h."""

    _fields_: ClassVar = [
        ("num_devices", c_int),
        ("driver_version", c_int),
        ("pageable_error", c_int),
        ("loses_wakes", c_int),
        ("locks_host_functions", c_int),
        ("latency_s", c_double),
        ("bytes_per_s", c_double),
    ]


class Counts(ctypes.Structure):
    """What a test reads, as in softcuda.h."""

    # Zero once everything was given back.
    LIVE = (
        "retained_contexts",
        "live_events",
        "live_streams",
        "live_allocations",
        "live_host_allocations",
        "registered_ranges",
        "declared_ranges",
    )
    SUMS = (
        "copies",
        "batch_items",
        "pageable",
        "host_functions_run",
        "host_functions_skipped",
    )
    _fields_: ClassVar = [(name, c_long) for name in LIVE + SUMS]


SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "sc_gate_shut": (None, [c_uint]),
    "sc_gate_open": (None, [c_uint]),
    "sc_gate_pass": (c_bool, [c_uint]),
    "sc_gate_num_held": (c_int, [c_uint]),
    "sc_gate_wait": (c_int, [c_uint, c_int, c_double]),
    "sc_refuse": (c_bool, [c_char_p, c_long, c_int]),
    "sc_poison": (c_bool, [c_char_p, c_long, c_int]),
    "sc_get_knobs": (None, [POINTER(Knobs)]),
    "sc_set_knobs": (None, [POINTER(Knobs)]),
    "sc_get_counts": (None, [POINTER(Counts)]),
    "sc_num_calls": (c_long, [c_char_p]),
    "sc_wait_calls": (c_long, [c_char_p, c_long, c_double]),
    "sc_declare": (c_bool, [c_void_p, c_size_t, c_int]),
    "sc_undeclare": (c_bool, [c_void_p]),
    "sc_event_done_ns": (c_int64, [c_void_p]),
    "sc_reset": (None, []),
}


class Tensor(Protocol):
    """What softcuda asks of a torch tensor."""

    @property
    def nbytes(self) -> int: ...

    def data_ptr(self) -> int: ...


class Direction(IntFlag):
    """What a copy connects."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    OTHER = 4
    ANY = 7


class Gate:
    """Holds copies in flight: one half of each has landed, the other has not.

    A batch is one copy. A stream carries out one copy after the other, so it has at
    most one at the gate.
    """

    def __init__(self, library: ctypes.CDLL, directions: Direction) -> None:
        self._library = library
        self._directions = directions

    @property
    def num_held(self) -> int:
        """Copies that stand at the gate now."""
        return int(self._library.sc_gate_num_held(self._directions))

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

    def open(self) -> None:
        """Let everything through from now on."""
        self._library.sc_gate_open(self._directions)


class SoftCuda:
    """The software driver. All of a process share it: each test resets it."""

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
        """Have what the nth call from now on enqueues fail with an error.

        The context is dead from then on.
        """
        if not self._library.sc_poison(function.encode(), nth, error):
            raise ValueError(f"{function} enqueues nothing")

    def refuse_pageable(self, error: int) -> None:
        """Have each copy from or to memory that is not registered return an error."""
        self._set(pageable_error=error)

    def set_devices(self, count: int) -> None:
        """Set how many devices there are; with none, cuInit fails.

        Raises:
            ValueError: If there are more than softcuda has room for.
        """
        if not 0 <= count <= MAX_DEVICES:
            raise ValueError(f"count must be in [0, {MAX_DEVICES}], not {count}")
        self._set(num_devices=count)

    def set_driver_version(self, version: int) -> None:
        """Set the version, such as 12040, and with it what cuGetProcAddress finds.

        The bindings look each function up once in a process, and will not notice.
        """
        self._set(driver_version=version)

    def set_pace(self, *, latency_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        """Set how long copies take; at 0 bytes a second they are as fast as memory."""
        self._set(latency_s=latency_s, bytes_per_s=bytes_per_s)

    @contextmanager
    def lost_wakes(self) -> Iterator[None]:
        """Have cuEventSynchronize not return until the end of the block.

        cuEventQuery still tells the truth.
        """
        self._set(loses_wakes=True)
        try:
            yield
        finally:
            self._set(loses_wakes=False)

    @contextmanager
    def locked_host_functions(self) -> Iterator[None]:
        """Keep the driver locked while a host function runs, as real drivers may."""
        self._set(locks_host_functions=True)
        try:
            yield
        finally:
            self._set(locks_host_functions=False)

    def declare(self, tensor: Tensor, *, device: int = 0) -> None:
        """Let a CPU tensor play device memory."""
        pointer = tensor.data_ptr()
        if not self._library.sc_declare(pointer, tensor.nbytes, device):
            raise ValueError("there is no such device, or the tensor's memory is known")

    def undeclare(self, tensor: Tensor) -> None:
        """Let a tensor be a CPU tensor again."""
        if not self._library.sc_undeclare(tensor.data_ptr()):
            raise ValueError("the tensor was not declared")

    def event_done_ns(self, event: SupportsInt) -> int:
        """Return when an event was done, on the clock of time.monotonic_ns."""
        return int(self._library.sc_event_done_ns(int(event)))

    def count(self, name: str) -> int:
        """Return how often a function was called, or one of :class:`Counts`."""
        if name in Counts.LIVE + Counts.SUMS:
            return int(getattr(self._counts(), name))
        num_calls = int(self._library.sc_num_calls(name.encode()))
        if num_calls < 0:
            raise ValueError(f"there is no {name}")
        return num_calls

    def wait_calls(self, function: str, count: int = 1) -> None:
        """Return once a function was called so often, as :meth:`count` says.

        Raises:
            TimeoutError: If it is not.
        """
        calls = self._library.sc_wait_calls(function.encode(), count, PATIENCE_S)
        if calls < count:
            raise TimeoutError(f"{calls} of {count} calls of {function}")

    def leftovers(self) -> dict[str, int]:
        """Return what was not given back: counts of what lives, where not zero."""
        counts = self._counts()
        live = {name: int(getattr(counts, name)) for name in Counts.LIVE}
        return {name: count for name, count in live.items() if count}

    def reset(self) -> None:
        """Make everything as it was before the first call, whatever is in flight."""
        self._library.sc_reset()

    def _set(self, **wanted: float) -> None:
        knobs = Knobs()
        self._library.sc_get_knobs(knobs)
        for name, value in wanted.items():
            setattr(knobs, name, value)
        self._library.sc_set_knobs(knobs)

    def _counts(self) -> Counts:
        counts = Counts()
        self._library.sc_get_counts(counts)
        return counts
