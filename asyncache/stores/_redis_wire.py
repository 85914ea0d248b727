"""RESP on one socket, as little of it as pages need. Blocking, for threads.

What is read goes straight into the reader's buffers: one system call a page, which
waits in the kernel until all of it is there. Nothing here has a clock: whoever must not
wait calls :meth:`Wire.interrupt` from another thread, and after that nothing more is
read. What is not RESP ends the connection, for nobody knows where the next reply
begins.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto

from asyncache.stores._frame_io import drop_bytes

# Room for the longest line, and for a few thousand short ones.
_READ_AHEAD_BYTES = 16 * 2**10
_MAX_BULK_BYTES = 2**40
_MAX_DEPTH = 8
_MAX_ITEMS = 2**20
_SKIP_BYTES = 64 * 2**10
_IOV_MAX = os.sysconf("SC_IOV_MAX")

Reply = bytes | int | list["Reply"] | None


class WireError(ConnectionError):
    """What came is not RESP, or not an answer to what was asked."""


class ReplyError(Exception):
    """An error that the server answered with. The connection is good."""


class Bulk(Enum):
    """What came instead of a string of known length, or that it did."""

    FULL = auto()
    """The string: it is in the buffers."""
    EMPTY = auto()
    OTHER_LENGTH = auto()
    ABSENT = auto()
    FOREIGN = auto()
    """The key holds something that is no string."""
    REFUSED = auto()
    """The server has no answer."""


def shut_down(sock: socket.socket) -> None:
    """End every call on a socket that waits, from any thread."""
    with suppress(OSError):
        # An SSLSocket's own would have the others read on without decrypting.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def request(*words: bytes) -> bytes:
    """Return a command as it is sent."""
    parts = [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
    return b"*%d\r\n%s" % (len(words), b"".join(parts))


class Wire:
    """A connection that is ready for commands, or nearly so.

    Args:
        sock: A connected socket without a timeout; the wire closes it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._is_wrapped = isinstance(sock, ssl.SSLSocket)
        self._memory = bytearray(_READ_AHEAD_BYTES)
        self._view = memoryview(self._memory)
        self._start = self._stop = 0
        self.complaints: set[bytes] = set()
        """First words of the errors that the server has answered with."""

    def interrupt(self) -> None:
        """End every call that waits, and any that would: from any thread."""
        shut_down(self._sock)

    def close(self) -> None:
        """Close the connection; what is under way on it must have ended."""
        self._sock.close()

    def is_idle(self) -> bool:
        """Return whether the server is there, as far as is known, and owes nothing."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return self._start == self._stop and not poll.poll(0)

    def send(self, *views: bytes | memoryview) -> None:
        """Send bytes, without joining them."""
        if self._is_wrapped:
            for view in views:
                self._sock.sendall(view)
            return
        left = [memoryview(view) for view in views]
        while left:
            left = drop_bytes(left, self._sock.sendmsg(left[:_IOV_MAX]))

    def read_line(self) -> bytes:
        """Return the next line of a reply, without its end.

        Raises:
            OSError: If the connection is over.
        """
        while (end := self._memory.find(b"\r\n", self._start, self._stop)) < 0:
            self._read_ahead()
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        if line[:1] == b"-":
            self.complaints.add(line[1:].partition(b" ")[0])
        return line

    def read_bulk(self, views: Sequence[memoryview], num_bytes: int) -> Bulk:
        """Read a string of ``num_bytes`` into views of as many; skip any other."""
        line = self.read_line()
        if line[:1] == b"-":
            is_foreign = line.startswith(b"-WRONGTYPE")
            return Bulk.FOREIGN if is_foreign else Bulk.REFUSED
        if line == b"$-1":
            return Bulk.ABSENT
        size = _size_of(line, b"$", _MAX_BULK_BYTES)
        end = bytearray(2)
        if size == num_bytes:
            self._fill([*views, memoryview(end)])
        else:
            self._skip(size)
            self._fill([memoryview(end)])
        if end != b"\r\n":
            raise WireError(f"a string of {size} bytes goes on with {bytes(end)!r}")
        if size == num_bytes:
            return Bulk.FULL
        return Bulk.OTHER_LENGTH if size else Bulk.EMPTY

    def read_reply(self, depth: int = _MAX_DEPTH) -> Reply:
        """Read a reply of any kind, and copy it.

        Raises:
            ReplyError: If it is an error.
            OSError: If the connection is over.
        """
        line = self.read_line()
        kind, rest = line[:1], line[1:]
        match kind:
            case b"+":
                return rest
            case b"-":
                raise ReplyError(rest.decode(errors="replace"))
            case b":" if rest.lstrip(b"-").isdigit():
                return int(rest)
            case b"$" | b"*" if rest == b"-1":
                return None
            case b"$":
                text = bytearray(_size_of(line, b"$", _READ_AHEAD_BYTES) + 2)
                self._fill([memoryview(text)])
                return bytes(text[:-2])
            case b"*" if depth:
                count = _size_of(line, b"*", _MAX_ITEMS)
                return [self.read_reply(depth - 1) for _ in range(count)]
        raise WireError(f"not a reply: {line[:40]!r}")

    def _read_ahead(self) -> None:
        if self._start:
            left = self._stop - self._start
            self._view[:left] = self._view[self._start : self._stop]
            self._start, self._stop = 0, left
        if self._stop == len(self._memory):
            raise WireError(f"a line of more than {self._stop} bytes")
        self._stop += self._received(self._sock.recv_into(self._view[self._stop :]))

    def _fill(self, views: list[memoryview]) -> None:
        while views and self._start < self._stop:
            count = min(len(views[0]), self._stop - self._start)
            views[0][:count] = self._view[self._start : self._start + count]
            self._start += count
            views = drop_bytes(views, count)
        while views:
            views = drop_bytes(views, self._received(self._receive(views)))

    def _receive(self, views: list[memoryview]) -> int:
        if self._is_wrapped:
            return self._sock.recv_into(views[0])
        return self._sock.recvmsg_into(views[:_IOV_MAX], 0, socket.MSG_WAITALL)[0]

    def _skip(self, size: int) -> None:
        scratch = memoryview(bytearray(min(size, _SKIP_BYTES)))
        while size:
            count = min(size, len(scratch))
            self._fill([scratch[:count]])
            size -= count

    @staticmethod
    def _received(count: int) -> int:
        if not count:
            raise ConnectionResetError("the server hung up")
        return count


def _size_of(line: bytes, kind: bytes, most: int) -> int:
    digits = line[1:]
    if line[:1] != kind or not digits.isdigit() or len(digits) > len(str(most)):
        raise WireError(f"expected {kind!r} and a size, not {line[:40]!r}")
    size = int(digits)
    if size > most:
        raise WireError(f"a size of {size} is more than {most}")
    return size
