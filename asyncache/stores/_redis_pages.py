"""What is said on one connection about the pages of a batch. Blocking, for threads.

A page's value is its frame: head, then all layer slices. Commands go out ahead of the
replies, so that a batch costs a round trip and not one a page; replies come in the
order of commands, whatever became of the pages before. Nothing is joined: a string of
many pages is copied by both ends before its first byte moves.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from asyncache.core import PageHash, PageKey, PageSpace
from asyncache.stores._abc import PageBuffers, Status
from asyncache.stores._frame import Frame
from asyncache.stores._redis_wire import Bulk, Reply, Wire, WireError, request

# Pages under way to the server at once: more hide no more latency.
_WINDOW = 4
# Keys that the server looks at for one answer.
_SCANNED = b"1000"
_KEY = re.compile(r"([^:]*):([0-9a-f]{64})")


class Shelf:
    """How the pages of one space are called and framed. All threads share it.

    Args:
        prefix: What all keys begin with.
        space: What the pages are.
        ttl_s: How long a page lives; for ever when None.
    """

    def __init__(self, prefix: str, space: PageSpace, ttl_s: float | None) -> None:
        self.frame = Frame(space)
        self._prefix = f"{prefix}:{space.name}:".encode()
        options = b"$2\r\nNX\r\n"
        if ttl_s is not None:
            ttl = b"%d" % max(1, round(1000 * ttl_s))
            options += b"$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(ttl), ttl)
        self._set_tail = b"\r\n" + options
        self._set_head = b"*%d\r\n$3\r\nSET\r\n" % (4 if ttl_s is None else 6)

    def key(self, page_hash: PageHash) -> bytes:
        """Return what the server calls a page."""
        return self._prefix + page_hash.hex().encode()

    def set(self, page_hash: PageHash, buffers: PageBuffers) -> list[memoryview]:
        """Return the command that stores a page unless it is there."""
        head = self.frame.head(page_hash, self.frame.digests(buffers))
        key = self.key(page_hash)
        begin = b"%s$%d\r\n%s\r\n$%d\r\n" % (
            self._set_head,
            len(key),
            key,
            self.frame.file_bytes,
        )
        return [memoryview(begin + head), *buffers, memoryview(self._set_tail)]


class Reader:
    """Reads pages of one space on one connection: it owns the memory of a head."""

    def __init__(self, wire: Wire, shelf: Shelf, layers: range | None) -> None:
        self._wire = wire
        self._shelf = shelf
        self._frame = frame = shelf.frame
        self._layers = range(frame.num_layers) if layers is None else layers
        self._is_whole = len(self._layers) == frame.num_layers
        self._head = bytearray(frame.head_bytes)
        self._head_view = memoryview(self._head)
        start = frame.head_bytes + self._layers.start * frame.layer_bytes
        self._num_bytes = len(self._layers) * frame.layer_bytes
        self._first = b"%d" % start
        self._last = b"%d" % (start + self._num_bytes - 1)
        self._end_of_head = b"%d" % (frame.head_bytes - 1)

    def ask(self, page_hash: PageHash) -> bytes:
        """Return what asks for a page."""
        key = self._shelf.key(page_hash)
        if self._is_whole:
            return request(b"GET", key)
        return request(b"GETRANGE", key, b"0", self._end_of_head) + request(
            b"GETRANGE", key, self._first, self._last
        )

    def read(self, page_hash: PageHash, buffers: PageBuffers) -> Status:
        """Read the answer: HIT, MISS, CORRUPT or UNAVAILABLE."""
        if self._is_whole:
            views = [self._head_view, *buffers]
            found = self._wire.read_bulk(views, self._frame.file_bytes)
        else:
            found = self._read_range(buffers)
        match found:
            case Bulk.FULL:
                return self._judge(page_hash, buffers)
            case Bulk.ABSENT:
                return Status.MISS
            case Bulk.REFUSED:
                return Status.UNAVAILABLE
            case _:
                return Status.CORRUPT

    def _read_range(self, buffers: PageBuffers) -> Bulk:
        head = self._wire.read_bulk([self._head_view], len(self._head))
        slices = self._wire.read_bulk(buffers, self._num_bytes)
        if Bulk.REFUSED in {head, slices}:
            return Bulk.REFUSED
        if head is Bulk.EMPTY:  # so it is answered for a key that is not there
            return Bulk.ABSENT
        return slices if head is Bulk.FULL else head

    def _judge(self, page_hash: PageHash, buffers: PageBuffers) -> Status:
        frame, head = self._frame, self._head
        is_good = (
            frame.is_head_of(page_hash, head)
            and frame.has_digests(head)
            and frame.are_slices_of(head, self._layers, buffers)
        )
        return Status.HIT if is_good else Status.CORRUPT


class Writer:
    """Stores pages on one connection, a few ahead of the answers.

    Args:
        wire: The connection.
        told: Told of each page's number and what became of it.
        full: Set by whoever finds the server full: no more is sent then.
    """

    def __init__(
        self, wire: Wire, told: Callable[[int, Status], None], full: threading.Event
    ) -> None:
        self._wire = wire
        self._told = told
        self._full = full
        self._sent: deque[int] = deque()

    def write(self, number: int, command: Callable[[], Sequence[memoryview]]) -> None:
        """Store a page by a command, unless the server is full."""
        if self._full.is_set():
            self._told(number, Status.REJECTED)
            return
        self._wire.send(*command())
        self._sent.append(number)
        if len(self._sent) == _WINDOW:
            self._take()

    def finish(self) -> None:
        """Wait for the answers that are missing."""
        while self._sent:
            self._take()

    def _take(self) -> None:
        line = self._wire.read_line()
        if line in {b"+OK", b"$-1"}:  # or somebody else's is there
            status = Status.HIT
        elif line.startswith(b"-OOM"):
            self._full.set()
            status = Status.REJECTED
        elif line.startswith(b"-"):
            status = Status.UNAVAILABLE
        else:
            raise WireError(f"no answer to SET: {line[:40]!r}")
        self._told(self._sent.popleft(), status)


def are_there(wire: Wire, keys: Sequence[bytes]) -> Iterator[bool | None]:
    """Ask which keys there are, in one round trip; None where there is no answer.

    Not by a script, which took longer, and which servers may forbid.
    """
    wire.send(b"".join(request(b"EXISTS", key) for key in keys))
    for _ in keys:
        line = wire.read_line()
        if line not in {b":0", b":1"} and not line.startswith(b"-"):
            raise WireError(f"no answer to EXISTS: {line[:40]!r}")
        yield None if line.startswith(b"-") else line == b":1"


def remove(wire: Wire, keys: Sequence[bytes]) -> None:
    """Remove keys that may be there.

    Without comparing: the worst that may happen is that a page which was stored anew
    in between must be stored once more.
    """
    if not keys:
        return
    wire.send(b"".join(request(b"UNLINK", key) for key in keys))
    for _ in keys:
        line = wire.read_line()
        if not line.startswith((b":", b"-")):
            raise WireError(f"no answer to UNLINK: {line[:40]!r}")


def scan(wire: Wire, prefix: str, cursor: bytes) -> tuple[bytes, list[PageKey]]:
    """Return where to go on, and some pages; from b"0" on, until that comes back.

    Raises:
        ReplyError: If the server does not let us.
        OSError: If the connection is over.
    """
    begin = f"{prefix}:"
    wire.send(
        request(b"SCAN", cursor, b"MATCH", f"{begin}*".encode(), b"COUNT", _SCANNED)
    )
    match wire.read_reply():
        case [bytes(then), [*names]]:
            keys = [_key_of(name, begin) for name in names]
            return then, [key for key in keys if key is not None]
        case reply:
            raise WireError(f"no answer to SCAN: {reply!r:.80}")


def _key_of(name: Reply, begin: str) -> PageKey | None:
    """Return the page that a key is of, if it is one of ours."""
    text = name.decode(errors="replace") if isinstance(name, bytes) else ""
    match = _KEY.fullmatch(text.removeprefix(begin))
    try:
        space = PageSpace.from_name(match[1] if match else "")
    except ValueError:
        return None
    assert match is not None
    return PageKey(PageHash(bytes.fromhex(match[2])), space)
