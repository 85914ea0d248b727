"""Numbers that streams wait for: a copy stream raises them, or the host does.

A word lies in pinned host memory. It only rises, also from one user to the next, and
streams compare it cyclically: what waits for a user's number is let go for good when
that user gives the word back, which raises it beyond all of them.
"""

from __future__ import annotations

import ctypes
from collections import deque
from contextlib import suppress

import numpy as np

from asyncache.core import ClosedError, DeviceError
from asyncache.devices._cuda_api import SUCCESS, Context, check, code_of, cuda
from asyncache.devices._cuda_lane import Lane

NUM_WORDS = 1024
# More than any model has layers: what one user may raise a word by.
_REACH = 1 << 16
_SPAN = 1 << 32
_AT_LEAST = int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
_WITH_FENCE = int(cuda.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
_FLAGS = cuda.CU_MEMHOSTALLOC_PORTABLE | cuda.CU_MEMHOSTALLOC_DEVICEMAP


class Words:
    """All words of a device.

    Args:
        context: Of the device; current while this is made and closed.
        lane: Where the copies are marked that raise words.
        stream: The stream of those copies.
    """

    def __init__(self, context: Context, lane: Lane, stream: int) -> None:
        num_bytes = NUM_WORDS * 4
        self._context = context
        self._lane = lane
        self._stream = stream
        self._is_closed = False
        self._memory = check(
            cuda.cuMemHostAlloc(num_bytes, _FLAGS), "no pinned memory for words"
        )
        try:
            self._address = check(
                cuda.cuMemHostGetDevicePointer(self._memory, 0), "no mapped memory"
            )
        except DeviceError:
            cuda.cuMemFreeHost(self._memory)
            raise
        memory = (ctypes.c_ubyte * num_bytes).from_address(self._memory)
        self._values = np.frombuffer(memoryview(memory).cast("B"), dtype=np.uint32)
        self._values[:] = 0
        self._free = deque((index, 0) for index in range(NUM_WORDS))
        """Words that nobody has, and what they hold."""

    def take(self) -> CudaWord | None:
        """Return a word; None if all are taken."""
        try:
            index, base = self._free.popleft()
        except IndexError:
            return None
        return CudaWord(self, index, base)

    def close(self) -> None:
        """Give the memory back; no stream has anything to do any more."""
        self._is_closed = True
        cuda.cuMemFreeHost(self._memory)

    @property
    def is_there(self) -> bool:
        """Whether there is memory to write to: not after the close, or a fork."""
        return not self._is_closed and self._context.is_of_this_process

    def wait(self, index: int, value: int, stream: int) -> None:
        """Make a stream wait for a word."""
        self._check_there()
        with self._context:
            self._check(
                cuda.cuStreamWaitValue32(stream, self._at(index), value, _AT_LEAST),
                stream,
            )

    def write(self, index: int, value: int) -> None:
        """Have the copy stream raise a word."""
        self._check_there()
        with self._context:
            self._check(
                cuda.cuStreamWriteValue32(
                    self._stream, self._at(index), value, _WITH_FENCE
                ),
                self._stream,
            )

    def put(self, index: int, value: int) -> None:
        """Raise a word from the host, unless it is as high."""
        if self.is_there and _rise(int(self._values[index]), value) > 0:
            self._values[index] = value

    def give(self, index: int, base: int) -> None:
        """Take a word back, once no copy is left that would still raise it."""

        def passed(error: DeviceError | None) -> None:
            # A late copy may have put a lower number there.
            self.put(index, base)
            if error is None:
                self._free.append((index, base))

        if not self.is_there:
            return
        # Without its context, nobody will want the word.
        with suppress(DeviceError), self._context:
            self._lane.mark(self._stream, passed)

    def _at(self, index: int) -> int:
        return self._address + index * 4

    def _check_there(self) -> None:
        self._context.check_usable()
        if self._is_closed:
            raise ClosedError("the device is closed")

    def _check(self, result: tuple[object, ...], stream: int) -> None:
        code = code_of(result)
        if code != SUCCESS:
            what = "a stream could not be told of a word"
            raise self._context.judge_refusal(code, stream, what)


class CudaWord:
    """A word that one user has."""

    def __init__(self, words: Words, index: int, base: int) -> None:
        self._words = words
        self._index = index
        self._base = base
        self._num_behind = 0
        """How high the copy stream will raise it."""
        self._is_released = False

    def hold(self, stream: int, value: int) -> None:
        """Make all that a stream is given from now on wait until it is ``value``."""
        if not self._is_released:
            self._words.wait(self._index, self._value(value), stream)

    def raise_behind(self, value: int) -> None:
        """Have the copy stream raise it, behind all copies that it has by now."""
        if not self._is_released:
            self._words.write(self._index, self._value(value))
            self._num_behind = max(self._num_behind, value)

    def set(self, value: int) -> None:
        """Raise it from the host, at once."""
        if self._is_released:
            return
        self._words.put(self._index, self._value(value))
        if 0 < self._num_behind < value:
            # The copy stream may have a lower number yet to write.
            with suppress(DeviceError):
                self.raise_behind(value)

    def release(self) -> None:
        """Give it back: no stream will be told to wait for it any more."""
        if self._is_released:
            return
        self._is_released = True
        end = self._value(_REACH)
        self._words.put(self._index, end)
        self._words.give(self._index, end)

    def _value(self, value: int) -> int:
        return (self._base + value) % _SPAN


def _rise(old: int, new: int) -> int:
    """Return by how much a number rises, as streams count: cyclically."""
    return (new - old + _SPAN // 2) % _SPAN - _SPAN // 2
