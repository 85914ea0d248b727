"""What each namespace may keep in a SegmentStore. Blocking, for one thread.

The index counts the pages of every namespace. Whose new pages are over its bound loses
those of its own that were used longest ago, right after: so it is over by what is being
written at most, and nobody else's pages pay for it but those that made room meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from asyncache.core import HASH_BYTES, TAG_BYTES, Namespace, PageHash
from asyncache.stores._namespaces import by_tag
from asyncache.stores._segment_database import SegmentDatabase
from asyncache.stores._segment_index import Place, SegmentIndex

# Finding the oldest pages of a namespace looks at all of them: so not for each one.
_MOST_LEFT = 31 / 32


class Quotas:
    """Bounds in bytes. Immutable: all threads share them.

    Args:
        most: Of each namespace, or of those that are named; the others have none then.

    Raises:
        ValueError: If a bound is negative, or two namespaces have one tag.
        TypeError: If a bound is no int, or a namespace no such thing.
    """

    def __init__(self, most: int | Mapping[Namespace, int] | None) -> None:
        self._by_tag: dict[bytes, int] = {}
        self._every: int | None = None
        if isinstance(most, Mapping):
            self._by_tag = by_tag({name: _checked(most[name]) for name in most})
        elif most is not None:
            self._every = _checked(most)

    def of(self, tag: bytes) -> int | None:
        """Return what the namespace with a tag may keep; None if all that there is."""
        return self._by_tag.get(tag, self._every)


class SegmentQuotas:
    """Bounds, and what there is.

    Args:
        quotas: The bounds.
        index: This thread's.
        database: Its connection.
        segment_bytes: Length of a segment.
    """

    def __init__(
        self,
        quotas: Quotas,
        index: SegmentIndex,
        database: SegmentDatabase,
        segment_bytes: int,
    ) -> None:
        self._quotas = quotas
        self._index = index
        self._database = database
        self._segment_bytes = segment_bytes

    def allows(self, page_hash: PageHash, slot_bytes: int) -> bool:
        """Return whether a page can be kept at all."""
        most = self._quotas.of(page_hash[:TAG_BYTES])
        return most is None or slot_bytes <= most

    def enforce(self, hashes: Iterable[PageHash]) -> None:
        """Have the namespaces of these pages keep no more than they may."""
        for tag in {page_hash[:TAG_BYTES] for page_hash in hashes}:
            most = self._quotas.of(tag)
            if most is not None and (used := self._used(tag)) > most:
                self._evict(tag, used - int(most * _MOST_LEFT))

    def _used(self, tag: bytes) -> int:
        rows = self._database.all(
            "SELECT pages * (? / slots) FROM usage JOIN space ON id = space"
            " WHERE tag = ?",
            self._segment_bytes,
            tag,
        )
        return sum(num_bytes for (num_bytes,) in rows)

    def _evict(self, tag: bytes, num_bytes: int) -> None:
        victims: list[Place] = []
        for slot, born, size in self._oldest(tag):
            victims.append(Place(slot, born))
            num_bytes -= size
            if num_bytes <= 0:
                break
        self._index.remove(victims)

    def _oldest(self, tag: bytes) -> list[tuple[int, int, int]]:
        return self._database.all(
            "SELECT slot, born, ?1 / slots FROM page"
            " JOIN space ON id = page.space"
            " WHERE page.space IN (SELECT space FROM usage WHERE tag = ?2)"
            " AND hash BETWEEN ?2 AND ?3 ORDER BY seq",
            self._segment_bytes,
            tag,
            tag.ljust(HASH_BYTES, b"\xff"),
        )


def _checked(num_bytes: int) -> int:
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int):
        kind = type(num_bytes).__name__
        raise TypeError(f"namespace_bytes must be an int, not {kind}")
    if num_bytes < 0:
        raise ValueError(f"namespace_bytes must be at least 0, not {num_bytes}")
    return num_bytes
