"""A number that changes with each change of the index, for the price of a short read.

SQLite would tell too, but a question to it takes far longer than a small page where the
pages before have emptied the core's caches.

There are two numbers, of commits that were begun and that are done. The first grows by
one under SQLite's own lock, and so in order; the second is written when the lock may be
another process's already, and may come late.

===================  ==================================  ===========================
the two are          which means                         and become
===================  ==================================  ===========================
equal                what was seen since then holds      different, before a commit
different            a change may be there, or not       equal, after the last one
===================  ==================================  ===========================

Whoever dies in between, or is late, leaves them different until the next change: that
is slower, and not wrong.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_NUMBER = struct.Struct("<Q")
_BEGUN, _DONE = 0, _NUMBER.size
_END = 2**64


class Version:
    """The numbers, at the beginning of a file that all users of a directory have open.

    Args:
        descriptor: That file; it stays the caller's.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> int | None:
        """Return how many commits there were; None while there may be one."""
        both = os.pread(self._descriptor, 2 * _NUMBER.size, _BEGUN)
        begun, done = both[:_DONE], both[_DONE:]
        return int.from_bytes(begun, "little") if begun == done else None

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Commit a change; SQLite's lock is ours when this begins.

        Raises:
            OSError: If the beginning cannot be told: nothing may be committed then.
        """
        number = 1 + max(self._read(_BEGUN), self._read(_DONE))
        if number == _END:  # rubbish
            self._write(_DONE, 0)
            number = 1
        self._write(_BEGUN, number)
        try:
            yield
        finally:
            # It is committed, whether that can be told or not.
            with suppress(OSError):
                if self._read(_DONE) < number:
                    self._write(_DONE, number)

    def _read(self, where: int) -> int:
        return int.from_bytes(os.pread(self._descriptor, _NUMBER.size, where), "little")

    def _write(self, where: int, number: int) -> None:
        os.pwrite(self._descriptor, _NUMBER.pack(number), where)
