"""Which page is in which slot: an index that processes share, and trust after a crash.

A slot is always in exactly one of these; each arrow is one transaction.

==========  =====================================  =============================
a slot is   which means                            and becomes
==========  =====================================  =============================
spare       its segment is nobody's yet            free, with all of its segment
free        nobody reads or writes it              claimed, or spare
claimed     one live process may write it          stored, or free
stored      it holds a page, until that is evicted claimed, or free
==========  =====================================  =============================

A page is told of last, when its bytes are in place, so a writer that dies leaves claims
and nothing else; whoever is short of slots takes the claims of the dead. Pages are
evicted in the order in which they were used, over all spaces: a space that needs room
takes a page of its own, or a whole segment of the space whose page is the oldest. Of
pages that were put or read together the last is the oldest: they are a prefix, of which
whoever lacks the first page has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from asyncache.core import TAG_BYTES, PageHash
from asyncache.stores._segment_database import SegmentDatabase

SLOTS_PER_SEGMENT = 1 << 20
"""More than any segment has: a slot's number tells its segment and its place there."""
_MOST_VARIABLES = 500

Uses = Sequence[tuple[int, PageHash]]
"""Pages that were used, with their spaces, the last one last."""


class Place(NamedTuple):
    """Where a page is; another one for the same page if it was stored anew."""

    slot: int
    born: int


class _Victim(NamedTuple):
    seq: int
    segment: int | None
    """What to take; None to evict pages of the space that needs room."""


class SegmentIndex:
    """The index, for one thread.

    Args:
        database: This thread's connection.
        owner: What this process's claims are called.
        is_alive: Whether the process of some claims may still write their slots.
    """

    def __init__(
        self, database: SegmentDatabase, owner: str, is_alive: Callable[[str], bool]
    ) -> None:
        self._database = database
        self._owner = owner
        self._is_alive = is_alive

    # Segments and spaces.

    def segments(self) -> list[int]:
        """Return the segments that there are."""
        return [
            row[0] for row in self._database.all("SELECT id FROM segment ORDER BY id")
        ]

    def add_segment(self, segment: int) -> None:
        """Take note of a segment whose file is there."""
        with self._database.change():
            self._database.run("INSERT INTO segment VALUES (?, NULL)", segment)

    def drop_segment(self, segment: int) -> None:
        """Forget a segment, and all pages and claims in it: its file is gone."""
        with self._database.change():
            self._empty(segment)
            self._database.run("DELETE FROM segment WHERE id = ?", segment)

    def space(self, name: str) -> int | None:
        """Return the number of a space, if it has one."""
        found = self._database.all("SELECT id FROM space WHERE name = ?", name)
        return found[0][0] if found else None

    def add_space(self, name: str, num_slots: int) -> int:
        """Return the number of a space, of which a segment holds so many slots."""
        with self._database.change():
            self._database.run(
                "INSERT OR IGNORE INTO space (name, slots) VALUES (?, ?)",
                name,
                num_slots,
            )
            [(number,)] = self._database.all(
                "SELECT id FROM space WHERE name = ?", name
            )
        return int(number)

    # Pages.

    def find(self, space: int, hashes: Sequence[PageHash]) -> dict[PageHash, Place]:
        """Return the places of the pages that are stored."""
        found: dict[PageHash, Place] = {}
        for first in range(0, len(hashes), _MOST_VARIABLES):
            some = hashes[first : first + _MOST_VARIABLES]
            marks = ",".join("?" * len(some))
            rows = self._database.all(
                "SELECT hash, slot, born FROM page"
                f" WHERE space = ? AND hash IN ({marks})",
                space,
                *some,
            )
            found.update((PageHash(row[0]), Place(row[1], row[2])) for row in rows)
        return found

    def claim(self, space: int, count: int, used: Uses) -> list[int]:
        """Take up to so many slots from the pages used longest ago; maybe none.

        Args:
            space: What they are for.
            count: How many are wanted.
            used: Pages that were used, and are not the oldest any more.
        """
        with self._database.change():
            self._touch(used)
            slots = self._take_free(space, count)
            while len(slots) < count and self._make_room(space, count - len(slots)):
                slots += self._take_free(space, count - len(slots))
            self._database.run_many(
                "INSERT INTO claim VALUES (?, ?, ?)",
                [(slot, space, self._owner) for slot in slots],
            )
        return slots

    def publish(
        self,
        space: int,
        pages: Sequence[tuple[PageHash, int]],
        *,
        used: Uses = (),
        surplus: Sequence[int] = (),
    ) -> set[PageHash]:
        """Tell of pages whose bytes are in claimed slots; return those that are stored.

        Where another process was first, its page stays, and the slot is free again. A
        slot that is not claimed any more was taken from us: nothing is told of it.

        Args:
            space: What the pages are.
            pages: The pages and their slots.
            used: Other pages that were used.
            surplus: Claimed slots to give back.
        """
        with self._database.change():
            self._touch(used)
            ours = self._end_claims([slot for _, slot in pages])
            stored = {page_hash: slot for page_hash, slot in pages if slot in ours}
            born = self._tick(len(stored))
            num_added = self._database.run_many(
                "INSERT OR IGNORE INTO page VALUES (?, ?, ?, ?, ?)",
                [
                    (space, page_hash, slot, born + len(stored) - 1 - at, born + at)
                    for at, (page_hash, slot) in enumerate(stored.items())
                ],
            )
            late: set[PageHash] = set()
            if num_added < len(stored):
                late = self._free_where_others_were_first(space, stored)
            self._count(space, stored.keys() - late, 1)
            self._give_back(surplus)
        return set(stored)

    @property
    def version(self) -> tuple[int, int]:
        """What changes with each change of anybody."""
        return self._database.version

    def touch(self, used: Uses) -> None:
        """Take note of pages that were used, unless another process is in the way.

        Raises:
            sqlite3.OperationalError: If one is.
        """
        with self._database.change(waits=False):
            self._touch(used)

    def release(self, slots: Sequence[int]) -> None:
        """Give claimed slots back."""
        with self._database.change():
            self._give_back(slots)

    def remove(self, space: int, pages: Sequence[tuple[PageHash, Place]]) -> None:
        """Forget pages, where they are still in these places."""
        gone: dict[PageHash, int] = {}
        with self._database.change():
            for page_hash, place in pages:
                if self._database.run(
                    "DELETE FROM page WHERE space = ? AND hash = ? AND slot = ?"
                    " AND born = ?",
                    space,
                    page_hash,
                    *place,
                ):
                    gone[page_hash] = place.slot
            self._free((space, slot) for slot in gone.values())
            self._count(space, gone, -1)

    def reclaim(self) -> Counter[int]:
        """Free the claims of processes that are gone; count the slots of each space."""
        with self._database.change():
            return self._reclaim()

    def leave(self, used: Uses) -> None:
        """Take note of pages that were used, and give all claims back."""
        query = "SELECT 1 FROM claim WHERE owner = ? LIMIT 1"
        if used or self._database.all(query, self._owner):
            with self._database.change():
                self._touch(used)
                self._free_claims_of(self._owner)

    # Parts of a change.

    def _tick(self, count: int) -> int:
        """Return the first of so many numbers that no page ever had."""
        [(seq,)] = self._database.all(
            "UPDATE clock SET seq = seq + ? RETURNING seq", count
        )
        return int(seq) - count

    def _touch(self, used: Uses) -> None:
        if not used:
            return
        seq = self._tick(len(used))
        self._database.run_many(
            "UPDATE page SET seq = ? WHERE space = ? AND hash = ?",
            [(seq + at, *use) for at, use in enumerate(used)],
        )

    def _take_free(self, space: int, count: int) -> list[int]:
        rows = self._database.all(
            "DELETE FROM free WHERE space = ? AND slot IN"
            " (SELECT slot FROM free WHERE space = ? ORDER BY slot LIMIT ?)"
            " RETURNING slot",
            space,
            space,
            count,
        )
        return [slot for (slot,) in rows]

    def _make_room(self, space: int, count: int) -> bool:
        """Have free slots; return whether there are some now."""
        if self._give_spare(space) or space in self._reclaim():
            return True
        victims = list(self._victims(space))
        if not victims:
            return False
        victim = min(victims)
        if victim.segment is None:
            others = [other.seq for other in victims if other.segment is not None]
            self._evict(space, count, min(others, default=None))
        else:
            self._empty(victim.segment)
            self._assign(victim.segment, space)
        return True

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
        self._empty(spare[0][0])
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

    def _evict(self, space: int, count: int, before: int | None) -> None:
        rows = self._database.all(
            "DELETE FROM page WHERE space = ?1 AND hash IN"
            " (SELECT hash FROM page WHERE space = ?1 AND seq < coalesce(?3, seq + 1)"
            " ORDER BY seq LIMIT ?2) RETURNING slot, hash",
            space,
            count,
            before,
        )
        self._free((space, slot) for slot, _ in rows)
        self._count(space, [page_hash for _, page_hash in rows], -1)

    def _assign(self, segment: int, space: int) -> None:
        [(num_slots,)] = self._database.all(
            "SELECT slots FROM space WHERE id = ?", space
        )
        self._database.run("UPDATE segment SET space = ? WHERE id = ?", space, segment)
        first = segment * SLOTS_PER_SEGMENT
        self._database.run_many(
            "INSERT INTO free VALUES (?, ?)",
            [(space, first + place) for place in range(num_slots)],
        )

    def _empty(self, segment: int) -> None:
        first = segment * SLOTS_PER_SEGMENT
        rows = self._database.all(
            "SELECT space, hash FROM page WHERE slot BETWEEN ? AND ?",
            first,
            first + SLOTS_PER_SEGMENT - 1,
        )
        for space in {space for space, _ in rows}:  # one, while nobody tampers
            self._count(space, [h for home, h in rows if home == space], -1)
        for table in ("page", "free", "claim"):
            self._database.run(
                f"DELETE FROM {table} WHERE slot BETWEEN ? AND ?",
                first,
                first + SLOTS_PER_SEGMENT - 1,
            )

    def _reclaim(self) -> Counter[int]:
        """Return the spaces to which slots came back, and how many did."""
        spaces: Counter[int] = Counter()
        for (owner,) in self._database.all("SELECT DISTINCT owner FROM claim"):
            if owner != self._owner and not self._is_alive(owner):
                spaces += self._free_claims_of(owner)
        return spaces

    def _free_claims_of(self, owner: str) -> Counter[int]:
        rows = self._database.all(
            "DELETE FROM claim WHERE owner = ? RETURNING space, slot", owner
        )
        self._free(rows)
        return Counter(space for space, _ in rows)

    def _give_back(self, slots: Sequence[int]) -> None:
        ended = self._end_claims(slots)
        self._free((space, slot) for slot, space in ended.items())

    def _end_claims(self, slots: Sequence[int]) -> dict[int, int]:
        """Return those that were claimed by us, with the space they were for."""
        ended: dict[int, int] = {}
        for first in range(0, len(slots), _MOST_VARIABLES):
            some = slots[first : first + _MOST_VARIABLES]
            marks = ",".join("?" * len(some))
            rows = self._database.all(
                f"DELETE FROM claim WHERE slot IN ({marks}) AND owner = ?"
                " RETURNING slot, space",
                *some,
                self._owner,
            )
            ended.update(rows)
        return ended

    def _free_where_others_were_first(
        self, space: int, stored: dict[PageHash, int]
    ) -> set[PageHash]:
        """Return the pages that somebody else stored."""
        there = self.find(space, list(stored))
        late = {h for h, slot in stored.items() if there[h].slot != slot}
        self._free((space, stored[page_hash]) for page_hash in late)
        return late

    def _count(self, space: int, pages: Iterable[PageHash], by: int) -> None:
        """Keep account of how many pages each namespace has."""
        counts = Counter(page_hash[:TAG_BYTES] for page_hash in pages)
        self._database.run_many(
            "INSERT INTO usage VALUES (?, ?, ?)"
            " ON CONFLICT (tag, space) DO UPDATE SET pages = pages + excluded.pages",
            [(tag, space, by * count) for tag, count in counts.items()],
        )

    def _free(self, slots: Iterable[tuple[int, int]]) -> None:
        """Give slots back, each with the space that it is for."""
        self._database.run_many("INSERT INTO free VALUES (?, ?)", list(slots))
