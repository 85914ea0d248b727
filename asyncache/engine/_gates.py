"""Gates: which layers of a hit have landed, for a forward that runs meanwhile.

A load's progress is one number, the layers that have landed; a gate is open when every
load that it watches has passed it or is over. Gates never raise in a forward and they
open after ``Limits.gate_s`` whatever happens: what was computed over bytes that never
came is undone when the load ends, because its request is not ``settled`` before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

from asyncache.core import OrderError
from asyncache.engine._queues import Queues


class Progress:
    """How far one load has come, layer by layer."""

    __slots__ = ("is_over", "num_landed", "seq")

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.num_landed = 0
        self.is_over = False


class Board:
    """All loads of a cache and everyone who waits for their layers.

    The driver adds loads and sweeps them, wherever it lives; what changes elsewhere is
    how far they have come. Forwards wait on the event loop or in a thread.
    """

    def __init__(
        self, gate_s: float, queues: Queues, give_up: Callable[[int], None]
    ) -> None:
        self.gate_s = gate_s
        self.queues = queues
        self.give_up = give_up
        self._loads: dict[int, Progress] = {}
        self._waiters: set[anyio.Event] = set()
        self.num_blocked = 0
        """Threads that wait at gates; they are counted before they look."""

    def progress(self, seq: int) -> Progress:
        """Return the progress of an open load, which may have yet to begin."""
        return self._loads.setdefault(seq, Progress(seq))

    def landing(self, seq: int) -> Callable[[int], None]:
        """Return what takes note that a layer of a load has landed, and all before."""
        load = self.progress(seq)

        def landed(layer: int) -> None:
            load.num_landed = layer + 1
            # Once a layer and load, and as a rule nobody waits.
            if self._waiters or self.num_blocked:
                self._notify()

        return landed

    def end(self, seq: int) -> None:
        """Take note that a load is over: its gates are open."""
        load = self._loads.get(seq)
        if load is not None and not load.is_over:
            load.is_over = True
            self._notify()

    def sweep(self, is_open: Callable[[int], bool]) -> None:
        """Forget the loads that have ended; until then, new requests may join them."""
        for seq in [seq for seq in self._loads if not is_open(seq)]:
            self.end(seq)
            del self._loads[seq]

    def add_waiter(self, event: anyio.Event) -> None:
        """Set an event at the next change."""
        self._waiters.add(event)

    def drop_waiter(self, event: anyio.Event) -> None:
        """Forget an event."""
        self._waiters.discard(event)

    def _notify(self) -> None:
        changed = self.queues.changed
        with changed:
            changed.notify_all()
        waiters, self._waiters = self._waiters, set()
        for event in waiters:
            event.set()


@dataclass(frozen=True, slots=True)
class LoadBatch:
    """Loads that were launched together.

    Args:
        num_loads: How many they are; 0 if none waited.
        gates: The gates of their layers, as one.
    """

    num_loads: int
    gates: Gates


class Gates:
    """The layers of some requests' hits: wait for one before reading its pages."""

    def __init__(self, board: Board, loads: Sequence[Progress]) -> None:
        self._board = board
        self._loads = list(loads)

    def __repr__(self) -> str:
        """Show how far the slowest load has come."""
        return f"<Gates {self.num_open} layers of {len(self._loads)} loads>"

    @property
    def num_open(self) -> float:
        """Leading layers whose gates are open; infinity once all loads are over."""
        running = [load.num_landed for load in self._loads if not load.is_over]
        return min(running, default=float("inf"))

    def is_open(self, layer: int) -> bool:
        """Whether a layer's pages may be read."""
        return all(load.is_over or load.num_landed > layer for load in self._loads)

    async def wait(self, layer: int) -> None:
        """Wait until a layer's pages may be read, at most ``Limits.gate_s`` seconds.

        Raises:
            OrderError: If the gate is shut, and this is not the cache's event loop.
        """
        if self.is_open(layer):
            return
        if threading.get_ident() != self._board.queues.awaits_in:
            raise OrderError("wait() off the cache's event loop: wait_blocking()")
        with anyio.move_on_after(self._board.gate_s):
            while not self.is_open(layer):
                event = anyio.Event()
                self._board.add_waiter(event)
                try:
                    await event.wait()
                finally:
                    self._board.drop_waiter(event)
        self._give_up(layer)

    def wait_blocking(self, layer: int) -> None:
        """Do as :meth:`wait`, in the thread that runs the forward.

        A load that has yet to begin needs the cache's loop, or the thread that owns a
        :class:`BlockingCache`: neither may be blocked by waiting for this one.

        Raises:
            OrderError: If called on the event loop's thread and the gate is shut: the
                load could never end.
        """
        if self.is_open(layer):
            return
        board, until = self._board, time.monotonic() + self._board.gate_s
        with board.queues.changed:
            board.num_blocked += 1
        try:
            board.queues.block(lambda: self.is_open(layer), until)
        finally:
            with board.queues.changed:
                board.num_blocked -= 1
        self._give_up(layer)

    def _give_up(self, layer: int) -> None:
        """Open the gate for good: a load that is this late counts as failed."""
        for load in self._loads:
            if not load.is_over and load.num_landed <= layer:
                load.is_over = True
                self._board.give_up(load.seq)
