"""A request as one rank serves it."""

from __future__ import annotations

import anyio

from asyncache.engine import Request
from asyncache.testing.simulation._client import Client
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._turns import Script

_MOST_OPEN = 6
"""Steps that a request whose scope has ended may stay open, unless its commit waits."""


class Place:
    """A request that is being served.

    Args:
        request: Which.
        number: Of the actor whose it is.
        client: Who makes its calls.
        script: Which calls, turn by turn.
    """

    def __init__(
        self, request: Request, number: int, client: Client, script: Script
    ) -> None:
        self.request = request
        self.number = number
        self.client = client
        self.script = script
        self.is_over = False
        """Whether it has been served, or will not be."""
        self._news = anyio.Event()
        self._num_open = 0

    def end(self) -> None:
        """Let whoever waits for it hear that no more will come."""
        self.is_over = True
        self.script.close()
        self.tell()

    def tell(self) -> None:
        """Let whoever waits for it hear that there is more of it."""
        self._news.set()

    async def more(self) -> None:
        """Wait for more."""
        self._news = anyio.Event()
        await self._news.wait()

    def check_ends(self) -> None:
        """Raise LawError if its scope has ended for long; to be called each step."""
        state = self.request._state  # noqa: SLF001 - the simulator looks inside
        if state is None or state.want > state.shared:
            return
        self._num_open += 1
        if self._num_open > _MOST_OPEN:
            raise LawError(f"{self.request} has ended {self._num_open} steps ago")
