"""Which page is in which slot: an index that processes share, and trust after a crash.

A slot is always in exactly one of these; each arrow is one transaction.

==========  =====================================  =============================
a slot is   which means                            and becomes
==========  =====================================  =============================
spare       its segment is nobody's yet            free, with all of its segment
free        nobody reads or writes it              claimed
claimed     one live process may write it          stored, or free
stored      it holds a page, until that is evicted claimed, or free
==========  =====================================  =============================

A page is told of last, when its bytes are in place, so a writer that dies leaves claims
and nothing else; whoever is short of slots takes the claims of the dead. Pages are
evicted in the order in which they were used, over all spaces: a space that needs room
takes a page of its own, or a whole segment of the space whose page is the oldest.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from asyncache.core import PageHash

SLOTS_PER_SEGMENT = 1 << 20
"""More than any segment has: a slot's number tells its segment and its place there."""
_BUSY_S = 10.0
_MOST_VARIABLES = 500
_SCHEMA = """
CREATE TABLE IF NOT EXISTS space (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, slots INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS segment (
    id INTEGER PRIMARY KEY, space INTEGER REFERENCES space);
CREATE TABLE IF NOT EXISTS page (
    space INTEGER NOT NULL, hash BLOB NOT NULL, slot INTEGER NOT NULL UNIQUE,
    seq INTEGER NOT NULL, PRIMARY KEY (space, hash)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS page_by_age ON page (space, seq);
CREATE TABLE IF NOT EXISTS free (
    space INTEGER NOT NULL, slot INTEGER NOT NULL UNIQUE,
    PRIMARY KEY (space, slot)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS claim (
    slot INTEGER PRIMARY KEY, space INTEGER NOT NULL, owner TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS claim_by_owner ON claim (owner);
"""


class SegmentIndex:
    """One thread's connection to the index.

    Args:
        path: The database.
        owner: What this process's claims are called.
        is_alive: Whether the process of some claims may still write their slots.
        durable: Whether a commit waits for the disk.
    """

    def __init__(
        self,
        path: str,
        owner: str,
        is_alive: Callable[[str], bool],
        *,
        durable: bool = False,
    ) -> None:
        self._owner = owner
        self._is_alive = is_alive
        self._spaces: dict[str, int] = {}
        # Closed by another thread than the one that used it, once that has ended.
        self._database = sqlite3.connect(
            path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        self._database.execute("PRAGMA journal_mode = WAL")
        level = "FULL" if durable else "NORMAL"
        self._database.execute(f"PRAGMA synchronous = {level}")

    def close(self) -> None:
        """Close the connection; what was committed stays."""
        self._database.close()

    # Setting up.

    def create(self) -> None:
        """Make the tables, where there are none."""
        self._database.executescript(_SCHEMA)

    @property
    def is_sound(self) -> bool:
        """Whether the database is one, and whole."""
        try:
            [(answer,)] = self._database.execute("PRAGMA quick_check(1)").fetchall()
        except sqlite3.DatabaseError:
            return False
        return bool(answer == "ok")

    def segments(self) -> list[int]:
        """Return the segments that there are."""
        return [row[0] for row in self._all("SELECT id FROM segment ORDER BY id")]

    def add_segment(self, segment: int) -> None:
        """Take note of a segment whose file is there."""
        self._database.execute(
            "INSERT OR IGNORE INTO segment VALUES (?, NULL)", (segment,)
        )

    def drop_segment(self, segment: int) -> None:
        """Forget a segment, and all pages in it; nobody else uses the store."""
        with self._change():
            self._empty(segment)
            self._database.execute("DELETE FROM segment WHERE id = ?", (segment,))

    def space(self, name: str, num_slots: int) -> int:
        """Return the number of a space, of which a segment holds so many slots."""
        if name not in self._spaces:
            with self._change():
                self._database.execute(
                    "INSERT OR IGNORE INTO space (name, slots) VALUES (?, ?)",
                    (name, num_slots),
                )
            [(number,)] = self._all("SELECT id FROM space WHERE name = ?", name)
            self._spaces[name] = number
        return self._spaces[name]

    # Pages.

    def find(self, space: int, hashes: Sequence[PageHash]) -> dict[PageHash, int]:
        """Return the slots of the pages that are stored."""
        found: dict[PageHash, int] = {}
        for first in range(0, len(hashes), _MOST_VARIABLES):
            some = hashes[first : first + _MOST_VARIABLES]
            marks = ",".join("?" * len(some))
            rows = self._all(
                f"SELECT hash, slot FROM page WHERE space = ? AND hash IN ({marks})",
                space,
                *some,
            )
            found.update((PageHash(page_hash), slot) for page_hash, slot in rows)
        return found

    def claim(self, space: int, count: int) -> list[int]:
        """Take up to so many slots from the pages used longest ago; maybe none."""
        with self._change():
            slots = self._take_free(space, count)
            if len(slots) < count:
                self._make_room(space, count - len(slots))
                slots += self._take_free(space, count - len(slots))
            self._database.executemany(
                "INSERT INTO claim VALUES (?, ?, ?)",
                [(slot, space, self._owner) for slot in slots],
            )
        return slots

    def publish(
        self,
        space: int,
        pages: Sequence[tuple[PageHash, int]],
        used: Sequence[PageHash],
    ) -> None:
        """Tell of pages whose bytes are in claimed slots, and of others that were used.

        Where another process was first, its page stays, and the slot is free again.
        """
        with self._change():
            seq = self._next_seq()
            self._database.executemany(
                "UPDATE page SET seq = ? WHERE space = ? AND hash = ?",
                [(seq + at, space, page_hash) for at, page_hash in enumerate(used)],
            )
            seq += len(used)
            for at, (page_hash, slot) in enumerate(pages):
                added = self._database.execute(
                    "INSERT OR IGNORE INTO page VALUES (?, ?, ?, ?)",
                    (space, page_hash, slot, seq + at),
                )
                if not added.rowcount:
                    self._database.execute(
                        "INSERT INTO free VALUES (?, ?)", (space, slot)
                    )
            self._database.executemany(
                "DELETE FROM claim WHERE slot = ?", [(slot,) for _, slot in pages]
            )

    def release(self, space: int, slots: Sequence[int]) -> None:
        """Give claimed slots back."""
        with self._change():
            self._free_claims(space, slots)

    def remove(self, space: int, pages: Sequence[tuple[PageHash, int]]) -> None:
        """Forget pages, where they are still in these slots."""
        with self._change():
            for page_hash, slot in pages:
                gone = self._database.execute(
                    "DELETE FROM page WHERE space = ? AND hash = ? AND slot = ?",
                    (space, page_hash, slot),
                )
                if gone.rowcount:
                    self._database.execute(
                        "INSERT INTO free VALUES (?, ?)", (space, slot)
                    )

    def reclaim(self) -> int:
        """Free the claims of processes that are gone; return how many slots."""
        with self._change():
            return self._reclaim()

    def counts(self) -> dict[str, int]:
        """Return the slots of segments in use by state, and the spare segments."""
        queries = {
            "stored": "SELECT count(*) FROM page",
            "free": "SELECT count(*) FROM free",
            "claimed": "SELECT count(*) FROM claim",
            "slots": "SELECT coalesce(sum(slots), 0) FROM segment JOIN space"
            " ON space.id = segment.space",
            "spare segments": "SELECT count(*) FROM segment WHERE space IS NULL",
        }
        self._database.execute("BEGIN")
        try:
            return {name: self._all(query)[0][0] for name, query in queries.items()}
        finally:
            self._database.execute("COMMIT")

    # Parts of a change.

    @contextmanager
    def _change(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _all(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        with closing(self._database.execute(query, arguments)) as cursor:
            return cursor.fetchall()

    def _next_seq(self) -> int:
        [(newest,)] = self._all(
            "SELECT max(newest) FROM (SELECT (SELECT max(seq) FROM page"
            " WHERE space = space.id) AS newest FROM space)"
        )
        return (newest or 0) + 1

    def _take_free(self, space: int, count: int) -> list[int]:
        rows = self._all(
            "DELETE FROM free WHERE space = ? AND slot IN"
            " (SELECT slot FROM free WHERE space = ? LIMIT ?) RETURNING slot",
            space,
            space,
            count,
        )
        return [slot for (slot,) in rows]

    def _make_room(self, space: int, count: int) -> None:
        if self._give_spare(space) or self._reclaim():
            return
        oldest = self._all(
            "SELECT id, (SELECT min(seq) FROM page WHERE space = space.id) AS seq"
            " FROM space WHERE seq IS NOT NULL ORDER BY seq LIMIT 1"
        )
        if not oldest:
            return
        if oldest[0][0] == space:
            self._evict(space, count)
        else:
            self._take_segment(oldest[0][0], space)

    def _evict(self, space: int, count: int) -> None:
        rows = self._all(
            "DELETE FROM page WHERE space = ? AND hash IN"
            " (SELECT hash FROM page WHERE space = ? ORDER BY seq LIMIT ?)"
            " RETURNING slot",
            space,
            space,
            count,
        )
        self._database.executemany(
            "INSERT INTO free VALUES (?, ?)", [(space, slot) for (slot,) in rows]
        )

    def _give_spare(self, space: int) -> bool:
        spare = self._all(
            "SELECT id FROM segment WHERE space IS NULL ORDER BY id LIMIT 1"
        )
        if not spare:
            return False
        self._assign(spare[0][0], space)
        return True

    def _take_segment(self, victim: int, space: int) -> None:
        """Take the segment with the oldest page, if nobody writes to it."""
        found = self._all(
            "SELECT slot / ? AS home, min(seq) AS oldest FROM page WHERE space = ?"
            " AND home NOT IN (SELECT slot / ? FROM claim)"
            " GROUP BY home ORDER BY oldest LIMIT 1",
            SLOTS_PER_SEGMENT,
            victim,
            SLOTS_PER_SEGMENT,
        )
        if found:
            self._empty(found[0][0])
            self._assign(found[0][0], space)
        else:
            self._evict(space, 1)

    def _assign(self, segment: int, space: int) -> None:
        [(num_slots,)] = self._all("SELECT slots FROM space WHERE id = ?", space)
        self._database.execute(
            "UPDATE segment SET space = ? WHERE id = ?", (space, segment)
        )
        first = segment * SLOTS_PER_SEGMENT
        self._database.executemany(
            "INSERT INTO free VALUES (?, ?)",
            [(space, first + place) for place in range(num_slots)],
        )

    def _empty(self, segment: int) -> None:
        first = segment * SLOTS_PER_SEGMENT
        bounds = (first, first + SLOTS_PER_SEGMENT)
        for table in ("page", "free", "claim"):
            self._database.execute(
                f"DELETE FROM {table} WHERE slot >= ? AND slot < ?",
                bounds,
            )

    def _reclaim(self) -> int:
        owners = [row[0] for row in self._all("SELECT DISTINCT owner FROM claim")]
        count = 0
        for owner in owners:
            if owner != self._owner and not self._is_alive(owner):
                rows = self._all("SELECT slot, space FROM claim WHERE owner = ?", owner)
                for slot, space in rows:
                    self._free_claims(space, [slot])
                count += len(rows)
        return count

    def _free_claims(self, space: int, slots: Sequence[int]) -> None:
        for slot in slots:
            gone = self._database.execute("DELETE FROM claim WHERE slot = ?", (slot,))
            if gone.rowcount:
                self._database.execute("INSERT INTO free VALUES (?, ?)", (space, slot))
