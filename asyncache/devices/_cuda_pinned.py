"""Pinned host memory: what an accelerator copies from and to by itself.

Pinning takes about a tenth of a second a gigabyte and holds locks of the driver, so it
is done in pieces, on a thread, before anything is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from asyncache.core import DeviceError
from asyncache.devices._cuda_api import Context, check, cuda
from asyncache.devices._staging import allocate
from asyncache.threads import outlast, when_over

# One call for very much memory fails whatever is free. No less than any staging needs,
# because a copy that goes on from one registration into the next is refused.
_CHUNK_BYTES = 2**36
_HOST_PAGE = 4096
_FLAGS = cuda.CU_MEMHOSTREGISTER_PORTABLE


class PinnedMemory:
    """All pinned memory of a device, and the thread that pins it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="asyncache-pin")
        self._pinned: dict[int, memoryview] = {}
        """What is pinned, by its address; kept until it no longer is."""
        self._is_closed = False

    async def allocate(self, num_bytes: int) -> memoryview:
        """Return pinned zeros, format "B".

        Raises:
            DeviceError: If there is not enough memory that can be pinned.
        """
        memory = allocate(num_bytes)
        try:
            await self._run(lambda: self._pin(memory))
        except asyncio.CancelledError:
            await self.free(memory)
            raise
        return memory

    async def free(self, memory: memoryview) -> None:
        """Unpin memory that no copy uses any more; cancelled or not, it is then."""
        address = _address(memory)
        if address in self._pinned and not self._is_closed:
            await self._run(lambda: self._unpin(address))

    def close(self, finish: Callable[[], None]) -> Future[None]:
        """Begin to unpin all; ``finish`` is called on the thread, as its last."""

        def unpin_all() -> None:
            try:
                for address in list(self._pinned):
                    self._unpin(address)
            finally:
                finish()

        self._is_closed = True
        last = self._executor.submit(unpin_all)
        self._executor.shutdown(wait=False)
        return last

    async def _run(self, job: Callable[[], None]) -> None:
        future = self._executor.submit(job)
        await outlast(when_over([future]))
        future.result()

    # On the thread.

    def _pin(self, memory: memoryview) -> None:
        address, num_bytes = _address(memory), memory.nbytes
        # The driver would touch each page under its locks.
        np.frombuffer(memory, dtype=np.uint8)[::_HOST_PAGE] = 0
        starts = range(address, address + num_bytes, _CHUNK_BYTES)
        with self._context:
            for count, start in enumerate(starts):
                size = min(_CHUNK_BYTES, address + num_bytes - start)
                try:
                    check(
                        cuda.cuMemHostRegister(start, size, _FLAGS),
                        f"{num_bytes} bytes of host memory could not be pinned",
                    )
                except DeviceError:
                    for pinned in starts[:count]:
                        cuda.cuMemHostUnregister(pinned)
                    raise
        self._pinned[address] = memory

    def _unpin(self, address: int) -> None:
        # Somebody else may have been first.
        memory = self._pinned.pop(address, None)
        if memory is None:
            return
        # It fails where the GPU is lost, and then nothing is pinned any more.
        with suppress(DeviceError), self._context:
            for start in range(address, address + memory.nbytes, _CHUNK_BYTES):
                cuda.cuMemHostUnregister(start)


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
