"""A bounded number of host buffers between a store and a device."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from asyncache.devices import Device

# What direct I/O asks for, and what keeps two buffers out of one page of memory.
_ALIGNMENT = 4096


class Staging:
    """Buffers that are lent one batch at a time; who finds none waits.

    Where there are two or more, offloads leave one to loads: a store that takes its
    time to write must not keep anyone from reading.

    Args:
        device: Whose copies go through the buffers; it makes them.
        num_buffers: Buffers.
        num_bytes: Bytes of each.
    """

    def __init__(self, device: Device, num_buffers: int, num_bytes: int) -> None:
        if num_buffers < 1:
            raise ValueError(f"num_staging must be at least 1, not {num_buffers}")
        self._device = device
        self._num_buffers = num_buffers
        self._num_bytes = num_bytes
        self._memory: memoryview | None = None
        self._free: list[memoryview] = []
        self._room = anyio.Semaphore(num_buffers)
        self._offload_room = anyio.Semaphore(max(1, num_buffers - 1))

    async def open(self) -> None:
        """Make the buffers, all at once: pinning memory is too slow for later.

        Opening twice is harmless.

        Raises:
            DeviceError: If there is not enough memory.
        """
        if self._memory is not None:
            return
        stride = -(-self._num_bytes // _ALIGNMENT) * _ALIGNMENT
        memory = await self._device.allocate_staging(self._num_buffers * stride)
        starts = range(0, self._num_buffers * stride, stride)
        self._free = [memory[start : start + self._num_bytes] for start in starts]
        self._memory = memory

    async def aclose(self) -> None:
        """Give the buffers back; nobody has one any more."""
        memory, self._memory, self._free = self._memory, None, []
        if memory is not None:
            await self._device.free_staging(memory)

    async def take(self) -> memoryview:
        """Lend a buffer, format "B", until :meth:`give`."""
        await self._room.acquire()
        return self._free.pop()

    def give(self, buffer: memoryview) -> None:
        """Take a buffer back that nothing touches any more."""
        self._free.append(buffer)
        self._room.release()

    @asynccontextmanager
    async def borrow_for_offload(self) -> AsyncIterator[memoryview]:
        """Lend a buffer to an offload, until the block is left."""
        async with self._offload_room:
            buffer = await self.take()
            try:
                yield buffer
            finally:
                self.give(buffer)
