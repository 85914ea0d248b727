"""What the core asks its driver to do, once a call or a verdict is over.

Effects are values. The driver carries them out in order after the core has returned,
so that nothing they set off can find the core half-way through a change.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from asyncache.core._hashes import PageHash, tag_of

if TYPE_CHECKING:
    from asyncache.core._agenda import Request


class Asked(NamedTuple):
    """Pages of one pool to look up."""

    pool: int
    start: int
    hashes: Sequence[PageHash]


class Moved(NamedTuple):
    """Pages of one pool to move, at consecutive positions."""

    pool: int
    start: int
    pages: array[int]
    hashes: Sequence[PageHash]


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """What a lookup asks the store.

    Args:
        seq: The transaction.
        start: Boundary that is resident.
        end: Longest boundary wanted.
        asks: Pages to look for, a run a pool.
        windows: For each window or state pool (pool, window, origin, present): a byte
            a position from ``origin`` on, 1 where the page is resident. A state pool's
            window is 1, and its page the state at the end of that position.
    """

    seq: int
    start: int
    end: int
    asks: tuple[Asked, ...]
    windows: tuple[tuple[int, int, int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Pages that a load brings from the store."""

    seq: int
    start: int
    """Position that the claim counts from."""
    end: int
    pieces: tuple[Moved, ...]
    is_prefetch: bool = False
    """Whether nobody waits for it; :class:`Hurry` follows if somebody does."""


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """Pages that an offload takes to the store.

    ``parent`` is the last page before them, which must be in the store too; None at
    the root.
    """

    seq: int
    start: int
    end: int
    pieces: tuple[Moved, ...]
    parent: PageHash | None

    @property
    def tag(self) -> bytes:
        """The tag of the pages' namespace: no plan has pages of two."""
        return tag_of(self.pieces[0].hashes[0])


@dataclass(frozen=True, slots=True)
class AskStore:
    """Look pages up; answer with boundaries, or give up, then be quiet."""

    plan: LookupPlan


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Bring pages; sink the claim at the first bad one; be quiet when all is still."""

    plan: LoadPlan


@dataclass(frozen=True, slots=True)
class Hurry:
    """A load that began as a prefetch is waited for now."""

    seq: int


@dataclass(frozen=True, slots=True)
class StartOffload:
    """Take pages to the store; be quiet when nothing reads them any more."""

    plan: OffloadPlan


@dataclass(frozen=True, slots=True)
class OfferOffload:
    """Be quiet once this rank has room and reason to offload so many pages.

    ``tag`` is that of their namespace: a store may be full for one and not for others.
    """

    seq: int
    num_pages: int
    attempts: int
    tag: bytes


@dataclass(frozen=True, slots=True)
class Stop:
    """Nobody waits for a transaction any more.

    A load or an offload stops early, and is quiet when it is still. A lookup or a
    ready has ended already: whoever works on it, or a timer of it, may go, and what it
    votes counts no more.
    """

    seq: int


@dataclass(frozen=True, slots=True)
class Restored:
    """A restore's boundary is agreed: the hit is ``num_pages`` long for now."""

    request: Request
    num_pages: int


@dataclass(frozen=True, slots=True)
class Shortened:
    """A hit sank to ``num_pages``: what was computed above it counts for nothing."""

    request: Request
    num_pages: int


@dataclass(frozen=True, slots=True)
class Settled:
    """All that a request's hit stands on has landed."""

    request: Request
    num_pages: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A request holds nothing any more, or nothing but quarantine."""

    request: Request
    aborted: bool


class FactKind(Enum):
    """What happened to pages; counted in statistics and told to observers."""

    LANDED = auto()
    LOAD_CUT = auto()
    STORED = auto()
    OFFLOAD_FAILED = auto()
    OFFLOAD_FORGOTTEN = auto()
    EVICTED = auto()
    EVICTED_UNSAVED = auto()
    RESET = auto()
    PUBLISHED = auto()


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that happened to ``num_pages`` positions, for observers."""

    kind: FactKind
    num_pages: int
    hashes: tuple[PageHash, ...] = ()


@dataclass(frozen=True, slots=True)
class PagesCached:
    """Pages of one pool that anyone may be given as a hit from now on.

    Told before the :class:`Fact` of the change that brought them, and only where
    somebody observes. ``parent`` is the page before the first of them; what keeps a
    radix tree of its own hangs them there. A pool of states has one page a boundary: it
    goes by the page that ends there.
    """

    pool: str
    hashes: tuple[PageHash, ...]
    parent: PageHash


@dataclass(frozen=True, slots=True)
class PagesDropped:
    """Pages of one pool that nobody is given any more. A RESET drops all there are."""

    pool: str
    hashes: tuple[PageHash, ...]


Effect = (
    AskStore
    | StartLoad
    | Hurry
    | StartOffload
    | OfferOffload
    | Stop
    | Restored
    | Shortened
    | Settled
    | Ended
    | Fact
    | PagesCached
    | PagesDropped
)
