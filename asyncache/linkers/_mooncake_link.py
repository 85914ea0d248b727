"""One client of Mooncake, and the memory that it reads and writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock

from asyncache.core import StoreError
from asyncache.devices import Span
from asyncache.linkers._mooncake_client import (
    Client,
    MooncakeSetup,
    check_installed,
    connect,
    is_there,
)

# Between two tries to reach a master that is not there.
_RETRY_S = 1.0


class Link:
    """Has a client that knows our memory, as soon as there is a master.

    Its methods block, and may be called on any thread.

    Args:
        source: What a client is set up with; or one that is, which stays the caller's.
        memory: What it is to read and write.

    Raises:
        ImportError: If Mooncake is not installed.
    """

    def __init__(self, source: MooncakeSetup | Client, memory: Sequence[Span]) -> None:
        self._source = source
        self._memory: Sequence[Span] = memory
        self._client: Client | None = None
        self._lock = Lock()
        self._is_closed = False
        self._retry_at = 0.0
        if self.is_ours:
            check_installed()

    @property
    def client(self) -> Client | None:
        """The client, if there is one by now."""
        return self._client

    @property
    def is_ours(self) -> bool:
        """Whether the client is closed with this, and nobody else has it."""
        return isinstance(self._source, MooncakeSetup)

    def reach(self) -> Client | None:
        """Return the client; without one, see whether there may be one now.

        Raises:
            StoreError: If it cannot be set up, or does not take our memory.
        """
        if self._client is None and time.monotonic() >= self._retry_at:
            with self._lock:
                try:
                    self._open()
                finally:
                    self._retry_at = time.monotonic() + _RETRY_S
        return self._client

    def close(self) -> None:
        """Let go of client and memory, which no call uses any more."""
        with self._lock:
            self._is_closed = True
            client, self._client = self._client, None
            if client is not None:
                self._release(client, self._memory)
            self._memory = ()

    def _open(self) -> None:
        if self._client is not None or self._is_closed:
            return
        source = self._source
        if not isinstance(source, MooncakeSetup):
            client = source
        elif is_there(source):
            client = connect(source)
        else:
            return
        for index, span in enumerate(self._memory):
            code = client.register_buffer(span.address, span.num_bytes)
            if code != 0:
                self._release(client, self._memory[:index])
                raise StoreError(
                    f"Mooncake does not take {span.num_bytes} bytes of pages at "
                    f"{span.address:#x}: code {code}; are they registered already?"
                )
        self._client = client

    def _release(self, client: Client, memory: Sequence[Span]) -> None:
        for span in memory:
            client.unregister_buffer(span.address)
        if self.is_ours:
            client.close()
