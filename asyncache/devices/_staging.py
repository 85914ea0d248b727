"""Host memory that pages pass through on their way to an accelerator."""

from __future__ import annotations

import mmap

from asyncache.core import DeviceError


def allocate(num_bytes: int) -> memoryview:
    """Return zeros in whole pages of memory, format "B", which nobody has touched yet.

    Raises:
        ValueError: If it is not a positive number.
        DeviceError: If there is not enough memory.
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes must be at least 1, not {num_bytes}")
    try:
        return memoryview(mmap.mmap(-1, num_bytes))
    except (OSError, OverflowError) as error:
        raise DeviceError(f"no {num_bytes} bytes of host memory: {error}") from error
