"""What the index of a SegmentStore says of all its pages, a bounded part at a time."""

from __future__ import annotations

from contextlib import suppress

from asyncache.core import HASH_BYTES, PageHash, PageSpace
from asyncache.stores._segment_database import SegmentDatabase

_MOST_PAGES = 1024


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
