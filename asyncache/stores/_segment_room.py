"""Where free slots come from: segments to spare, the claims of the dead, old pages.

Everything here is a part of a change of the index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from asyncache.core import TAG_BYTES, PageHash
from asyncache.stores._segment_database import SegmentDatabase, packed

SLOTS_PER_SEGMENT = 1 << 20
"""More than any segment has: a slot's number tells its segment and its place there."""
_ADDED = "ON CONFLICT (tag, space) DO UPDATE SET pages = pages + excluded.pages"


_NEVER = 2**63 - 1
"""Later than any page was used."""


class _Victim(NamedTuple):
    seq: int
    segment: int | None
    """What to take; None to evict pages of the space that needs room."""


class SegmentRoom:
    """The room of an index, for one thread.

    Args:
        database: A connection.
        is_gone: Whether nobody can write to what an owner has claimed.
    """

    def __init__(
        self, database: SegmentDatabase, is_gone: Callable[[str], bool]
    ) -> None:
        self._database = database
        self._is_gone = is_gone

    def make(self, space: int, count: int) -> bool:
        """Have free slots; return whether there are some now."""
        if self._give_spare(space) or space in self.reclaim():
            return True
        victims = list(self._victims(space))
        if not victims:
            return False
        victim = min(victims)
        if victim.segment is None:
            others = [other.seq for other in victims if other.segment is not None]
            last = self._last_to_go(space, count, min(others, default=_NEVER))
            self.evict("space = ? AND seq <= ?", space, last)
        else:
            self.empty(victim.segment)
            self._assign(victim.segment, space)
        return True

    def free(self, space: int, slots: Iterable[int]) -> None:
        """Have slots that are nothing be free, for a space."""
        self._database.run(
            "INSERT INTO free SELECT ?, value FROM json_each(?)", space, packed(slots)
        )

    def evict(self, which: str, *arguments: object) -> None:
        """Forget some pages, and free their slots."""
        self._database.run(
            f"INSERT INTO free SELECT space, slot FROM page WHERE {which}", *arguments
        )
        self._forget(which, *arguments)

    def empty(self, segment: int) -> None:
        """Forget all that is in a segment; its slots are nothing then."""
        first = segment * SLOTS_PER_SEGMENT
        which = f"slot BETWEEN {first} AND {first + SLOTS_PER_SEGMENT - 1}"
        self._forget(which)
        self._database.run(f"DELETE FROM claim WHERE {which}")
        self._database.run(
            f"DELETE FROM free WHERE {which}"
            " AND space = (SELECT space FROM segment WHERE id = ?)",
            segment,
        )

    def reclaim(self) -> Counter[int]:
        """Return the spaces to which slots came back, and how many did."""
        spaces: Counter[int] = Counter()
        for (owner,) in self._database.all("SELECT DISTINCT owner FROM claim"):
            if self._is_gone(owner):
                spaces += self.free_claims_of(owner)
        return spaces

    def free_claims_of(self, owner: str) -> Counter[int]:
        """Free what somebody claimed; count the slots of each space."""
        rows = self._database.all(
            "SELECT space, count(*) FROM claim WHERE owner = ? GROUP BY space", owner
        )
        self._database.run(
            "INSERT INTO free SELECT space, slot FROM claim WHERE owner = ?", owner
        )
        self._database.run("DELETE FROM claim WHERE owner = ?", owner)
        return Counter(dict(rows))

    def count(self, space: int, pages: Iterable[PageHash]) -> None:
        """Keep account of how many pages each namespace has."""
        for tag, count in Counter(one[:TAG_BYTES] for one in pages).items():
            self._database.run(
                f"INSERT INTO usage VALUES (?, ?, ?) {_ADDED}", tag, space, count
            )

    def _give_spare(self, space: int) -> bool:
        """Have a segment in which nothing is."""
        bounds = "BETWEEN id * ?2 AND id * ?2 + ?2 - 1"
        spare = self._database.all(
            "SELECT id FROM segment WHERE space IS NULL OR space != ?1"
            f" AND NOT EXISTS (SELECT 1 FROM page WHERE slot {bounds})"
            f" AND NOT EXISTS (SELECT 1 FROM claim WHERE slot {bounds})"
            " ORDER BY space IS NOT NULL, id LIMIT 1",
            space,
            SLOTS_PER_SEGMENT,
        )
        if not spare:
            return False
        self.empty(spare[0][0])
        self._assign(spare[0][0], space)
        return True

    def _victims(self, space: int) -> Iterator[_Victim]:
        """Yield for each space its oldest page that can go.

        A page of another space goes with its segment, so not while one writes there.
        """
        for (other,) in self._database.all("SELECT id FROM space"):
            rows = self._database.all(
                "SELECT seq, slot / ?2 AS home FROM page WHERE space = ?1"
                " AND (?3 OR home NOT IN (SELECT slot / ?2 FROM claim))"
                " ORDER BY seq LIMIT 1",
                other,
                SLOTS_PER_SEGMENT,
                other == space,
            )
            for seq, segment in rows:
                yield _Victim(seq, None if other == space else segment)

    def _last_to_go(self, space: int, count: int, before: int) -> int:
        """Return the age of the last of so many pages, the oldest before a bound."""
        [(last,)] = self._database.all(
            "SELECT max(seq) FROM (SELECT seq FROM page"
            " WHERE space = ? AND seq < ? ORDER BY seq LIMIT ?)",
            space,
            before,
            count,
        )
        return int(last)

    def _forget(self, which: str, *arguments: object) -> None:
        """Forget some pages; their slots are nothing then."""
        self._database.run(
            f"INSERT INTO usage SELECT substr(hash, 1, {TAG_BYTES}) AS tag, space,"
            f" -count(*) FROM page WHERE {which} GROUP BY tag, space {_ADDED}",
            *arguments,
        )
        self._database.run(f"DELETE FROM page WHERE {which}", *arguments)

    def _assign(self, segment: int, space: int) -> None:
        [(num_slots,)] = self._database.all(
            "SELECT slots FROM space WHERE id = ?", space
        )
        self._database.run("UPDATE segment SET space = ? WHERE id = ?", space, segment)
        first = segment * SLOTS_PER_SEGMENT
        self.free(space, range(first, first + num_slots))
