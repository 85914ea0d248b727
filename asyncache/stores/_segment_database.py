"""One thread's connection to the database of a SegmentStore.

A transaction waits for those of others, and no longer than someone waits for it. So
SQLite itself never waits here: it could not be called off.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import quote

from asyncache.stores._segment_version import Version
from asyncache.threads import Stop

_Answer = TypeVar("_Answer")
Rows = list[tuple[Any, ...]]

WAIT_S = 1.0
_LONGEST_PAUSE_S = 0.02
_SCHEMA = (
    """CREATE TABLE space (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, slots INTEGER NOT NULL)""",
    """CREATE TABLE segment (
    id INTEGER PRIMARY KEY, space INTEGER REFERENCES space)""",
    """CREATE TABLE page (
    space INTEGER NOT NULL, hash BLOB NOT NULL, slot INTEGER NOT NULL UNIQUE,
    seq INTEGER NOT NULL, born INTEGER NOT NULL, PRIMARY KEY (space, hash)
    ) WITHOUT ROWID""",
    "CREATE INDEX page_by_age ON page (space, seq)",
    """CREATE TABLE free (
    space INTEGER NOT NULL, slot INTEGER NOT NULL,
    PRIMARY KEY (space, slot)) WITHOUT ROWID""",
    """CREATE TABLE claim (
    slot INTEGER PRIMARY KEY, space INTEGER NOT NULL, owner TEXT NOT NULL)""",
    "CREATE TABLE clock (seq INTEGER NOT NULL)",
    "INSERT INTO clock VALUES (1)",
    # Pages of each namespace.
    """CREATE TABLE usage (
    tag BLOB NOT NULL, space INTEGER NOT NULL, pages INTEGER NOT NULL,
    PRIMARY KEY (tag, space)) WITHOUT ROWID""",
)


class Patience:
    """How long transactions wait for those of others, shared by a store's threads.

    After one waited in vain the next do not wait, until one gets through: otherwise a
    thousand calls would wait one after the other for a process that was stopped.
    """

    def __init__(self) -> None:
        self._is_stuck = False
        self._turn = threading.RLock()

    @contextmanager
    def turn(self, stop: Stop, *, waits: bool) -> Iterator[None]:
        """Have no other thread of the store write until the block is left.

        They wait for each other as long as anybody waits for them: whoever writes does
        come to an end, though that of a checkpoint may be a second away.
        """
        while not self._turn.acquire(timeout=_LONGEST_PAUSE_S if waits else 0.0):
            if stop.is_set() or not waits:
                raise sqlite3.OperationalError("another thread of this store writes")
        try:
            yield
        finally:
            self._turn.release()

    def begin(self, attempt: Callable[[], object], stop: Stop) -> None:
        """Begin to write; raise SQLite's error if others do not let us."""
        try:
            wait(attempt, 0.0 if self._is_stuck else WAIT_S, stop)
        except sqlite3.OperationalError:
            self._is_stuck = not stop.is_set()
            raise
        self._is_stuck = False


def wait(attempt: Callable[[], _Answer], wait_s: float, stop: Stop) -> _Answer:
    """Try until no other process is in the way, or it is too late, or all is over."""
    end_s, pause_s = time.monotonic() + wait_s, 0.0005
    while True:
        try:
            return attempt()
        except sqlite3.OperationalError as error:
            is_over = time.monotonic() >= end_s
            if not _is_busy(error) or is_over or stop.wait(pause_s):
                raise
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class SegmentDatabase:
    """A connection, for one thread.

    Args:
        path: The database, a file that exists.
        version: Told of each change.
        patience: Shared by all threads of the store.
        durable: Whether a commit waits for the disk.

    Attributes:
        stop: Set when nobody waits any more for what this thread does.
        version: What it was told.

    Raises:
        sqlite3.Error: If it cannot be used.
    """

    def __init__(
        self, path: str, version: Version, patience: Patience, *, durable: bool = False
    ) -> None:
        self.stop = Stop()
        self.version = version
        self._patience = patience
        # Closed by another thread than the one that used it, once that has ended.
        self._connection = sqlite3.connect(
            f"file:{quote(path)}?mode=rw",
            timeout=0.0,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        level = "FULL" if durable else "NORMAL"
        try:
            self.all("PRAGMA journal_mode = WAL")
            self.all(f"PRAGMA synchronous = {level}")
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the connection; what was committed stays."""
        self._connection.close()

    def all(self, query: str, *arguments: object) -> Rows:
        """Return all rows; of a change, run one inside :meth:`change`."""

        def attempt() -> Rows:
            return self._connection.execute(query, arguments).fetchall()

        return wait(attempt, WAIT_S, self.stop)

    def run(self, query: str, *arguments: object) -> int:
        """Run a part of a change; return how many rows it changed."""
        return self._connection.execute(query, arguments).rowcount

    def alone(self, *, waits: bool = True) -> AbstractContextManager[None]:
        """Have no other thread of the store write until the block is left."""
        return self._patience.turn(self.stop, waits=waits)

    @contextmanager
    def change(self, *, waits: bool = True) -> Iterator[None]:
        """Do all of what follows or nothing, with no other change in between."""

        def begin() -> None:
            self._connection.execute("BEGIN IMMEDIATE")

        with self.alone(waits=waits):
            if waits:
                self._patience.begin(begin, self.stop)
            else:
                begin()
            try:
                yield
                with self.version.changing():
                    self._connection.execute("COMMIT")
            except BaseException:
                # Some errors of a disk have ended it already.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def create(self) -> None:
        """Make the tables, where there are none."""
        if not self._schema(self._connection):
            with self.change():
                for statement in _SCHEMA:
                    self._connection.execute(statement)

    @property
    def is_sound(self) -> bool:
        """Whether it is whole, and one of ours or empty."""
        if self.all("PRAGMA quick_check(1)") != [("ok",)]:
            return False
        with closing(sqlite3.connect(":memory:")) as model:
            for statement in _SCHEMA:
                model.execute(statement)
            return self._schema(self._connection) in ([], self._schema(model))

    @staticmethod
    def _schema(connection: sqlite3.Connection) -> Rows:
        query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY 1"
        with closing(connection.execute(query)) as cursor:
            return cursor.fetchall()


def packed(numbers: Iterable[int]) -> str:
    """Return a list for ``json_each``, whose keys are the places in it."""
    return f"[{','.join(map(str, numbers))}]"


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether an error says that a file is no database, or a broken one."""
    return _code(error) in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def _is_busy(error: sqlite3.Error) -> bool:
    return _code(error) in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_PROTOCOL}


def _code(error: sqlite3.Error) -> int:
    code = 0
    with suppress(AttributeError):  # an error of the module itself has none
        code = error.sqlite_errorcode & 0xFF
    return code
