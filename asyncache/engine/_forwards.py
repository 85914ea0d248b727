"""How forwards finish: when their streams have run them, if they ever do.

A forward is over where its block is left, on host memory, or when the stream has run
what it was given in the block, on an accelerator. Until then nobody gets a page that it
may touch, and nothing that it writes is read.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncache.devices import Device
from asyncache.engine._driver import Driver
from asyncache.engine._late import Late
from asyncache.engine._observe import Event, Overdue
from asyncache.engine._queues import Queues


class Forwards:
    """The forwards of a cache that were left, and may run on.

    Args:
        device: Knows when a stream is done.
        driver: Told of each that has finished.
        queues: The way into the driver's thread.
        tell: Takes an event.
        overdue_s: Seconds after which one that still runs is told of.
    """

    def __init__(
        self,
        device: Device,
        driver: Driver,
        queues: Queues,
        tell: Callable[[Event], None],
        overdue_s: float,
    ) -> None:
        self._device = device
        self._driver = driver
        self._queues = queues
        self._late = Late(overdue_s, queues.clock, queues.call_later, tell)
        self._is_closed = False

    def leave(self, number: int, stream: int | None) -> None:
        """Finish a forward as soon as its stream has run all that it was given."""
        is_over = False

        def done() -> None:
            nonlocal is_over
            if not self._queues.is_home():
                self._queues.soon(done)
                return
            is_over = True
            self._late.end(number)
            self._driver.finish_bracket(number)
            self._driver.settle()

        self._device.when_done(stream, done)
        if not is_over and not self._is_closed:
            self._late.begin(number, Overdue(None, 0))

    def close(self) -> None:
        """Tell of none any more."""
        self._is_closed = True
        self._late.close()
