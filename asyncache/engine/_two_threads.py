"""The two queues between a step loop's thread and the thread of its transfers.

What comes in waits until the owner takes a *turn*: in a call that waits, or in a step.
Between two of those nothing changes but by the owner's own calls, as between two
awaits on an event loop.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TypeVarTuple

from asyncache.core import OrderError
from asyncache.engine._alarms import Alarms
from asyncache.engine._driver import Driver
from asyncache.engine._loop_thread import LoopThread
from asyncache.engine._queues import Queues, Timer, block

Ts = TypeVarTuple("Ts")
_LOG = logging.getLogger("asyncache")


class TwoThreads(Queues):
    """The driver in the thread that makes this, the transfers in one of their own."""

    clock = staticmethod(time.monotonic)

    def __init__(self) -> None:
        # Its lock is reentrant, as it has to be: the garbage collector may run, and end
        # a request that was lost, while this thread holds it.
        self.changed = threading.Condition()
        self.awaits_in = None
        self._home = _here()
        self._inbox: deque[Callable[[], object]] = deque()
        self._alarms = Alarms()
        self._driver: Driver | None = None
        self._thread: LoopThread | None = None
        self._is_turning = False
        self.num_in = 0
        """What has come in so far and was taken note of, alarms included."""

    def serve(self, driver: Driver) -> None:
        """Apply the votes of this driver in each turn."""
        self._driver = driver

    def new_thread(
        self,
        work: Callable[[], Coroutine[object, object, None]],
        stop: Callable[[], None],
    ) -> LoopThread:
        """Return the thread in which transfers live; what goes out goes there."""
        self._thread = LoopThread(work, stop=stop, changed=self.changed)
        return self._thread

    def check_home(self) -> None:
        if not self.is_home():
            raise OrderError("a call from another thread or process than the cache's")

    def is_home(self) -> bool:
        return self._home == _here()

    def out(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        assert self._thread is not None
        self._thread.call(functools.partial(call, *args))

    def into(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        if self.is_home():
            # The thread is over, and what it would have done is done here: as on one
            # loop, a call across is a call.
            call(*args)
        else:
            self.soon(call, *args)

    def soon(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        self._inbox.append(functools.partial(call, *args))
        self.notify()

    def notify(self) -> None:
        """Have everyone who waits look again."""
        with self.changed:
            self.changed.notify_all()

    def wake(self, settle: Callable[[], None]) -> None:
        """Do nothing: all that votes here settles afterwards, and so does a turn."""

    def call_later(
        self, after_s: float, call: Callable[[*Ts], object], *args: *Ts
    ) -> Timer:
        return self._alarms.set(after_s, functools.partial(call, *args))

    def block(self, is_over: Callable[[], bool], until: float) -> None:
        if self.is_home() and not self._is_busy():
            self.wait(is_over, until)
        else:
            block(self.changed, is_over, until)

    def complain(self, message: str, error: Exception) -> None:
        # There is no loop here whose handler could be told.
        _LOG.error(message, exc_info=error)

    # The owner's turns.

    def check_may_wait(self) -> None:
        """Raise OrderError where no turn can be taken: nothing would ever come."""
        self.check_home()
        if self._is_busy():
            raise OrderError("a call that waits, from within the cache")

    def wait(self, is_over: Callable[[], bool], until: float) -> bool:
        """Take turns until something holds or a moment has come; True if it holds.

        Raises:
            OrderError: If called elsewhere, or by an observer.
        """
        self.check_may_wait()
        while True:
            self.turn()
            with self.changed:
                if is_over():
                    return True
                if self._inbox:
                    continue
                now = time.monotonic()
                if now >= until:
                    return False
                left = min(until, self._alarms.due) - now
                self.changed.wait(max(0.0, min(left, threading.TIMEOUT_MAX)))

    def turn(self) -> None:
        """Take note of all that has come in, and apply it."""
        self._is_turning = True
        try:
            self.num_in += self._alarms.ring()
            while self._inbox:
                self._inbox.popleft()()
                self.num_in += 1
            if self._thread is not None and self._thread.is_over:
                self._thread.flush()
            assert self._driver is not None
            self._driver.settle()
        finally:
            self._is_turning = False

    def _is_busy(self) -> bool:
        assert self._driver is not None
        return self._is_turning or self._driver.is_busy


def _here() -> tuple[int, int]:
    # A fork has the thread that forked, under its old number, and none of the others.
    return os.getpid(), threading.get_ident()
