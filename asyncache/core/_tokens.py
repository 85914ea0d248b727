"""Tokens as the core sees them: packed little-endian int32, compared by memcmp."""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import NoReturn

TOKEN_BYTES = 4
MAX_TOKEN = 2**31 - 1
CONTENT_BIT = 2**30
MIN_DIGEST_BYTES = 16

Tokens = Iterable[int] | memoryview

_INT32 = {"i", "<i", "=i"}
_INTEGERS = _INT32 | set("bBhHIlLqQ")


def pack_tokens(tokens: Tokens) -> bytes:
    """Return token ids as packed little-endian int32.

    Args:
        tokens: Token ids in [0, 2**31), shape [num_tokens]: a sequence of int, or any
            one-dimensional buffer of integers such as ``array("i")``.

    Raises:
        TypeError: If an item is a float or a bool, or the buffer is not of integers.
        ValueError: If an id is out of range, the shape is not one-dimensional, or
            there are no tokens.
    """
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]  # asks whether it is one
    except TypeError:
        packed = _pack_ints(list(tokens))
    else:
        packed = _pack_buffer(view)
    if not packed:
        raise ValueError("tokens are empty; at least 1 token is needed")
    # The top bit of each id: isascii() finds a set one at the speed of memchr.
    if not packed[3::4].isascii():
        _refuse_out_of_range(struct.unpack(f"<{len(packed) // 4}i", packed))
    return packed


def content_tokens(digest: bytes, count: int) -> array[int]:
    """Return token ids that stand for an image, a sound, or other content.

    A model sees the same placeholder for every image; a cache must not. These ids are
    a function of the content's digest, spread so that already nine of them tell as
    much as 256 bits can. They lie in [2**30, 2**31): no vocabulary reaches there.

    Args:
        digest: A cryptographic digest of the content, of 16 bytes or more.
        count: Placeholders, shape of the result [count], int32.

    Raises:
        ValueError: If the digest is shorter, or ``count`` is below 1.
    """
    if len(digest) < MIN_DIGEST_BYTES:
        raise ValueError(f"a digest has at least 16 bytes, not {len(digest)}")
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    stream = bytearray()
    for block in range(-(-count * TOKEN_BYTES // 32)):
        stream += hashlib.sha256(digest + struct.pack("<q", block)).digest()
    words = struct.unpack(f"<{count}I", stream[: count * TOKEN_BYTES])
    return array("i", [word >> 2 | CONTENT_BIT for word in words])


def _pack_ints(tokens: list[int]) -> bytes:
    # A bool packs as an int does, and so may any object that has an __index__.
    for kind in set(map(type, tokens)):
        if kind is bool or not issubclass(kind, Integral):
            place = next(i for i, token in enumerate(tokens) if type(token) is kind)
            raise TypeError(f"tokens must be ints, got {kind.__name__} at {place}")
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error:
        _refuse_out_of_range(tokens)


def _refuse_out_of_range(tokens: Sequence[int]) -> NoReturn:
    place = next(i for i, token in enumerate(tokens) if not 0 <= token <= MAX_TOKEN)
    raise ValueError(
        f"token ids must be in [0, {MAX_TOKEN}], got {tokens[place]} at {place}"
    )


def _pack_buffer(view: memoryview) -> bytes:
    if view.ndim != 1:
        raise ValueError(f"tokens must have 1 dimension, not {view.ndim}")
    if view.format not in _INTEGERS:
        raise TypeError(f"tokens must be integers, not of format {view.format!r}")
    if view.format in _INT32 and sys.byteorder == "little":
        return view.tobytes()
    return _pack_ints(view.tolist())
