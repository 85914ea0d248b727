"""Who holds each page of one pool: the only place where pages change hands.

Each page is in exactly one state; the sum over states is the pool, always.

====================  ============================  ====================================
from                  to                            when
====================  ============================  ====================================
FREE                  REQUEST                       a request extends
FREE                  TRANSIT                       a load starts: bytes will land in it
REQUEST               TREE                          a commit publishes it
TRANSIT               TREE                          its load landed
REQUEST, TRANSIT      QUARANTINE                    given up, but something may touch it
REQUEST, TREE         FREE                          given up, and nothing touches it
TRANSIT               FREE                          its load was never started
QUARANTINE            FREE                          nothing touches it any more
====================  ============================  ====================================
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import IntEnum

from asyncache.core._errors import broken, require


class PageState(IntEnum):
    """Who holds a page."""

    FREE = 0
    REQUEST = 1
    TREE = 2
    TRANSIT = 3
    QUARANTINE = 4


_LEGAL = {
    (PageState.FREE, PageState.REQUEST),
    (PageState.FREE, PageState.TRANSIT),
    (PageState.REQUEST, PageState.TREE),
    (PageState.TRANSIT, PageState.TREE),
    (PageState.REQUEST, PageState.QUARANTINE),
    (PageState.TRANSIT, PageState.QUARANTINE),
    (PageState.REQUEST, PageState.FREE),
    (PageState.TREE, PageState.FREE),
    (PageState.TRANSIT, PageState.FREE),
    (PageState.QUARANTINE, PageState.FREE),
}


class Ledger:
    """The states of one pool's pages."""

    __slots__ = ("_free", "_num", "_state", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # Popped from the end: page ids come out ascending, so that neighbours in a
        # prompt are neighbours in memory and their copies merge.
        self._free = list(range(num_pages - 1, -1, -1))
        self._state = bytearray(num_pages)
        self._num = [0] * len(PageState)
        self._num[PageState.FREE] = num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def count(self, state: PageState) -> int:
        """Return how many pages are in a state."""
        return self._num[state]

    @property
    def counts(self) -> tuple[int, ...]:
        """Pages in each state, in the order of :class:`PageState`."""
        return tuple(self._num)

    def state(self, page: int) -> PageState:
        """Return who holds a page."""
        return PageState(self._state[page])

    def take(self, num_pages: int, state: PageState) -> array[int]:
        """Take free pages, which there must be."""
        free = self._free
        require(len(free) >= num_pages, "pages are free", num_pages, len(free))
        if not num_pages:
            return array("i")
        pages = array("i", reversed(free[-num_pages:]))
        del free[-num_pages:]
        self._mark(pages, PageState.FREE, state)
        return pages

    def move(self, pages: Iterable[int], was: PageState, now: PageState) -> None:
        """Change who holds pages; ``now`` must not be FREE."""
        require(now is not PageState.FREE, "pages become free through give()")
        self._mark(pages, was, now)

    def give(self, pages: array[int] | list[int], was: PageState) -> None:
        """Make pages free."""
        self._mark(pages, was, PageState.FREE)
        self._free.extend(reversed(pages))

    def _mark(self, pages: Iterable[int], was: PageState, now: PageState) -> None:
        require((was, now) in _LEGAL, "a page may change hands so", was, now)
        state, count = self._state, 0
        for page in pages:
            if state[page] != was:
                broken("a page is where its holder says", page, state[page], was)
            state[page] = now
            count += 1
        self._num[was] -= count
        self._num[now] += count

    def check(self, held: bytes) -> None:
        """Raise InvariantError unless counts, states and the free list agree.

        Args:
            held: The state of each page by those who hold it, shape [num_pages].
        """
        if held != self._state:
            page = next(p for p in range(self.num_pages) if held[p] != self._state[p])
            names = PageState(held[page]), self.state(page)
            broken("the ledger knows the place", page, *names)
        for state in PageState:
            found = held.count(state)
            require(found == self._num[state], "counts match", state, found)
        free = set(self._free)
        num_free = self._num[PageState.FREE]
        require(num_free == len(self._free) == len(free), "free pages are listed once")
        require(not any(held[page] for page in free), "listed pages are free")

    def dump(self) -> tuple[object, ...]:
        """Return all of it, for comparing replicas."""
        return (bytes(self._state), tuple(self._free))
