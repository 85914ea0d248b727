"""A gate: where calls of a fake wait until the test lets them on.

Order in a test comes from gates, never from sleeping: wait until a call has arrived,
look at the state while it is held, open the gate.
"""

from __future__ import annotations

import anyio


class Gate:
    """A place where calls wait until the test opens it.

    Args:
        is_open: Whether calls pass before the first :meth:`close`.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._opened = anyio.Event()
        self._arrival = anyio.Event()
        self._num_arrived = 0
        self._num_waiting = 0
        if is_open:
            self.open()

    def __repr__(self) -> str:
        """Show whether the gate is open and who waits."""
        state = "open" if self.is_open else "closed"
        return f"<Gate {state}, {self._num_arrived} arrived, {self._num_waiting} wait>"

    @property
    def is_open(self) -> bool:
        """Whether a call that arrives now passes."""
        return self._opened.is_set()

    @property
    def num_arrived(self) -> int:
        """Calls that ever arrived, those that passed or were cancelled included."""
        return self._num_arrived

    @property
    def num_waiting(self) -> int:
        """Calls that are held now."""
        return self._num_waiting

    def open(self) -> None:
        """Let the calls that wait, and all later ones, pass."""
        self._opened.set()

    def close(self) -> None:
        """Hold the calls that arrive from now on.

        ``open()`` and then ``close()`` lets exactly those pass that waited.
        """
        if self.is_open:
            self._opened = anyio.Event()

    async def pass_through(self) -> None:
        """Arrive, and wait until the gate is open; called by the fake."""
        self._num_arrived += 1
        arrival, self._arrival = self._arrival, anyio.Event()
        arrival.set()
        self._num_waiting += 1
        try:
            await self._opened.wait()
        finally:
            self._num_waiting -= 1

    async def wait_arrived(self, count: int = 1) -> None:
        """Wait until ``count`` calls have arrived since the gate was made."""
        while self._num_arrived < count:
            await self._arrival.wait()
