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

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from asyncache.core import HASH_BYTES, PageHash
from asyncache.stores._segment_database import SegmentDatabase, packed
from asyncache.stores._segment_room import SegmentRoom

# A statement is one call for all pages, and not one for each: between two, a thread may
# wait for the interpreter's lock, while all others wait for its transaction. So pages
# come as one blob, slots as a list in JSON, and so do the answers.
_HASH = f"substr(?1, 1 + {HASH_BYTES} * key, {HASH_BYTES})"
_EACH = "json_each(?2)"
_OURS = f"slot IN (SELECT value FROM {_EACH}) AND owner = ?1"

Uses = Sequence[tuple[int, PageHash]]
"""Pages that were used, with their spaces, the last one last."""


class Place(NamedTuple):
    """Where a page is; another one for the same page if it was stored anew."""

    slot: int
    born: int


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
        self._room = SegmentRoom(
            database, lambda other: other != owner and not is_alive(other)
        )

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
            self._room.empty(segment)
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
        [(found,)] = self._database.all(
            "SELECT json_group_array(json_array(key, slot, born))"
            f" FROM {_EACH} CROSS JOIN page WHERE space = ?3 AND hash = {_HASH}",
            b"".join(hashes),
            packed([0] * len(hashes)),
            space,
        )
        return {hashes[at]: Place(slot, born) for at, slot, born in json.loads(found)}

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
            while len(slots) < count and self._room.make(space, count - len(slots)):
                slots += self._take_free(space, count - len(slots))
            self._database.run(
                f"INSERT INTO claim SELECT value, ?3, ?1 FROM {_EACH}",
                self._owner,
                packed(slots),
                space,
            )
        return slots

    def publish(
        self,
        space: int,
        pages: Sequence[tuple[PageHash, int]],
        used: Uses = (),
    ) -> set[PageHash]:
        """Tell of pages whose bytes are in claimed slots; return those that are stored.

        Where another process was first, its page stays, and the slot is free again. A
        slot that is not claimed any more was taken from us: nothing is told of it.

        Args:
            space: What the pages are.
            pages: The pages and their slots.
            used: Other pages that were used.
        """
        with self._database.change():
            self._touch(used)
            ours = self._end_claims([slot for _, slot in pages])
            stored = {page_hash: slot for page_hash, slot in pages if slot in ours}
            born = self._tick(len(stored))
            num_added = self._database.run(
                f"INSERT OR IGNORE INTO page SELECT ?3, {_HASH}, value,"
                f" ?4 - key, ?5 + key FROM {_EACH}",
                b"".join(stored),
                packed(stored.values()),
                space,
                born + len(stored) - 1,
                born,
            )
            added = set(stored)
            if num_added < len(stored):
                added -= self._free_where_others_were_first(space, stored)
            self._room.count(space, added)
        return set(stored)

    @property
    def version(self) -> int | None:
        """What changes with each change of anybody; None while there is one."""
        return self._database.version.read()

    def alone(self) -> AbstractContextManager[None]:
        """Have no other thread of this process change anything until it is left."""
        return self._database.alone()

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

    def remove(self, places: Iterable[Place]) -> None:
        """Forget the pages that are still in these places."""
        wanted = set(places)
        with self._database.change():
            [(there,)] = self._database.all(
                "SELECT json_group_array(json_array(slot, born)) FROM page"
                " WHERE slot IN (SELECT value FROM json_each(?))",
                packed({place.slot for place in wanted}),
            )
            gone = [slot for slot, born in json.loads(there) if (slot, born) in wanted]
            self._room.evict("slot IN (SELECT value FROM json_each(?))", packed(gone))

    def reclaim(self) -> Counter[int]:
        """Free the claims of processes that are gone; count the slots of each space."""
        with self._database.change():
            return self._room.reclaim()

    def leave(self, used: Uses) -> None:
        """Take note of pages that were used, and give all claims back."""
        query = "SELECT 1 FROM claim WHERE owner = ? LIMIT 1"
        if used or self._database.all(query, self._owner):
            with self._database.change():
                self._touch(used)
                self._room.free_claims_of(self._owner)

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
        self._database.run(
            f"UPDATE page SET seq = ?3 + key FROM {_EACH}"
            f" WHERE space = value AND hash = {_HASH}",
            b"".join(page_hash for _, page_hash in used),
            packed(space for space, _ in used),
            self._tick(len(used)),
        )

    def _take_free(self, space: int, count: int) -> list[int]:
        [(found,)] = self._database.all(
            "SELECT json_group_array(slot) FROM"
            " (SELECT slot FROM free WHERE space = ? ORDER BY slot LIMIT ?)",
            space,
            count,
        )
        slots: list[int] = json.loads(found)
        if slots:
            self._database.run(
                "DELETE FROM free WHERE space = ? AND slot <= ?", space, max(slots)
            )
        return slots

    def _give_back(self, slots: Sequence[int]) -> None:
        if slots:
            ours = (self._owner, packed(slots))
            self._database.run(
                f"INSERT INTO free SELECT space, slot FROM claim WHERE {_OURS}",
                *ours,
            )
            self._database.run(f"DELETE FROM claim WHERE {_OURS}", *ours)

    def _end_claims(self, slots: Sequence[int]) -> set[int]:
        """Return those that were claimed by us."""
        rows = self._database.all(
            f"DELETE FROM claim WHERE {_OURS} RETURNING slot",
            self._owner,
            packed(slots),
        )
        return {slot for (slot,) in rows}

    def _free_where_others_were_first(
        self, space: int, stored: dict[PageHash, int]
    ) -> set[PageHash]:
        """Return the pages that somebody else stored."""
        there = self.find(space, list(stored))
        late = {h for h, s in stored.items() if h not in there or there[h].slot != s}
        self._room.free(space, [stored[page_hash] for page_hash in late])
        return late
