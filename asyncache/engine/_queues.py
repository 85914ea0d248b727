"""How the driver and the transfers reach each other: plans out, votes in.

The driver lives in the thread of the step loop, the transfers on an event loop. Nothing
else in this room knows whether that is one thread or two: it hands its calls to the
queues, which make them on the other side, in order.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVarTuple

from asyncache.core import OrderError

Ts = TypeVarTuple("Ts")


class Timer(Protocol):
    """A call that is due at some moment."""

    def cancel(self) -> None:
        """Never make it."""


class VoteBox(Protocol):
    """Where votes go: the driver, in whatever thread it lives."""

    def sink(self, seq: int, claim: int) -> None:
        """Vouch for no more than ``claim``."""

    def quiet(self, seq: int) -> None:
        """Promise not to touch the transaction's pages again."""

    def answer(self, seq: int, boundaries: list[int]) -> None:
        """Say which boundaries a lookup found restorable."""


class Queues(ABC):
    """The way between a driver and its transfers.

    Attributes:
        changed: Notified when a gate opens, and when something came in.
        awaits_in: The thread whose tasks may await gates; None if none may.
    """

    changed: threading.Condition
    awaits_in: int | None

    @abstractmethod
    def check_home(self) -> None:
        """Raise OrderError unless the driver may be called from here and now."""

    @abstractmethod
    def is_home(self) -> bool:
        """Whether this thread is the driver's."""

    @abstractmethod
    def out(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Make a call where the transfers live, in order; from any thread."""

    @abstractmethod
    def into(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Make a call where the driver lives; from where the transfers do."""

    @abstractmethod
    def soon(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Make a call in the driver's thread, later; from any thread."""

    @abstractmethod
    def wake(self, settle: Callable[[], None]) -> None:
        """Make this call in the driver's thread, soon after a vote that came there."""

    @abstractmethod
    def clock(self) -> float:
        """Return the seconds that :meth:`call_later` goes by, monotonic."""

    @abstractmethod
    def call_later(
        self, after_s: float, call: Callable[[*Ts], object], *args: *Ts
    ) -> Timer:
        """Make a call in the driver's thread, in so many seconds."""

    @abstractmethod
    def block(self, is_over: Callable[[], bool], until: float) -> None:
        """Block this thread until something holds, or a moment has come.

        Args:
            is_over: Looked at whenever ``changed`` is notified.
            until: The moment, as ``time.monotonic()`` has it.

        Raises:
            OrderError: If it could never come to hold, because this thread is blocked.
        """

    @abstractmethod
    def complain(self, message: str, error: Exception) -> None:
        """Tell of an error that is nobody's to handle."""


class OneLoop(Queues):
    """Driver and transfers on the running event loop: a call across is a call."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.awaits_in = self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()

    def check_home(self) -> None:
        with suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                return
        raise OrderError("a call from another thread or loop than the cache's")

    def is_home(self) -> bool:
        return threading.get_ident() == self._thread

    def out(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        if self.is_home():
            call(*args)
        else:
            self.soon(call, *args)

    def into(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        call(*args)

    def soon(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        with suppress(RuntimeError):  # the loop is closed, and the cache with it
            self._loop.call_soon_threadsafe(call, *args)

    def wake(self, settle: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody looks any more
            self._loop.call_soon(settle)

    def clock(self) -> float:
        return self._loop.time()

    def call_later(
        self, after_s: float, call: Callable[[*Ts], object], *args: *Ts
    ) -> Timer:
        return self._loop.call_later(after_s, call, *args)

    def block(self, is_over: Callable[[], bool], until: float) -> None:
        if self.is_home():
            raise OrderError("wait_blocking() on the event loop's thread: await wait()")
        block(self.changed, is_over, until)

    def complain(self, message: str, error: Exception) -> None:
        self._loop.call_exception_handler({"message": message, "exception": error})


class PostedVotes:
    """Votes of transfers, on their way to the driver."""

    def __init__(self, queues: Queues, votes: VoteBox) -> None:
        self._queues = queues
        self._votes = votes

    def sink(self, seq: int, claim: int) -> None:
        """Have the driver vouch for no more than ``claim``."""
        self._queues.into(self._votes.sink, seq, claim)

    def quiet(self, seq: int) -> None:
        """Have the driver promise that this rank is done."""
        self._queues.into(self._votes.quiet, seq)

    def answer(self, seq: int, boundaries: list[int]) -> None:
        """Have the driver say what a lookup found."""
        self._queues.into(self._votes.answer, seq, boundaries)


def block(
    changed: threading.Condition, is_over: Callable[[], bool], until: float
) -> None:
    """Wait until something holds, or a moment has come."""
    with changed:
        while not is_over():
            left = until - time.monotonic()
            if left <= 0:
                return
            changed.wait(min(left, threading.TIMEOUT_MAX))
