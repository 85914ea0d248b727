"""A number that changes with each change of the index, for the price of a short read.

SQLite would tell too, but a question to it takes far longer than a small page where the
pages before have emptied the core's caches.

=================  ================================  ==========================
the number is      which means                       and becomes
=================  ================================  ==========================
even               what was seen since then holds    odd, before a commit
odd                a change may be there, or not     even, after it
=================  ================================  ==========================

Whoever dies in between leaves it odd until the next change: slower, and not wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_NUM_BYTES = 8


class Version:
    """The number, at the beginning of a file that all users of a directory have open.

    Args:
        descriptor: That file; it stays the caller's.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> int | None:
        """Return the number; None while it is odd."""
        number = self._read()
        return None if number % 2 else number

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Commit a change; no two at a time, which SQLite's own lock sees to."""
        odd = self._read() | 1
        self._write(odd)
        try:
            yield
        finally:
            self._write(odd + 1)

    def _read(self) -> int:
        return int.from_bytes(os.pread(self._descriptor, _NUM_BYTES, 0), "little")

    def _write(self, number: int) -> None:
        os.pwrite(self._descriptor, number.to_bytes(_NUM_BYTES, "little"), 0)
