"""What one rank asks, reads and writes of a plan, cut into batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from asyncache.core import (
    KVLayout,
    LoadPlan,
    LookupPlan,
    Moved,
    OffloadPlan,
    PageHash,
    PageKey,
    PageSpace,
)

# What the loop may spend at once: a slice costs it a microsecond, however small.
_BATCH_SLICES = 1024


@dataclass(frozen=True, slots=True)
class Batch:
    """Pages of one pool, few enough to move at once."""

    pool: str
    space: PageSpace
    start: int
    pages: Sequence[int]
    hashes: Sequence[PageHash]

    @property
    def keys(self) -> list[PageKey]:
        """What the store calls these pages."""
        space = self.space
        return [PageKey(page_hash, space) for page_hash in self.hashes]


class Batches:
    """Cuts the plans of one rank.

    Args:
        layout: Pools that the plans are of.
        rank: Which shard of each page this rank holds.
        num_ranks: Shards of a page.
        batch_bytes: Bytes of a batch at most.

    Raises:
        ValueError: If a batch would not hold a page.
    """

    def __init__(
        self, layout: KVLayout, *, rank: int, num_ranks: int, batch_bytes: int
    ) -> None:
        self.spaces = [
            layout.space(pool, rank=rank, num_ranks=num_ranks) for pool in layout.pools
        ]
        # One rank writes what all of them hold, and all vouch for it: an offload has
        # succeeded only where it has on every rank.
        self._writes = [not pool.replicated or rank == 0 for pool in layout.pools]
        self.num_layers = max(space.num_layers for space in self.spaces)
        largest = max(space.page_bytes for space in self.spaces)
        if batch_bytes < largest:
            raise ValueError(f"batch_bytes must hold a page, {largest}: {batch_bytes}")
        self._batch_bytes = batch_bytes

    def most_pages(self, space: PageSpace) -> int:
        """Return how many pages of a space a batch has at most."""
        most = self._batch_bytes // space.page_bytes
        return max(1, min(most, _BATCH_SLICES // space.num_layers))

    def asked(self, plan: LookupPlan) -> list[PageKey]:
        """Return the pages that a lookup asks for, ask by ask."""
        return [
            PageKey(page_hash, self.spaces[ask.pool])
            for ask in plan.asks
            for page_hash in ask.hashes
        ]

    def answers(self, plan: LookupPlan, found: Iterable[bool]) -> list[list[bool]]:
        """Return what was found, in the order of :meth:`asked`, for each ask."""
        found = iter(found)
        return [[next(found) for _ in ask.hashes] for ask in plan.asks]

    def parent(self, plan: OffloadPlan) -> PageKey | None:
        """Return the page that must be there before those of an offload."""
        if plan.parent is None:
            return None
        return PageKey(plan.parent, self.spaces[plan.pieces[0].pool])

    def to_read(self, plan: LoadPlan) -> list[Batch]:
        """Return the batches of a load, by position: a bad page ends the run."""
        return self._cut_all(plan.pieces)

    def to_write(self, plan: OffloadPlan) -> list[Batch]:
        """Return the batches of an offload that are this rank's to write."""
        return self._cut_all(
            [piece for piece in plan.pieces if self._writes[piece.pool]]
        )

    def _cut_all(self, pieces: Sequence[Moved]) -> list[Batch]:
        batches = [batch for piece in pieces for batch in self._cut(piece)]
        return sorted(batches, key=lambda batch: batch.start)

    def _cut(self, piece: Moved) -> Iterator[Batch]:
        space = self.spaces[piece.pool]
        step = self.most_pages(space)
        for first in range(0, len(piece.pages), step):
            run = slice(first, first + step)
            start = piece.start + first
            pages, hashes = piece.pages[run], piece.hashes[run]
            yield Batch(space.pool, space, start, pages, hashes)
