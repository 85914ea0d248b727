"""Pages of one put that are in their slots, before anybody is told of them.

A transaction costs about as much as a small page, so a put has one for all of its
pages: the job that ends last tells of them, or one that finds out that it should stop.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from asyncache.core import PageHash, PageSpace


class Written(NamedTuple):
    """A page that is in a slot.

    Args:
        hash: The page's.
        space: The number of its space in the index.
        slot: A claimed one.
        places: Where in the batch it is; a caller may name a page twice.
    """

    hash: PageHash
    space: int
    slot: int
    places: Sequence[int]


class Batch:
    """The pages of one put. Any thread may call it.

    Args:
        num_pages: How many there are.
    """

    def __init__(self, num_pages: int) -> None:
        self._lock = threading.Lock()
        self._num_left = num_pages
        self._written: defaultdict[PageSpace, list[Written]] = defaultdict(list)

    @property
    def num_left(self) -> int:
        """Pages that no job has dealt with."""
        return self._num_left

    def add(self, space: PageSpace, written: Sequence[Written]) -> None:
        """Keep pages until somebody takes them."""
        if written:
            with self._lock:
                self._written[space] += written

    def count_down(self, num_pages: int) -> bool:
        """Take note that a job has dealt with pages; return whether none is left."""
        with self._lock:
            self._num_left -= num_pages
            return not self._num_left

    def tell(
        self,
        publish: Callable[[PageSpace, Sequence[Written]], None],
        *,
        keep: Callable[[Sequence[Written]], None],
    ) -> bool:
        """Tell of the pages that are in their slots; return whether there were any.

        Where that fails, the slots of those that nobody was told of are kept.
        """
        left = self.take()
        has_any = bool(left)
        try:
            while left:
                publish(*left.popitem())
        finally:
            for written in left.values():
                keep(written)
        return has_any

    def take(self) -> dict[PageSpace, list[Written]]:
        """Return the pages that are in their slots, and have them no more."""
        with self._lock:
            written, self._written = self._written, defaultdict(list)
        return written
