"""Where the pages of a device lie, for a transport that moves them itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from asyncache.devices._pieces import Ints
from asyncache.devices._pool import Pool


class Span(NamedTuple):
    """A piece of memory; whoever keeps ``owner`` keeps the memory."""

    address: int
    num_bytes: int
    owner: object


class Whereabouts(NamedTuple):
    """Where pages of one pool are, each in as many pieces as the others.

    ``addresses`` of shape [num_pages, num_pieces], ``num_bytes`` of shape [num_pieces];
    the pieces in layer order, together all bytes of a page.
    """

    addresses: list[list[int]]
    num_bytes: list[int]


def whereabouts(pool: Pool, pages: Ints) -> Whereabouts:
    """Return where pages of a pool are: a piece a region."""
    columns = [
        (pages * region.page_stride + region.address).tolist()
        for region in pool.regions
    ]
    rows = [list(row) for row in zip(*columns, strict=True)]
    return Whereabouts(rows, [region.page_bytes for region in pool.regions])


def spans(pools: Iterable[Pool]) -> list[Span]:
    """Return the memory of pools, in order; regions that interleave are one span."""
    merged: list[Span] = []
    for span in sorted(
        (span for pool in pools for span in _spans(pool)), key=lambda span: span.address
    ):
        last = merged[-1] if merged else None
        # Not where they merely touch: that may be two allocations.
        if last is None or span.address >= last.address + last.num_bytes:
            merged.append(span)
        else:
            end = max(last.address + last.num_bytes, span.address + span.num_bytes)
            owners = (last.owner, span.owner)
            merged[-1] = Span(last.address, end - last.address, owners)
    return merged


def _spans(pool: Pool) -> Sequence[Span]:
    return [
        Span(
            region.address,
            region.num_bytes(pool.num_pages),
            pool.layers[region.layers.start],
        )
        for region in pool.regions
    ]
