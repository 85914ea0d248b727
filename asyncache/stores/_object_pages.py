"""How a bucket names and holds the pages of one space, and the bytes of a pointer.

::

    <prefix><space>/<hh>/<hash>.kv   a large page: its frame, head and layer slices
    <prefix><space>/<hh>/<hash>.at   a pointer: where in which pack a small page is
    <prefix>packs/<id>               frames of small pages, one after another

Small objects cost a server as much as large ones, so small pages travel together. What
form a space has follows from the space alone: readers and writers always agree.

A pointer is little-endian, and its digest covers the key, so that one under another
key's name is no pointer::

    0    magic, version, zeros
    16   id of the pack
    32   where in it the frame begins, and the frame's length
    48   xxh3_64 digest of the key and of all before it
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_digest

from asyncache.core import PageHash, PageSpace
from asyncache.stores._abc import PageBuffers, Status
from asyncache.stores._frame import Frame

# Part of the format: pages of spaces of which two fit into a pack are packed.
PACK_BYTES = 4 * 2**20
PACK_ID_BYTES = 16
POINTER_BYTES = 56
_MAGIC, _VERSION = b"asyncache-at", 1
_POINTER = struct.Struct(f"<12sI{PACK_ID_BYTES}sQQ")


class Pointer(NamedTuple):
    """Where a page is.

    Args:
        pack: The pack's id.
        start: Where in the pack the page's frame begins, in bytes.
    """

    pack: bytes
    start: int


class Shelf:
    """The pages of one space. Immutable: all threads share it.

    Args:
        prefix: What all names begin with.
        space: What the pages are.
        checksums: Whether to write digests of the slices, and to read only pages with
            them, verified.
    """

    def __init__(self, prefix: str, space: PageSpace, *, checksums: bool) -> None:
        self.frame = frame = Frame(space)
        self.is_packed = 2 * frame.file_bytes <= PACK_BYTES
        self._checksums = checksums
        self._space_name = space.name.encode()
        self._prefix = f"{prefix}{space.name}/"
        self._suffix = ".at" if self.is_packed else ".kv"

    @property
    def num_together(self) -> int:
        """Pages that an object holds at most."""
        return PACK_BYTES // self.frame.file_bytes if self.is_packed else 1

    def path(self, page_hash: PageHash) -> str:
        """Return the name of a page's own object: its frame or its pointer."""
        name = page_hash.hex()
        return f"{self._prefix}{name[-2:]}/{name}{self._suffix}"

    def pack_pointer(self, page_hash: PageHash, pointer: Pointer) -> bytes:
        """Return the bytes of a page's pointer."""
        body = _POINTER.pack(_MAGIC, _VERSION, *pointer, self.frame.file_bytes)
        return body + xxh3_64_digest(page_hash + self._space_name + body)

    def unpack_pointer(self, page_hash: PageHash, data: bytes) -> Pointer | None:
        """Return a page's pointer; None if the bytes are, to a bit, not one."""
        if len(data) != POINTER_BYTES or not data.startswith(_MAGIC):
            return None
        body = data[: _POINTER.size]
        digest = xxh3_64_digest(page_hash + self._space_name + body)
        _, version, pack, start, num_bytes = _POINTER.unpack(body)
        is_good = data.endswith(digest) and version == _VERSION
        if not is_good or num_bytes != self.frame.file_bytes:
            return None
        return Pointer(pack, start)

    def write_frame(
        self, page_hash: PageHash, buffers: PageBuffers, target: memoryview
    ) -> None:
        """Copy a page's frame; a thread's work."""
        frame = self.frame
        digests = frame.digests(buffers) if self._checksums else None
        _copy([target], [memoryview(frame.head(page_hash, digests)), *buffers])

    def read_frame(
        self,
        page_hash: PageHash,
        layers: range,
        source: tuple[memoryview, memoryview],
        buffers: PageBuffers,
    ) -> Status:
        """Copy these layers' slices; a thread's work.

        Args:
            page_hash: The page.
            layers: Layers to read.
            source: The frame's head, and the slices.
            buffers: What they are copied to.

        Returns:
            HIT, CORRUPT if they are not, to the bit, what was put, or MISS if there are
            no digests to tell by.
        """
        frame, head = self.frame, bytearray(source[0])
        if not frame.is_head_of(page_hash, head):
            return Status.CORRUPT
        if self._checksums and not frame.has_digests(head):
            return Status.MISS
        _copy(buffers, [source[1]])
        if self._checksums and not frame.are_slices_of(head, layers, buffers):
            return Status.CORRUPT
        return Status.HIT


def _copy(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """Copy the one or the many; NumPy lets go of the interpreter lock, unlike views."""
    if len(sources) == 1:
        [source], start = sources, 0
        for target in targets:
            stop = start + len(target)
            np.copyto(_array(target), _array(source[start:stop]))
            start = stop
    else:
        [target], start = targets, 0
        for source in sources:
            stop = start + len(source)
            np.copyto(_array(target[start:stop]), _array(source))
            start = stop


def _array(view: memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(view, dtype=np.uint8)
