"""The bytes of a page file: a head that vouches for itself, then all layer slices.

::

    0    magic, version, digest kind, layers, bytes of a layer slice
    32   one xxh3_64 digest a layer slice, zeros when the kind is 0
         zeros up to the end of the head, a multiple of 64
    -8   xxh3_64 digest of the key and of all the head before it
    head_bytes   the layer slices, without gaps

Numbers are little-endian, digests canonical (big-endian). The key is in the head's
digest, so a file under another key's name is no page. Every byte is covered.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property

from xxhash import xxh3_64_digest

from asyncache.core import PageHash, PageSpace

MAGIC = b"asyncache-kv"
VERSION = 1
_FIXED = struct.Struct("<12sHHQQ")
_DIGEST_BYTES = 8
_HEAD_ALIGNMENT = 64
_NO_DIGESTS, _XXH3_64 = 0, 1


class Frame:
    """How the pages of one space are framed. Immutable: all threads share it."""

    def __init__(self, space: PageSpace) -> None:
        self.num_layers = space.num_layers
        self.layer_bytes = space.layer_bytes
        self.page_bytes = space.page_bytes
        self.file_bytes = frame_bytes(space)
        self.head_bytes = self.file_bytes - self.page_bytes
        self._space_name = space.name.encode()
        self._plain, self._digested = (
            _FIXED.pack(MAGIC, VERSION, kind, self.num_layers, self.layer_bytes)
            for kind in (_NO_DIGESTS, _XXH3_64)
        )

    @cached_property
    def _cuts(self) -> list[slice]:
        # Made once: making them page by page took as long as half of the digests. And
        # not before there is a page: a name may claim any number of layers.
        return [
            slice(start, start + self.layer_bytes)
            for start in range(0, self.page_bytes, self.layer_bytes)
        ]

    def head(self, page_hash: PageHash, digests: bytes | None) -> bytes:
        """Return the head of a page, with its slices' digests or without any."""
        fixed = self._plain if digests is None else self._digested
        body = (fixed + (digests or b"")).ljust(self.head_bytes - _DIGEST_BYTES, b"\0")
        return body + xxh3_64_digest(page_hash + self._space_name + body)

    def is_head_of(self, page_hash: PageHash, head: bytearray) -> bool:
        """Return whether this is, to the bit, a head that was written for this page."""
        body = head[:-_DIGEST_BYTES]
        if not body.startswith((self._digested, self._plain)):
            return False
        digest = xxh3_64_digest(page_hash + self._space_name + body)
        return head.endswith(digest)

    def has_digests(self, head: bytearray) -> bool:
        """Return whether the page was written with digests of its slices."""
        return head.startswith(self._digested)

    def are_slices_of(
        self, head: bytearray, layers: range, buffers: Sequence[memoryview]
    ) -> bool:
        """Return whether the buffers hold what the head says of these layers."""
        start = _FIXED.size + _DIGEST_BYTES * layers.start
        stop = _FIXED.size + _DIGEST_BYTES * layers.stop
        return head[start:stop] == self.digests(buffers)

    def digests(self, buffers: Sequence[memoryview]) -> bytes:
        """Return the digest of each layer slice in the buffers, joined."""
        return b"".join(map(xxh3_64_digest, self._slices(buffers)))

    def _slices(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        size = self.layer_bytes
        if size * len(buffers) == sum(map(len, buffers)):
            return buffers
        cuts = self._cuts
        return [
            buffer[cut] for buffer in buffers for cut in cuts[: len(buffer) // size]
        ]


def frame_bytes(space: PageSpace) -> int:
    """Return the bytes of a page of a space with its head."""
    used = _FIXED.size + _DIGEST_BYTES * (space.num_layers + 1)
    return -(-used // _HEAD_ALIGNMENT) * _HEAD_ALIGNMENT + space.page_bytes
