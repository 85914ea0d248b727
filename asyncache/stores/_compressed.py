"""Compressed pages: each layer slice a zstd frame, or itself where that is no shorter.

A slot::

    0    xxh3_64 digest of the page's inner hash, the layer and the rest of the slot
    8    bytes of what is coded, little-endian; those of the slice: it is not coded
    16   a zstd frame, or the slice; zeros up to the slot's end

Slots have eighths of the slice's length, and the head: the longest slot of a page says
which for all. Every byte is covered by the digest, also the zeros.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from types import ModuleType

from xxhash import xxh3_64

from asyncache.core import TAG_BYTES, PageHash, PageKey
from asyncache.stores._abc import Store
from asyncache.stores._coded import Codec, CodedStore, Coder
from asyncache.stores._extras import load_extra

_NAME = "zstd2"
_NUM_SIZES = 8
_DIGEST_BYTES = 8
_NUMBER = struct.Struct("<Q")
_HEAD_BYTES = _DIGEST_BYTES + _NUMBER.size


class CompressedStore(CodedStore):
    """Pages compressed with zstd, in another store.

    As in ``CompressedStore(FileStore(path))``. Nothing is lost: a page that is read is
    the page that was put, to the bit. A page takes one of eight sizes, so a ratio of
    0.7 saves a quarter; one that cannot be compressed takes 16 bytes a layer more than
    it has. A look-up asks the inner store for all sizes.

    Of tiers, wrap the one that is worth it: a page that any tier of the inner store
    has is not put again. To encrypt too, compress first:
    ``CompressedStore(EncryptedStore(...))``; the size of a page then tells how well it
    was compressed.

    Args:
        inner: Keeps the compressed pages; this store opens and closes it.
        level: zstd's, from -100, the fastest, to 22. Pages of any level are read.
        num_threads: Threads that decompress; half as many compress.

    Raises:
        StoreError: If the extra ``zstd`` is not installed.
        ValueError: If ``level`` or ``num_threads`` is out of range.
    """

    def __init__(self, inner: Store, *, level: int = 1, num_threads: int = 4) -> None:
        if not -100 <= level <= 22:  # noqa: PLR2004 - zstd's own
            raise ValueError(f"level must be in [-100, 22], not {level}")
        super().__init__(inner, _Zstd(level), num_threads=num_threads)


class _Zstd(Codec):
    name = _NAME

    def __init__(self, level: int) -> None:
        self._zstd = load_extra("zstandard", extra="zstd", user="CompressedStore")
        self._level = level

    def takes(self, key: PageKey) -> bool:  # noqa: ARG002 - pages of all
        return True

    def page_hash(self, key: PageKey) -> PageHash:
        digest = hashlib.sha256(b"asyncache/zstd/2/" + key.name.encode()).digest()
        return PageHash(key.tag + digest[TAG_BYTES:])

    def slot_bytes(self, layer_bytes: int) -> Sequence[int]:
        # Of tiny slices, eighths may be equal.
        eighths = {
            -(-layer_bytes * number // _NUM_SIZES)
            for number in range(1, _NUM_SIZES + 1)
        }
        return [_HEAD_BYTES + size for size in sorted(eighths)]

    def coder(self) -> Coder:
        # zstd's contexts are for one thread each.
        return _ZstdCoder(self, self._zstd, self._level)


class _ZstdCoder(Coder):
    def __init__(self, codec: _Zstd, zstd: ModuleType, level: int) -> None:
        self._codec = codec
        self._zstd = zstd
        self._compress = zstd.ZstdCompressor(level=level).compress
        self._decompress = zstd.ZstdDecompressor().decompress

    def encode(self, key: PageKey, sources: Sequence[memoryview]) -> bytearray:
        page_hash = self._codec.page_hash(key)
        frames = [_shorter(self._compress(source), source) for source in sources]
        needed = _HEAD_BYTES + max(map(len, frames))
        sizes = self._codec.slot_bytes(key.space.layer_bytes)
        size = next(size for size in sizes if size >= needed)
        page = bytearray(len(frames) * size)
        for layer, frame in enumerate(frames):
            slot = memoryview(page)[layer * size : (layer + 1) * size]
            _NUMBER.pack_into(slot, _DIGEST_BYTES, len(frame))
            slot[_HEAD_BYTES : _HEAD_BYTES + len(frame)] = frame
            slot[:_DIGEST_BYTES] = _digest(page_hash, layer, slot)
        return page

    def decode(
        self,
        key: PageKey,
        layers: range,
        slots: Sequence[memoryview],
        targets: Sequence[memoryview],
    ) -> bool:
        page_hash = self._codec.page_hash(key)
        return all(
            slot[:_DIGEST_BYTES] == _digest(page_hash, layer, slot)
            and self._fill(slot, target)
            for layer, slot, target in zip(layers, slots, targets, strict=True)
        )

    def _fill(self, slot: memoryview, target: memoryview) -> bool:
        [length] = _NUMBER.unpack_from(slot, _DIGEST_BYTES)
        frame = slot[_HEAD_BYTES : _HEAD_BYTES + length]
        if length == len(target) == len(frame):
            target[:] = frame
            return True
        try:
            # Asked first: whoever forges a digest could have gigabytes allocated.
            if self._zstd.frame_content_size(frame) != len(target):
                return False
            target[:] = self._decompress(frame)
        except self._zstd.ZstdError:
            return False
        return True


def _shorter(frame: bytes, source: memoryview) -> bytes | memoryview:
    return frame if len(frame) < len(source) else source


def _digest(page_hash: PageHash, layer: int, slot: memoryview) -> bytes:
    digest = xxh3_64(page_hash + _NUMBER.pack(layer))
    digest.update(slot[_DIGEST_BYTES:])
    return digest.digest()
