"""Which bytes a copy moves: one table of addresses, for every kind of device.

In the buffer on the host the pages lie one after the other, the layers of each in
order. A table is made of whole columns at once, because there may be thousands of
pages and the event loop waits meanwhile. Rows that go on where the one before ends are
one row: an accelerator copies a few large pieces faster than many small ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncache.devices._pool import Cut, Pool

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of pages, each beside its own piece elsewhere.

    All three of shape [num_pieces], int64, contiguous: addresses in the pool,
    addresses of the other side, bytes.
    """

    pool: Ints
    other: Ints
    num_bytes: Ints

    def __len__(self) -> int:
        return len(self.num_bytes)


def to_numpy(pages: Sequence[int]) -> Ints:
    """Return page ids as int64, shape [num_pages]; fast for an ``array('i')``."""
    if isinstance(pages, array):
        return np.frombuffer(pages, dtype=pages.typecode).astype(np.int64)
    return np.fromiter(pages, dtype=np.int64, count=len(pages))


def buffer_pieces(pool: Pool, pages: Ints, layers: range, buffer: int) -> Pieces:
    """Return the pieces of some layers of pages, beside a buffer at an address."""
    cuts, row_bytes = pool.cuts(layers), len(layers) * pool.space.layer_bytes
    starts = np.array([[buffer + cut.offset] for cut in cuts])
    # Pages that are neighbours in the pool are so in the buffer if each is one piece.
    runs = _runs(pages) if len(cuts) == 1 and _is_whole(cuts[0]) else None
    rows = np.arange(len(pages)) if runs is None else runs.firsts
    return _pieces(cuts, pages, runs, starts + rows * row_bytes)


def page_pieces(pool: Pool, sources: Ints, targets: Ints) -> Pieces:
    """Return the pieces of all layers of target pages, beside those of sources."""
    cuts = pool.cuts(range(pool.space.num_layers))
    runs = _runs(targets, sources) if all(map(_is_whole, cuts)) else None
    origins = sources if runs is None else sources[runs.firsts]
    return _pieces(cuts, targets, runs, _addresses(cuts, origins))


class _Runs(NamedTuple):
    """Pages that follow one another: where each run begins, and how long it is."""

    firsts: Ints
    lengths: Ints


def _runs(*columns: Ints) -> _Runs | None:
    """Return the runs in which all columns count up by one; None if there are none."""
    goes_on = columns[0][1:] == columns[0][:-1] + 1
    for column in columns[1:]:
        goes_on &= column[1:] == column[:-1] + 1
    if not goes_on.any():
        return None
    firsts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    return _Runs(firsts, np.diff(firsts, append=len(columns[0])))


def _is_whole(cut: Cut) -> bool:
    """Return whether a cut of one page goes on where that of the page before ends."""
    return cut.start == 0 and cut.num_bytes == cut.region.page_stride


def _addresses(cuts: Sequence[Cut], pages: Ints) -> Ints:
    """Return where cuts begin in pages, shape [num_cuts, num_pages]."""
    strides = np.array([[cut.region.page_stride] for cut in cuts])
    starts = np.array([[cut.region.address + cut.start] for cut in cuts])
    addresses: Ints = pages * strides
    addresses += starts
    return addresses


def _pieces(
    cuts: Sequence[Cut], pages: Ints, runs: _Runs | None, other: Ints
) -> Pieces:
    """Return pieces cut by cut; a run of pages is one piece."""
    sizes = np.array([cut.num_bytes for cut in cuts])
    if runs is None:
        pool, num_bytes = _addresses(cuts, pages), np.repeat(sizes, len(pages))
    else:
        pool = _addresses(cuts, pages[runs.firsts])
        num_bytes = np.multiply.outer(sizes, runs.lengths).ravel()
    return Pieces(pool.ravel(), other.ravel(), num_bytes)
