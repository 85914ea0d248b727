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
    page_bytes = len(layers) * pool.space.layer_bytes
    rows = buffer + np.arange(len(pages)) * page_bytes
    return _joined(
        [
            (_addresses(cut, pages), rows + cut.offset, cut.num_bytes)
            for cut in pool.cuts(layers)
        ]
    )


def page_pieces(pool: Pool, sources: Ints, targets: Ints) -> Pieces:
    """Return the pieces of all layers of target pages, beside those of sources."""
    cuts = pool.cuts(range(pool.space.num_layers))
    return _joined(
        [
            (_addresses(cut, targets), _addresses(cut, sources), cut.num_bytes)
            for cut in cuts
        ]
    )


def _addresses(cut: Cut, pages: Ints) -> Ints:
    return pages * cut.region.page_stride + (cut.region.address + cut.start)


def _joined(columns: Sequence[tuple[Ints, Ints, int]]) -> Pieces:
    pool = np.concatenate([column[0] for column in columns])
    other = np.concatenate([column[1] for column in columns])
    sizes = np.repeat(np.array([column[2] for column in columns]), len(columns[0][0]))
    goes_on = (pool[1:] == pool[:-1] + sizes[:-1]) & (
        other[1:] == other[:-1] + sizes[:-1]
    )
    if not goes_on.any():
        return Pieces(pool, other, sizes)
    starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    return Pieces(pool[starts], other[starts], np.add.reduceat(sizes, starts))
