"""Tokens as the core sees them: packed little-endian int32, compared by memcmp."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable

TOKEN_BYTES = 4
MAX_TOKEN = 2**31 - 1

Tokens = Iterable[int] | memoryview


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
        raise ValueError(f"token ids must be in [0, {MAX_TOKEN}], got a negative id")
    return packed


def _pack_ints(tokens: list[int]) -> bytes:
    kinds = set(map(type, tokens))
    if bool in kinds:
        raise TypeError("tokens must be ints, got a bool")
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        for place, token in enumerate(tokens):
            if type(token) is not int:
                name = type(token).__name__
                raise TypeError(
                    f"tokens must be ints, got {name} at {place}"
                ) from error
            if not 0 <= token <= MAX_TOKEN:
                raise ValueError(
                    f"token ids must be in [0, {MAX_TOKEN}], got {token} at {place}"
                ) from error
        raise


def _pack_buffer(view: memoryview) -> bytes:
    if view.ndim != 1:
        raise ValueError(f"tokens must have 1 dimension, not {view.ndim}")
    if view.format not in {
        "b",
        "B",
        "h",
        "H",
        "i",
        "I",
        "l",
        "L",
        "q",
        "Q",
        "<i",
        "=i",
    }:
        raise TypeError(f"tokens must be integers, not of format {view.format!r}")
    if view.format in {"i", "<i", "=i"} and sys.byteorder == "little":
        return view.tobytes()
    return _pack_ints(view.tolist())
