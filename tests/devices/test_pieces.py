"""The table of a copy moves the bytes that a loop over bytes would."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import given, strategies as st

from asyncache.core import PageSpace
from asyncache.devices._pieces import Pieces, buffer_pieces, page_pieces, to_numpy
from asyncache.devices._pool import Pool, build_pool

BUFFER = 1 << 40
"""An address that no pool has."""


class Lie(NamedTuple):
    """Where the slices of a pool are, in bytes from its first."""

    num_pages: int
    layer_bytes: int
    page_stride: int
    starts: list[int]


@st.composite
def lies(draw):
    """Draw page-first and layer-first pools, their layers in any order, with gaps."""
    num_pages, num_layers = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    size = draw(st.integers(1, 5))
    inner = size + draw(st.sampled_from([0, 0, 1, 3]))
    outer_gap = draw(st.sampled_from([0, 0, 2]))
    places = draw(st.one_of(st.just(range(num_layers)), permuted(num_layers)))
    if draw(st.booleans()):
        stride, layer_stride = num_layers * inner + outer_gap, inner
    else:
        stride, layer_stride = inner, num_pages * inner + outer_gap
    return Lie(num_pages, size, stride, [place * layer_stride for place in places])


def permuted(count):
    return st.permutations(range(count))


def make_pool(lie: Lie) -> Pool:
    shape = (len(lie.starts), lie.layer_bytes)
    space = PageSpace(pool="s", shard="all", dtype="uint8", shape=shape)
    reach = max(lie.starts) + (lie.num_pages - 1) * lie.page_stride + lie.layer_bytes
    arena = torch.zeros(reach, dtype=torch.uint8)
    pages, strides = (lie.num_pages, lie.layer_bytes), (lie.page_stride, 1)
    layers = [arena.as_strided(pages, strides, start) for start in lie.starts]
    return build_pool(space, layers, None)


def slice_at(pool: Pool, page: int, layer: int) -> range:
    """Return the addresses of a layer of a page."""
    start = pool.layers[layer][page].data_ptr()
    return range(start, start + pool.space.layer_bytes)


def moved(pieces: Pieces) -> list[tuple[int, int]]:
    """Return which byte goes beside which, one by one, in order."""
    return sorted(
        (in_pool + offset, elsewhere + offset)
        for in_pool, elsewhere, size in zip(
            pieces.pool.tolist(),
            pieces.other.tolist(),
            pieces.num_bytes.tolist(),
            strict=True,
        )
        for offset in range(size)
    )


def check_form(pieces: Pieces) -> None:
    """Check that a driver can be given the columns, and no row goes on in the next."""
    for column in (pieces.pool, pieces.other, pieces.num_bytes):
        assert column.dtype == np.int64
        assert column.flags.c_contiguous
        assert len(column) == len(pieces)
    assert (pieces.num_bytes > 0).all()
    ends = pieces.pool[:-1] + pieces.num_bytes[:-1] == pieces.pool[1:]
    others = pieces.other[:-1] + pieces.num_bytes[:-1] == pieces.other[1:]
    assert not (ends & others).any()


@given(lie=lies(), data=st.data())
def test_pieces_beside_a_buffer_are_the_bytes_of_the_pages(lie, data):
    pool, num_layers = make_pool(lie), len(lie.starts)
    pages = data.draw(st.lists(st.integers(0, lie.num_pages - 1), max_size=6))
    first = data.draw(st.integers(0, num_layers - 1))
    layers = range(first, data.draw(st.integers(first + 1, num_layers)))
    pieces = buffer_pieces(pool, to_numpy(pages), layers, BUFFER)
    addresses = [
        address
        for page in pages
        for layer in layers
        for address in slice_at(pool, page, layer)
    ]
    expected = sorted((address, BUFFER + n) for n, address in enumerate(addresses))
    assert moved(pieces) == expected
    check_form(pieces)


@given(lie=lies(), data=st.data())
def test_pieces_of_pages_beside_pages_are_their_bytes(lie, data):
    pool = make_pool(lie)
    order = data.draw(permuted(lie.num_pages))
    num_targets = data.draw(st.integers(0, lie.num_pages - 1))
    targets, rest = order[:num_targets], order[num_targets:]
    sources = [data.draw(st.sampled_from(rest)) for _ in targets]
    pieces = page_pieces(pool, to_numpy(sources), to_numpy(targets))
    expected = sorted(
        pair
        for source, target in zip(sources, targets, strict=True)
        for layer in range(len(lie.starts))
        for pair in zip(
            slice_at(pool, target, layer), slice_at(pool, source, layer), strict=True
        )
    )
    assert moved(pieces) == expected
    check_form(pieces)


def test_pages_that_are_neighbours_are_one_piece():
    pool = make_pool(Lie(num_pages=8, layer_bytes=4, page_stride=12, starts=[0, 4, 8]))
    pages = to_numpy([2, 3, 4, 0, 1, 7])
    pieces = buffer_pieces(pool, pages, range(3), BUFFER)
    assert pieces.num_bytes.tolist() == [36, 24, 12]
    assert len(buffer_pieces(pool, pages, range(1, 2), BUFFER)) == 6
