"""Copies, given to a CUDA stream: many pieces by one call of the driver.

``cuMemcpyBatchAsync`` is called at its address, because its Python binding makes an
object of each address. A refused call may have begun some of its pieces: whoever gets a
code other than success has to wait for the stream all the same.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from asyncache.devices._cuda_api import SHARED_STREAMS, SUCCESS, check, code_of, cuda
from asyncache.devices._pieces import Ints

# What has cuMemcpyBatchAsync, and what no longer returns where it stopped.
_WITH_BATCH = 12080
_WITHOUT_FAIL_INDEX = 13000

_POINTER = ctypes.c_void_p


class Copies:
    """Gives copies to streams. The context is current at each call."""

    def __init__(self) -> None:
        version = check(cuda.cuDriverGetVersion(), "the driver has no version")
        self._enqueue = _batch_call(version)
        orders = cuda.CUmemcpySrcAccessOrder
        self._in_order = _Attributes(int(orders.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM))
        self._at_once = _Attributes(int(orders.CU_MEMCPY_SRC_ACCESS_ORDER_ANY))

    def give(
        self,
        targets: Ints,
        sources: Ints,
        num_bytes: Ints,
        stream: int,
        *,
        are_final: bool,
    ) -> int:
        """Give copies to a stream; return the driver's code.

        Args:
            targets: Addresses, shape [num_pieces].
            sources: Addresses, shape [num_pieces].
            num_bytes: Shape [num_pieces].
            stream: Handle of the stream.
            are_final: Whether the sources hold by now what is to be copied, so that
                they may be read before the stream comes to it.
        """
        if not len(num_bytes):
            return SUCCESS
        if self._enqueue is None or stream in SHARED_STREAMS:
            return _one_by_one(targets, sources, num_bytes, stream)
        attributes = self._at_once if are_final else self._in_order
        return self._enqueue(targets, sources, num_bytes, attributes.address, stream)


def _one_by_one(targets: Ints, sources: Ints, num_bytes: Ints, stream: int) -> int:
    rows = zip(targets.tolist(), sources.tolist(), num_bytes.tolist(), strict=True)
    for target, source, size in rows:
        code = code_of(cuda.cuMemcpyAsync(target, source, size, stream))
        if code != SUCCESS:
            return code
    return SUCCESS


class _Attributes:
    """What a batch of copies says of them all."""

    def __init__(self, source_order: int) -> None:
        self._attributes = cuda.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder(source_order)
        self._attributes.flags = int(
            cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
        )
        self.address = int(self._attributes.getPtr())


class _BatchCall:
    """``cuMemcpyBatchAsync`` at its address."""

    def __init__(self, address: int, *, has_fail_index: bool) -> None:
        # Targets, sources, sizes, count, attributes, the first piece of each, how many.
        kinds: list[Any] = [_POINTER] * 3 + [ctypes.c_size_t, _POINTER, _POINTER]
        kinds += [ctypes.c_size_t] + [_POINTER] * (2 if has_fail_index else 1)
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(address)
        self._first = np.zeros(1, dtype=np.uint64)
        self._failed = np.zeros(1, dtype=np.uint64)
        failed = [self._failed.ctypes.data] if has_fail_index else []
        self._middle = [self._first.ctypes.data, 1, *failed]

    def __call__(
        self,
        targets: Ints,
        sources: Ints,
        num_bytes: Ints,
        attributes: int,
        stream: int,
    ) -> int:
        columns = [column.ctypes.data for column in (targets, sources, num_bytes)]
        code = self._function(
            *columns, len(num_bytes), attributes, *self._middle, stream
        )
        return int(code)


def _batch_call(version: int) -> _BatchCall | None:
    """Return a call of ``cuMemcpyBatchAsync``; None if the driver has none."""
    if version < _WITH_BATCH:
        return None
    has_fail_index = version < _WITHOUT_FAIL_INDEX
    asked = _WITH_BATCH if has_fail_index else _WITHOUT_FAIL_INDEX
    code, address, _ = cuda.cuGetProcAddress(b"cuMemcpyBatchAsync", asked, 0)
    if code != SUCCESS or not address:
        return None
    return _BatchCall(address, has_fail_index=has_fail_index)
