"""Pages to test a store with: keys nobody used before, bytes that the key tells."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence

from asyncache.core import PageHash, PageKey, PageSpace

Cut = Callable[[PageSpace], list[int]]
"""Returns the lengths of the buffers that a page is cut into."""

SPACE = PageSpace("kv", "0of1", "uint8", (4, 2, 4, 2, 8))
OTHER_SPACE = PageSpace("kv", "0of2", "uint8", (4, 2, 4, 2, 8))
# 128 KiB a page, so that a batch of a few can be cancelled in the middle.
LARGE_SPACE = PageSpace("kv", "0of1", "uint8", (4, 2, 16, 16, 64))


def new_keys(count: int, space: PageSpace = SPACE) -> list[PageKey]:
    """Return keys of pages that no store has yet."""
    return [PageKey(PageHash(secrets.token_bytes(32)), space) for _ in range(count)]


def content(key: PageKey) -> bytes:
    """Return the bytes of a page, different for different keys."""
    return hashlib.shake_128(key.name.encode()).digest(key.space.page_bytes)


def one_buffer(space: PageSpace) -> list[int]:
    """Cut a page into one buffer."""
    return [space.page_bytes]


def one_a_layer(space: PageSpace) -> list[int]:
    """Cut a page into its layer slices."""
    return [space.layer_bytes] * space.num_layers


def uneven(space: PageSpace) -> list[int]:
    """Cut a page behind its first layer."""
    return [space.layer_bytes, space.page_bytes - space.layer_bytes]


CUTS: Sequence[Cut] = (one_buffer, one_a_layer, uneven)


def views(memory: bytes | bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """Return memory cut into buffers of these lengths."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(memoryview(memory)[start : start + size])
        start += size
    return pieces


def new_target(key: PageKey, layers: range | None = None) -> list[memoryview]:
    """Return one buffer of zeros for a page's layers."""
    num_layers = key.space.num_layers if layers is None else len(layers)
    return [memoryview(bytearray(num_layers * key.space.layer_bytes))]


def new_source(key: PageKey) -> list[memoryview]:
    """Return a page's bytes in one writable buffer."""
    return [memoryview(bytearray(content(key)))]


def fill(pages: Sequence[Sequence[memoryview]], byte: bytes) -> None:
    """Overwrite every buffer of these pages with one byte."""
    for page in pages:
        for buffer in page:
            buffer[:] = byte * len(buffer)
