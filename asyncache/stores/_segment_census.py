"""What the index of a SegmentStore says of all its pages, a bounded part at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from asyncache.core import HASH_BYTES, PageHash, PageSpace
from asyncache.stores._frame import Frame
from asyncache.stores._segment_database import SegmentDatabase
from asyncache.stores._segment_files import slot_bytes

_MOST_PAGES = 1024


@dataclass(frozen=True, slots=True)
class SegmentUsage:
    """How full a directory of segments is."""

    num_bytes: int
    """Of all segments."""
    free_bytes: int
    """Of slots in which nothing is, and of segments that nobody has cut into slots."""
    num_claims: int
    """Slots that live processes may be writing."""
    num_dead_claims: int
    """Slots that dead ones were: whoever is short of slots takes them."""


def spaces(database: SegmentDatabase) -> list[tuple[int, PageSpace]]:
    """Return the spaces that have a number, with it."""
    found = []
    for number, name in database.all("SELECT id, name FROM space ORDER BY id"):
        with suppress(ValueError):  # of a broken index
            found.append((number, PageSpace.from_name(name)))
    return found


def page_hashes(database: SegmentDatabase, space: int, after: bytes) -> list[PageHash]:
    """Return the next pages of a space, in the order of their hashes; none at its end.

    Args:
        database: This thread's.
        space: Its number.
        after: The last hash that is known; empty at first.
    """
    rows = database.all(
        "SELECT hash FROM page WHERE space = ? AND hash > ? AND length(hash) = ?"
        " ORDER BY hash LIMIT ?",
        space,
        after,
        HASH_BYTES,
        _MOST_PAGES,
    )
    return [PageHash(page_hash) for (page_hash,) in rows]


def usage(
    database: SegmentDatabase, *, segment_bytes: int, is_alive: Callable[[str], bool]
) -> SegmentUsage:
    """Return how full the segments are, about: others may change that meanwhile.

    Args:
        database: This thread's.
        segment_bytes: Length of a segment.
        is_alive: Whether whoever claims slots may still write them.
    """
    [(num_segments, num_spare)] = database.all(
        "SELECT count(*), count(*) - count(space) FROM segment"
    )
    free: dict[int, int] = dict(
        database.all("SELECT space, count(*) FROM free GROUP BY space")
    )
    sizes = {number: slot_bytes(Frame(space)) for number, space in spaces(database)}
    claims = database.all("SELECT owner, count(*) FROM claim GROUP BY owner")
    num_claims = sum(count for _, count in claims)
    num_alive = sum(count for owner, count in claims if is_alive(owner))
    return SegmentUsage(
        num_bytes=num_segments * segment_bytes,
        free_bytes=num_spare * segment_bytes
        + sum(count * sizes.get(number, 0) for number, count in free.items()),
        num_claims=num_alive,
        num_dead_claims=num_claims - num_alive,
    )
