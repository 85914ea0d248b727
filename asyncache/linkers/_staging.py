"""A bounded number of host buffers between a store and a device."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio


class Staging:
    """Buffers that are lent one transfer at a time; who finds none waits.

    Where there are two or more, offloads leave one to loads: a store that takes its
    time to write must not keep anyone from reading.

    Args:
        num_buffers: Buffers, made when first needed.
        num_bytes: Bytes of each.
    """

    def __init__(self, num_buffers: int, num_bytes: int) -> None:
        if num_buffers < 1:
            raise ValueError(f"num_staging must be at least 1, not {num_buffers}")
        self._free: list[memoryview] = []
        self._num_bytes = num_bytes
        self._room = anyio.Semaphore(num_buffers)
        self._offload_room = anyio.Semaphore(max(1, num_buffers - 1))

    @asynccontextmanager
    async def borrow_for_offload(self) -> AsyncIterator[memoryview]:
        """Lend a buffer to an offload, until the block is left."""
        async with self._offload_room, self.borrow() as buffer:
            yield buffer

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[memoryview]:
        """Lend a buffer, format "B", until the block is left."""
        async with self._room:
            buffer = self._free.pop() if self._free else self._make()
            try:
                yield buffer
            finally:
                self._free.append(buffer)

    def _make(self) -> memoryview:
        return memoryview(bytearray(self._num_bytes))
