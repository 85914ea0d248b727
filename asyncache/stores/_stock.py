"""What the threads of one store have in common: claimed slots, and pages used.

A transaction costs about as much as a small page. So slots are claimed for all the
pages that calls under way will still bring, and given back when no call is under way:
an idle claim would keep other spaces, and other processes, from a segment.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from asyncache.core import PageHash
from asyncache.stores._segment_index import Uses

_MOST_CLAIMED = 128
# How long others may not know which pages are used, and how many such there may be.
_UNTOLD_S = 1.0
_MOST_USED = 1 << 16
# So that a read is not delayed for long by telling of others.
_MOST_TOLD = 256


class Written(NamedTuple):
    """A page that is in a slot, and that nobody was told of.

    Args:
        hash: The page's.
        space: The number of its space in the index.
        slot: A claimed one.
        place: Where in its batch it is.
    """

    hash: PageHash
    space: int
    slot: int
    place: int


class Stock:
    """Claimed slots and used pages of a store. Any thread may call it.

    Args:
        notes_uses: Whether pages that were read are remembered as used.
    """

    def __init__(self, *, notes_uses: bool = True) -> None:
        self._notes_uses = notes_uses
        self._lock = threading.Lock()
        self._slots: defaultdict[int, list[int]] = defaultdict(list)
        self._surplus: list[int] = []
        self._used: dict[tuple[int, PageHash], None] = {}
        self._told_at_s = 0.0
        self._num_expected = 0

    def expect(self, num_pages: int) -> None:
        """Note that so many more pages will be written, or fewer if negative."""
        with self._lock:
            self._num_expected += num_pages

    def num_to_claim(self, short: int, most: int) -> int:
        """Return how many slots to claim where so many are short."""
        with self._lock:
            return max(short, min(self._num_expected, most, _MOST_CLAIMED))

    def take(self, space: int, count: int) -> list[int]:
        """Return up to so many claimed slots."""
        with self._lock:
            slots = self._slots[space]
            taken, slots[:] = slots[:count], slots[count:]
            return taken

    def give(self, space: int, slots: Sequence[int]) -> None:
        """Keep claimed slots for later."""
        with self._lock:
            self._slots[space] += slots

    def keep(self, written: Sequence[Written]) -> None:
        """Keep for later the slots of pages that nobody will be told of."""
        for one in written:
            self.give(one.space, [one.slot])

    def take_surplus(self, *, is_over: bool = False) -> list[int]:
        """Return the slots that no page is expected for; all of them if it is over."""
        with self._lock:
            if self._num_expected > 0 and not is_over:
                return []
            surplus, self._surplus = self._surplus, []
            for slots in self._slots.values():
                surplus += slots
            self._slots.clear()
            return surplus

    def put_back_surplus(self, slots: Sequence[int]) -> None:
        """Keep slots that could not be given back."""
        with self._lock:
            self._surplus += slots

    def note_used(self, space: int, hashes: Sequence[PageHash]) -> None:
        """Remember pages that were used, the last one last."""
        if not self._notes_uses:
            return
        with self._lock:
            for page_hash in hashes:
                use = (space, page_hash)
                self._used.pop(use, None)
                self._used[use] = None
            while len(self._used) > _MOST_USED:
                del self._used[next(iter(self._used))]

    def take_used(self) -> Uses:
        """Return the pages that were used since this was last asked."""
        with self._lock:
            used = list(self._used)
            self._used.clear()
            self._told_at_s = time.monotonic()
            return used

    @contextmanager
    def telling_uses(self) -> Iterator[Uses]:
        """Give the pages that were used; back if telling of them fails."""
        used = self.take_used()
        try:
            yield used
        except BaseException:
            self.put_back_used(used)
            raise

    def take_used_if_late(self) -> Uses:
        """Return some of them, the first ones, if it is time that others know."""
        now_s = time.monotonic()
        with self._lock:
            if now_s < self._told_at_s + _UNTOLD_S:
                return []
            self._told_at_s = now_s
            used = list(islice(self._used, _MOST_TOLD))
            for use in used:
                del self._used[use]
            return used

    def put_back_used(self, used: Uses) -> None:
        """Remember pages that could not be told of."""
        with self._lock:
            self._used = dict.fromkeys([*used, *self._used])
