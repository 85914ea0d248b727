"""Host buffers between a store and a device, as many as there are turns for."""

from __future__ import annotations

from asyncache.devices import Device

# What direct I/O asks for, and what keeps two buffers out of one page of memory.
_ALIGNMENT = 4096


class Staging:
    """Buffers that are lent one batch at a time; whose turn it is finds one.

    Args:
        device: Whose copies go through the buffers; it makes them.
        num_buffers: Buffers.
        num_bytes: Bytes of each.
    """

    def __init__(self, device: Device, num_buffers: int, num_bytes: int) -> None:
        self._device = device
        self._num_buffers = num_buffers
        self._num_bytes = num_bytes
        self._memory: memoryview | None = None
        self._free: list[memoryview] = []

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

    def take(self) -> memoryview:
        """Lend a buffer, format "B", until :meth:`give`."""
        return self._free.pop()

    def give(self, buffer: memoryview) -> None:
        """Take a buffer back that nothing touches any more."""
        self._free.append(buffer)
