"""Gates: which layers of a hit have landed, for a forward that runs meanwhile.

A load's progress is one number, the layers that have landed; a gate is open when every
load that it watches has passed it or is over. Gates never raise in a forward and they
open after ``Limits.gate_s`` whatever happens: what was computed over bytes that never
came is undone when the load ends, because its request is not ``settled`` before.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import anyio

from asyncache.core import OrderError
from asyncache.devices import Fence, Word
from asyncache.engine._queues import Queues
from asyncache.linkers import Landed


class Progress:
    """How far one load has come, layer by layer.

    Attributes:
        num_landed: Leading layers that are there.
        fences: Layers whose copies have begun, in order, and what tells their end.
        word: What streams wait for that came before the copies began; None as a rule.
        is_over: Whether nobody has to wait for it any longer.
    """

    __slots__ = ("fences", "is_over", "num_landed", "seq", "word")

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.num_landed = 0
        self.fences: list[tuple[int, Fence]] = []
        self.word: Word | None = None
        self.is_over = False

    def is_open(self, layer: int) -> bool:
        """Whether a layer may be read."""
        return self.is_over or self.num_landed > layer

    def fence(self, layer: int) -> Fence | None:
        """Return what is over once a layer has landed; None if its copies wait."""
        return next((fence for last, fence in self.fences if last >= layer), None)

    def has_begun(self, layer: int) -> bool:
        """Whether streams can wait for a layer, or need not."""
        return self.is_open(layer) or self.fence(layer) is not None

    def give_up(self) -> None:
        """Let nobody wait any longer, and no stream."""
        self.is_over = True
        self.fences.clear()
        if self.word is not None:
            self.word.release()
            self.word = None


class Board:
    """All loads of a cache and everyone who waits for their layers.

    The driver adds loads and sweeps them, wherever it lives; what changes elsewhere is
    how far they have come. Forwards wait on the event loop or in a thread.

    Args:
        gate_s: Seconds after which a gate opens whatever happens.
        queues: The way to the driver.
        give_up: Told of a load for which somebody waited that long.
        new_word: Returns a number that streams can wait for, if the device has any.
    """

    def __init__(
        self,
        gate_s: float,
        queues: Queues,
        give_up: Callable[[int], None],
        new_word: Callable[[], Word | None],
    ) -> None:
        self.gate_s = gate_s
        self.queues = queues
        self.give_up = give_up
        self.new_word = new_word
        self._loads: dict[int, Progress] = {}
        self._waiters: set[anyio.Event] = set()
        self.num_blocked = 0
        """Threads that wait at gates; they are counted before they look."""

    def progress(self, seq: int) -> Progress:
        """Return the progress of an open load, which may have yet to begin."""
        return self._loads.setdefault(seq, Progress(seq))

    def landing(self, seq: int) -> Landed:
        """Return what takes note of the layers of a load."""
        load = self.progress(seq)

        def landed(layer: int, fence: Fence | None = None, /) -> None:
            if fence is not None:
                self._begun(load, layer, fence)
            else:
                load.num_landed = layer + 1
                if load.word is not None:
                    self._raise_word(load, layer)
            # Once a layer and load, and as a rule nobody waits.
            if self._waiters or self.num_blocked:
                self._notify()

        return landed

    def _raise_word(self, load: Progress, layer: int) -> None:
        with self.queues.changed:
            if load.word is not None:
                load.word.set(layer + 1)

    def _begun(self, load: Progress, layer: int, fence: Fence) -> None:
        # A stream that comes now finds either the fence or the word that it will raise.
        with self.queues.changed:
            if load.is_over:
                return
            load.fences.append((layer, fence))
            if load.word is not None:
                fence.raise_word(load.word, layer + 1)

    def end(self, seq: int) -> None:
        """Take note that a load is over: its gates are open."""
        load = self._loads.get(seq)
        if load is not None and not load.is_over:
            with self.queues.changed:
                load.give_up()
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

    def give_up_on(self, load: Progress, layer: int) -> None:
        """Open a gate that is shut, for good: a load this late counts as failed."""
        if not load.is_open(layer):
            with self.queues.changed:
                load.give_up()
            self.give_up(load.seq)

    def watch(self, load: Progress, layer: int) -> None:
        """Give up on a load in a while, unless it has passed a layer.

        The clock is not the driver's: its thread may wait for the stream that waits.
        """
        self.queues.out(self._watch, load, layer)

    def _watch(self, load: Progress, layer: int) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # the thread of the transfers is over: no layer will come
            self.give_up_on(load, layer)
        else:
            loop.call_later(self.gate_s, self.give_up_on, load, layer)

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
        return all(load.is_open(layer) for load in self._loads)

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
        self._block(partial(self.is_open, layer))
        self._give_up(layer)

    def wait_stream(self, layer: int, stream: int) -> None:
        """Have a stream wait until a layer's pages may be read, in place of the host.

        Returns as soon as the stream knows what to wait for: at once with a device
        whose copies raise words, see :class:`CudaDevice`; else when the copies of the
        layer have begun, for which it blocks as :meth:`wait_blocking` does. Where there
        are no streams, it is that.

        Args:
            layer: The layer.
            stream: Handle of the stream that will read the pages.

        Raises:
            OrderError: As for :meth:`wait_blocking`.
            DeviceError: If the stream is none, or the device is lost.
        """
        for load in self._loads:
            if not self._hold(load, layer, stream):
                self._block(partial(load.has_begun, layer))
                if not self._hold(load, layer, stream):
                    self._board.give_up_on(load, layer)

    def _hold(self, load: Progress, layer: int, stream: int) -> bool:
        """Have a stream wait for a load; return False if it cannot yet."""
        board = self._board
        with board.queues.changed:
            if load.is_open(layer):
                return True
            fence = load.fence(layer)
            if fence is not None:
                fence.hold(stream)
                return True
            load.word = load.word or board.new_word()
            if load.word is None:
                return False
            load.word.hold(stream, layer + 1)
        board.watch(load, layer)
        return True

    def _block(self, is_over: Callable[[], bool]) -> None:
        board, until = self._board, time.monotonic() + self._board.gate_s
        with board.queues.changed:
            board.num_blocked += 1
        try:
            board.queues.block(is_over, until)
        finally:
            with board.queues.changed:
                board.num_blocked -= 1

    def _give_up(self, layer: int) -> None:
        for load in self._loads:
            self._board.give_up_on(load, layer)
