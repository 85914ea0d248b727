"""One file a page, with as few system calls as there can be. Blocking, for threads.

A page appears by a rename and never changes after it, so whoever opens it reads all of
it or what a fault left: and that is corrupt, told apart by the frame and removed.
"""

# A Path costs as much as the system calls that it would be made for.
# ruff: noqa: PTH102, PTH104, PTH108, PTH120

from __future__ import annotations

import errno
import itertools
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from stat import S_ISREG

from asyncache.core import PageHash, PageSpace
from asyncache.stores._abc import PageBuffers, Status
from asyncache.stores._frame import Frame
from asyncache.stores._frame_io import read_all, write_all

# A FIFO must not block the open, and a link must not lead out of the directory.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_MODE = 0o600
_PRIVATE = 0o700
_SAME_USE_NS = 60 * 10**9
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
# What a link, directory, FIFO or socket answers to open and preadv.
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ESPIPE, errno.ENXIO})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class PageFiles:
    """The pages of one space: ``directory/hh/hash.kv``, ``hh`` the hash's last byte.

    Args:
        directory: Where this space's pages live.
        temporary: Directory on the same file system, for pages that are being written.
        space: What the pages are.
        digests: Whether to write digests of the slices, and to read only pages with
            them.
        durable: Whether a page reaches the disk before it becomes visible.
        keeps_plain: Whether pages that are not read, for they have none, stay.
        notes_uses: Whether a file's time says when its page was last used; within a
            minute, for that is a write.
    """

    def __init__(
        self,
        directory: str,
        temporary: str,
        space: PageSpace,
        *,
        digests: bool,
        durable: bool,
        keeps_plain: bool = False,
        notes_uses: bool = False,
    ) -> None:
        self.frame = Frame(space)
        self.digests = digests
        self.keeps_plain = keeps_plain
        self.notes_uses = notes_uses
        self._durable = durable
        self._directory = directory
        # Nobody shares the prefix, whatever process, container or host it is.
        self._temporary = f"{temporary}/{secrets.token_hex(8)}"
        self._count = itertools.count()

    def path(self, page_hash: PageHash) -> str:
        """Return where a page is, if it is there."""
        name = page_hash.hex()
        return f"{self._directory}/{name[-2:]}/{name}.kv"

    def holds(self, page_hash: PageHash) -> bool:
        """Return whether a regular file of the right length is there."""
        try:
            found = os.lstat(self.path(page_hash))
        except OSError:
            return False
        return found.st_size == self.frame.file_bytes and S_ISREG(found.st_mode)

    def note_use(self, page_hash: PageHash, used_ns: int, last_ns: int = 0) -> None:
        """Have a file's time tell of a use, if what it says, ``last_ns``, is old."""
        if self.notes_uses and used_ns - last_ns > _SAME_USE_NS:
            with suppress(OSError):
                os.utime(self.path(page_hash), ns=(used_ns, used_ns))

    def remove(self, page_hash: PageHash) -> None:
        """Remove a page, and anything else that has its name, if that can be done."""
        path = self.path(page_hash)
        with suppress(OSError):
            try:
                os.unlink(path)
            except IsADirectoryError:
                # What is in it is not ours to delete; the name is ours.
                os.rename(path, self._new_temporary())

    def write(self, page_hash: PageHash, buffers: PageBuffers, used_ns: int) -> Status:
        """Write a page that is not there: HIT, REJECTED for no room, or UNAVAILABLE."""
        digests = self.frame.digests(buffers) if self.digests else None
        views = [memoryview(self.frame.head(page_hash, digests)), *buffers]
        temporary = self._new_temporary()
        try:
            try:
                self._write_temporary(temporary, views, used_ns)
                self._publish(temporary, page_hash)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            return Status.REJECTED if error.errno in _NO_ROOM else Status.UNAVAILABLE
        return Status.HIT

    def _write_temporary(
        self, path: str, views: Sequence[memoryview], used_ns: int
    ) -> None:
        try:
            descriptor = os.open(path, _CREATE, _MODE)
        except FileNotFoundError:
            make_private(os.path.dirname(path))
            descriptor = os.open(path, _CREATE, _MODE)
        try:
            write_all(descriptor, views, 0)
            if self.notes_uses:
                os.utime(descriptor, ns=(used_ns, used_ns))
            if self._durable:
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def _publish(self, temporary: str, page_hash: PageHash) -> None:
        path = self.path(page_hash)
        try:
            os.rename(temporary, path)
        except FileNotFoundError:
            make_private(os.path.dirname(path))
            os.rename(temporary, path)
        except IsADirectoryError:
            self.remove(page_hash)
            os.rename(temporary, path)

    def _new_temporary(self) -> str:
        return f"{self._temporary}-{next(self._count)}"


def make_private(directory: str) -> None:
    """Make a directory, and what it lies in, for this user alone."""
    try:
        os.mkdir(directory, _PRIVATE)
    except FileExistsError:
        pass
    except FileNotFoundError:
        make_private(os.path.dirname(directory))
        # Not once more: there are directories in which nobody can make one.
        with suppress(FileExistsError):
            os.mkdir(directory, _PRIVATE)


class PageReader:
    """Reads pages of one space on one thread: it owns the memory of a head."""

    def __init__(self, files: PageFiles, layers: range | None) -> None:
        self._files = files
        self._frame = frame = files.frame
        self._layers = range(frame.num_layers) if layers is None else layers
        self._head = bytearray(frame.head_bytes)
        self._head_view = [memoryview(self._head)]
        self._offset = frame.head_bytes + self._layers.start * frame.layer_bytes
        self._num_bytes = len(self._layers) * frame.layer_bytes
        # The byte after the last one: a file that has it is too long.
        self._end = (
            [memoryview(bytearray(1))] if self._layers.stop == frame.num_layers else []
        )

    def read(self, page_hash: PageHash, buffers: PageBuffers, used_ns: int) -> Status:
        """Read a page's layers: HIT, MISS, UNAVAILABLE, or CORRUPT and removed."""
        last_ns = 0
        try:
            descriptor = os.open(self._files.path(page_hash), _READ)
            try:
                is_whole = self._fill(descriptor, buffers)
                if self._files.notes_uses:
                    last_ns = os.fstat(descriptor).st_mtime_ns
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in _ABSENT:
                return Status.MISS
            if error.errno not in _NO_FILE:
                return Status.UNAVAILABLE
            is_whole = False
        status = self._judge(page_hash, buffers) if is_whole else Status.CORRUPT
        if status is Status.HIT:
            self._files.note_use(page_hash, used_ns, last_ns)
        is_kept = status is Status.MISS and self._files.keeps_plain
        if status is not Status.HIT and not is_kept:
            self._files.remove(page_hash)
        return status

    def _fill(self, descriptor: int, buffers: PageBuffers) -> bool:
        """Read; return whether the file had all that was asked for, and no more."""
        if self._layers.start == 0:
            views = [*self._head_view, *buffers, *self._end]
            return read_all(descriptor, views, 0, self._offset + self._num_bytes)
        views = [*buffers, *self._end]
        return read_all(descriptor, self._head_view, 0, len(self._head)) and read_all(
            descriptor, views, self._offset, self._num_bytes
        )

    def _judge(self, page_hash: PageHash, buffers: PageBuffers) -> Status:
        if not self._frame.is_head_of(page_hash, self._head):
            return Status.CORRUPT
        if not self._files.digests:
            return Status.HIT
        if not self._frame.has_digests(self._head):
            return Status.MISS  # of no use here, and in the way of one with digests
        if not self._frame.are_slices_of(self._head, self._layers, buffers):
            return Status.CORRUPT
        return Status.HIT
