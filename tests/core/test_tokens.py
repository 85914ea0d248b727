"""Tokens are ids in [0, 2**31), whatever they come in; anything else is refused."""

from __future__ import annotations

import re
import struct
from array import array

import numpy as np
import pytest
from hypothesis import given, strategies as st

from asyncache.core import MAX_TOKEN, pack_tokens


def named(value: object) -> str:
    """Return what it is, without where: processes that share the tests differ there."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


IDS = [0, 1, 255, 70_000, MAX_TOKEN]
PACKED = struct.pack("<5i", *IDS)


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        iter(IDS),
        (token for token in IDS),
        array("i", IDS),
        array("q", IDS),
        array("L", IDS),
        memoryview(array("i", IDS)),
        np.array(IDS, dtype=np.int32),
        np.array(IDS, dtype=np.int64),
        np.array(IDS, dtype=np.uint32),
        [np.int64(token) for token in IDS],
        np.repeat(np.array(IDS, dtype=np.int32), 2)[::2],
    ],
    ids=named,
)
def test_any_sequence_or_buffer_of_ints_packs_alike(tokens):
    assert pack_tokens(tokens) == PACKED


def test_small_ints_and_bytes_are_one_token_an_item():
    assert pack_tokens(b"\0\1\xff") == struct.pack("<3i", 0, 1, 255)
    assert pack_tokens(array("h", [7, 8])) == struct.pack("<2i", 7, 8)


def test_int32_of_the_other_byte_order_is_refused_not_misread():
    with pytest.raises(TypeError, match="not of format '>i'"):
        pack_tokens(np.array(IDS, dtype=">i4"))


def test_int32_is_packed_by_value_on_a_machine_of_the_other_byte_order(monkeypatch):
    monkeypatch.setattr("sys.byteorder", "big")
    assert pack_tokens(array("i", IDS)) == PACKED


@given(st.lists(st.integers(0, MAX_TOKEN), min_size=1))
def test_packing_loses_nothing(tokens):
    packed = pack_tokens(tokens)
    assert list(struct.unpack(f"<{len(tokens)}i", packed)) == tokens
    assert pack_tokens(array("i", tokens)) == packed


class Index:
    """An object that packs as an int, as a tensor does."""

    def __index__(self) -> int:
        return 5


@pytest.mark.parametrize(
    ("tokens", "error", "says"),
    [
        ([1, 2.0], TypeError, "must be ints, got float at 1"),
        ([1.5], TypeError, "got float at 0"),
        ([3, True], TypeError, "got bool at 1"),
        ([1, "2"], TypeError, "got str at 1"),
        ([None], TypeError, "got NoneType at 0"),
        ("12", TypeError, "got str at 0"),
        ([[1, 2], [3, 4]], TypeError, "got list at 0"),
        ([1, Index()], TypeError, "got Index at 1"),
        ([np.bool_(1)], TypeError, "got bool"),
        (np.array([1.0]), TypeError, "not of format 'd'"),
        (np.array([1.0], dtype=np.float32), TypeError, "not of format 'f'"),
        (np.array([True]), TypeError, r"not of format '\?'"),
        (np.array([[1, 2]], dtype=np.int32), ValueError, "1 dimension, not 2"),
        (np.array(7, dtype=np.int32), ValueError, "1 dimension, not 0"),
        ([], ValueError, "empty; at least 1 token"),
        (array("i"), ValueError, "empty"),
        (b"", ValueError, "empty"),
        (np.zeros(0, dtype=np.int64), ValueError, "empty"),
        ([4, -1], ValueError, r"in \[0, 2147483647\], got -1 at 1"),
        ([4, 2**31], ValueError, "got 2147483648 at 1"),
        ([2**80], ValueError, "got 1208925819614629174706176 at 0"),
        ([-(2**31) - 1], ValueError, "got -2147483649 at 0"),
        (array("i", [9, 9, -3]), ValueError, "got -3 at 2"),
        (np.array([2**31]), ValueError, "got 2147483648 at 0"),
        (np.array([-1]), ValueError, "got -1 at 0"),
        (12, TypeError, "not iterable"),
        (None, TypeError, "not iterable"),
    ],
    ids=named,
)
def test_bad_tokens_are_refused_with_value_and_place(tokens, error, says):
    with pytest.raises(error, match=says):
        pack_tokens(tokens)
