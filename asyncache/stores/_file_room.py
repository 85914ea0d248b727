"""How much more a capped FileStore may write: room that all its processes share.

The file ``room`` says how many bytes may still be written, and under which cap; who
holds its lock may change that. A process takes some of it at a time, for its own pages.
Who finds too little left counts the pages that there are, removes those that were used
longest ago until an eighth of the cap is free, and goes on; nobody has to be there when
nobody writes, and the kernel lets go the lock of one that dies. What others had taken
and not written yet is not counted, so the directory may be over its cap by what each
process takes at a time. What a dead one had taken comes back with the next count.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncache.stores._page_walk import Entry, walk
from asyncache.threads import Stop

_NAME = "room"
_MODE = 0o600
_DIGITS = 32
# What a process takes at a time, and what a count leaves free, of the cap.
_TAKEN_SHARE = 256
_FREED_SHARE = 8
_WAIT_S = 1.0
_PAUSE_S = 0.02


class NoRoomError(Exception):
    """There is none, and cannot be."""


def read_cap(directory: str) -> int | None:
    """Return the cap that room was last counted under; None if nobody has counted."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(f"{directory}/{_NAME}", flags)
    except OSError:
        return None
    try:
        return _RoomFile(descriptor).cap
    except OSError:
        return None
    finally:
        os.close(descriptor)


class FileRoom:
    """The room in a directory. Blocking; any thread may call it.

    Args:
        directory: A FileStore's; it exists.
        temporary: Where its unfinished pages are.
        max_bytes: What all pages may take.
    """

    def __init__(self, directory: str, temporary: str, max_bytes: int) -> None:
        self._directory = directory
        self._temporary = temporary
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._taken = 0

    def take(self, num_bytes: int, stop: Stop) -> None:
        """Take room for a page.

        Raises:
            NoRoomError: If there is none, though all was removed that could be.
            OSError: If others are at it for too long, or the disk fails.
        """
        with self._lock:
            if self._taken < num_bytes:
                self._taken += self._take_more(num_bytes - self._taken, stop)
            self._taken -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Give back the room of a page that was not written, or was removed."""
        with self._lock:
            self._taken += num_bytes

    def leave(self) -> None:
        """Give back what was taken, unless others are at it."""
        if not self._taken:
            return
        with self._lock, suppress(OSError), self._held(None) as room:
            left = room.read(self._max_bytes)
            if left is not None:
                room.write(left + self._taken, self._max_bytes)
            self._taken = 0

    def _take_more(self, num_bytes: int, stop: Stop) -> int:
        with self._held(stop) as room:
            left = room.read(self._max_bytes)
            if left is None or left < num_bytes:
                left = self._make_room(stop)
            if left < num_bytes:
                room.write(left, self._max_bytes)
                raise NoRoomError
            taken = min(left, max(num_bytes, self._max_bytes // _TAKEN_SHARE))
            room.write(left - taken, self._max_bytes)
            return taken

    @contextmanager
    def _held(self, stop: Stop | None) -> Iterator[_RoomFile]:
        """Hold the lock; wait for it as long as anybody waits for us, or a second."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(f"{self._directory}/{_NAME}", flags, _MODE)
        try:
            num_left = 0 if stop is None else round(_WAIT_S / _PAUSE_S)
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not num_left or stop is None or stop.wait(_PAUSE_S):
                        raise
                    num_left -= 1
            yield _RoomFile(descriptor)
        finally:
            os.close(descriptor)

    # With the lock held.

    def _make_room(self, stop: Stop) -> int:
        """Remove pages if need be; return how many bytes may be written now."""
        pages = [entry for entry in walk(self._directory) if entry is not None]
        total = sum(entry.num_bytes for entry in pages) + self._unfinished()
        goal = self._max_bytes - self._max_bytes // _FREED_SHARE
        if total > goal:
            pages.sort(key=lambda entry: entry.used_ns)
            for entry in pages:
                if total <= goal or stop.is_set():
                    break
                total -= self._remove(entry)
        return max(0, self._max_bytes - total)

    def _remove(self, entry: Entry) -> int:
        try:
            os.unlink(entry.path)  # noqa: PTH108 - a string all along
        except FileNotFoundError:
            return entry.num_bytes
        except OSError:
            return 0
        return entry.num_bytes

    def _unfinished(self) -> int:
        total = 0
        with suppress(FileNotFoundError):
            for path in Path(self._temporary).iterdir():
                with suppress(FileNotFoundError):
                    total += path.lstat().st_size
        return total


class _RoomFile:
    """What is in the file, while its lock is held."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def cap(self) -> int | None:
        """What it was counted under; None if it was not."""
        counted = self._counted()
        return None if counted is None else counted[1]

    def read(self, cap: int) -> int | None:
        """Return how many bytes are left; None if nobody has counted for this cap."""
        counted = self._counted()
        return counted[0] if counted is not None and counted[1] == cap else None

    def _counted(self) -> tuple[int, int] | None:
        left, _, cap = os.pread(self._descriptor, 2 * _DIGITS + 1, 0).partition(b" ")
        return (int(left), int(cap)) if left.isdigit() and cap.isdigit() else None

    def write(self, left: int, cap: int) -> None:
        # Of one length: a shorter one would leave digits of the last.
        text = b"%0*d %0*d" % (_DIGITS, left, _DIGITS, cap)
        os.pwrite(self._descriptor, text, 0)
