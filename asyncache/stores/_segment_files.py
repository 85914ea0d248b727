"""Segments: files of one length that are filled with slots, all of them there at once.

A slot holds a page and then its head, so that pages begin where direct I/O can begin.
Blocking, for threads.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from stat import S_ISREG

from asyncache.stores._abc import PageBuffers
from asyncache.stores._frame import Frame
from asyncache.stores._frame_io import read_all, write_all
from asyncache.stores._segment_room import SLOTS_PER_SEGMENT

ALIGNMENT = 4096
_MODE = 0o600
_NAME = re.compile(r"[0-9]{6,}\.seg")
# A transaction of the index writes its log first.
_INDEX_BYTES = 8 * 2**20
_INDEX_SHARE = 128
# Neighbours are moved by one system call, but no more of them than a core's cache
# holds: their digests are computed next.
_RUN_BYTES = 2**20


class SegmentFiles:
    """The open files of a store's segments.

    Args:
        directory: Where they are.
        segment_bytes: Length of each.
        direct: Whether to go around the page cache of the operating system.
    """

    def __init__(self, directory: str, segment_bytes: int, *, direct: bool) -> None:
        self.segment_bytes = segment_bytes
        self._directory = directory
        self._flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        if direct:
            self._flags |= os.O_DIRECT
        self._open: dict[int, int] = {}

    @property
    def num_segments(self) -> int:
        """Segments that are open."""
        return len(self._open)

    def create(self, segment: int) -> None:
        """Make a segment, with all its room: later there is no such thing as no room.

        Raises:
            OSError: If there is no room for it, and for what the index grows by.
        """
        found = os.statvfs(self._directory)
        left = found.f_bavail * found.f_frsize - self.segment_bytes
        if left < _INDEX_BYTES + (segment + 1) * self.segment_bytes // _INDEX_SHARE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.delete(segment)
        path = self._path(segment)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, _MODE)
        try:
            os.posix_fallocate(descriptor, 0, self.segment_bytes)
        except OSError:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - a string all along
            raise
        finally:
            os.close(descriptor)

    def is_whole(self, segment: int) -> bool:
        """Whether a segment's file is there, and as long as it should be."""
        try:
            found = os.lstat(self._path(segment))
        except OSError:
            return False
        return found.st_size == self.segment_bytes and S_ISREG(found.st_mode)

    def delete(self, segment: int) -> None:
        """Remove a segment's file."""
        with suppress(FileNotFoundError):
            os.unlink(self._path(segment))  # noqa: PTH108 - as above

    def sweep(self, known: set[int]) -> int:
        """Remove the files of segments that nobody knows of; return their bytes."""
        num_bytes = 0
        names = {os.path.basename(self._path(segment)) for segment in known}  # noqa: PTH119
        for name in os.listdir(self._directory):  # noqa: PTH208 - strings all along
            if _NAME.fullmatch(name) and name not in names:
                path = f"{self._directory}/{name}"
                num_bytes += os.lstat(path).st_size
                os.unlink(path)  # noqa: PTH108 - as above
        return num_bytes

    def open(self, segment: int) -> bool:
        """Open a segment's file; return whether there is one.

        Raises:
            OSError: If it cannot be opened, as for direct I/O where there is none.
        """
        if not self.is_whole(segment):
            return False
        self._open[segment] = os.open(self._path(segment), self._flags)
        return True

    def descriptor(self, segment: int) -> int:
        """Return the open file of a segment.

        Raises:
            OSError: If there is none: the index is broken.
        """
        if segment not in self._open:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self._open[segment]

    def sync(self, segments: set[int]) -> None:
        """Wait until what was written to segments is on the disk."""
        for segment in segments:
            os.fdatasync(self.descriptor(segment))

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _path(self, segment: int) -> str:
        return f"{self._directory}/{segment:06d}.seg"


class Slots:
    """The slots of one space, as one thread reads and writes them.

    Args:
        files: The segments.
        frame: What a page of the space is.
        direct: Whether the files are open for direct I/O: what is not aligned goes
            through a buffer of the thread's own then.
    """

    def __init__(self, files: SegmentFiles, frame: Frame, *, direct: bool) -> None:
        self._files = files
        self._frame = frame
        self.num_bytes = slot_bytes(frame)
        self.per_segment = files.segment_bytes // self.num_bytes
        self.num_together = 1 if direct else max(1, _RUN_BYTES // self.num_bytes)
        """Neighbours that may be moved at once."""
        self.head = bytearray(frame.head_bytes)
        self._head_views = [memoryview(self.head)]
        self._bounce = memoryview(mmap.mmap(-1, self.num_bytes)) if direct else None
        # What follows the pages in their slots: heads, and what is behind them.
        self._tail_bytes = self.num_bytes - frame.page_bytes
        self._tails = bytearray(self.num_together * self._tail_bytes)
        tails = memoryview(self._tails)
        self._tail_views = [
            tails[start : start + self._tail_bytes]
            for start in range(0, len(tails), self._tail_bytes)
        ]

    def read(self, slot: int, layers: range, buffers: PageBuffers) -> bool:
        """Fill buffers with some layers, and ``head``; return whether all was there."""
        descriptor, base = self._locate(slot)
        size = self._frame.layer_bytes
        start, stop = layers.start * size, layers.stop * size
        if self._bounce is not None:
            return self._read_direct(descriptor, base, start, stop, buffers)
        if stop == self._frame.page_bytes:
            wanted = stop - start + len(self.head)
            return read_all(
                descriptor, [*buffers, *self._head_views], base + start, wanted
            )
        tail = base + self._frame.page_bytes
        return read_all(descriptor, buffers, base + start, stop - start) and read_all(
            descriptor, self._head_views, tail, len(self.head)
        )

    def read_run(self, slot: int, pages: Sequence[PageBuffers]) -> list[bytearray]:
        """Fill buffers with pages of neighbouring slots; return their heads.

        None of them if not all was there. There are two to ``num_together`` of them.
        """
        descriptor, base = self._locate(slot)
        self._locate(slot + len(pages) - 1)
        wanted = len(pages) * self.num_bytes
        if not read_all(descriptor, self._views(pages), base, wanted):
            return []
        starts = range(0, len(pages) * self._tail_bytes, self._tail_bytes)
        return [self._tails[start : start + len(self.head)] for start in starts]

    def write_run(
        self, slot: int, pages: Sequence[PageBuffers], heads: Sequence[bytes]
    ) -> None:
        """Write pages and their heads to neighbouring slots."""
        descriptor, base = self._locate(slot)
        self._locate(slot + len(pages) - 1)
        for tail, head in zip(self._tail_views, heads, strict=False):
            tail[: len(head)] = head
        write_all(descriptor, self._views(pages), base)

    def _views(self, pages: Sequence[PageBuffers]) -> list[memoryview]:
        views: list[memoryview] = []
        for page, tail in zip(pages, self._tail_views, strict=False):
            views += page
            views.append(tail)
        return views

    def write(self, slot: int, buffers: PageBuffers, head: bytes) -> None:
        """Write a page and its head."""
        descriptor, base = self._locate(slot)
        if self._bounce is None:
            write_all(descriptor, [*buffers, memoryview(head)], base)
            return
        end = self._frame.page_bytes
        if end % ALIGNMENT == 0 and all(map(_is_aligned, buffers)):
            rest = self._bounce[: self.num_bytes - end]
            rest[: len(head)] = head
            write_all(descriptor, [*buffers, rest], base)
            return
        at = 0
        for part in (*buffers, memoryview(head)):
            self._bounce[at : at + part.nbytes] = part
            at += part.nbytes
        write_all(descriptor, [self._bounce], base)

    def _locate(self, slot: int) -> tuple[int, int]:
        segment, place = divmod(slot, SLOTS_PER_SEGMENT)
        if place >= self.per_segment:  # a broken index must not make a file longer
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self._files.descriptor(segment), place * self.num_bytes

    def _read_direct(
        self, descriptor: int, base: int, start: int, stop: int, buffers: PageBuffers
    ) -> bool:
        assert self._bounce is not None
        end = self._frame.page_bytes
        is_whole = (start, stop) == (0, end) and end % ALIGNMENT == 0
        if is_whole and all(map(_is_aligned, buffers)):
            rest = self._bounce[: self.num_bytes - end]
            views = [*buffers, rest]
            is_there = read_all(descriptor, views, base, self.num_bytes)
            self.head[:] = rest[: len(self.head)]
            return is_there
        is_there = read_all(descriptor, [self._bounce], base, self.num_bytes)
        self.head[:] = self._bounce[end : end + len(self.head)]
        for buffer in buffers:
            buffer[:] = self._bounce[start : start + buffer.nbytes]
            start += buffer.nbytes
        return is_there


def segment_of(slot: int) -> int:
    """Return the segment in which a slot lies."""
    return slot // SLOTS_PER_SEGMENT


def slot_bytes(frame: Frame) -> int:
    """Return the bytes of a slot for pages of one space."""
    used = frame.page_bytes + frame.head_bytes
    return -(-used // ALIGNMENT) * ALIGNMENT


def _is_aligned(view: memoryview) -> bool:
    address = (
        ctypes.addressof(ctypes.c_char.from_buffer(view)) if not view.readonly else 1
    )
    return address % ALIGNMENT == 0 and view.nbytes % ALIGNMENT == 0
