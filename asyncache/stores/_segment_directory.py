"""The directory of a SegmentStore, and how it is opened and left.

::

    asyncache.json   what the directory is
    lock             shared by all users; exclusive while one that is alone sets up.
                     In it, a number that changes with the index
    index.db         which page is where
    owners/          a locked file for each user
    000000.seg ...   the segments
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from stat import S_ISREG

from asyncache.core import ClosedError, StoreError
from asyncache.stores._control import StoreKind, read_control
from asyncache.stores._frame import Frame
from asyncache.stores._owners import Owner, is_alive, sweep
from asyncache.stores._segment_census import SegmentUsage, spaces, usage
from asyncache.stores._segment_database import Patience, SegmentDatabase, is_damage
from asyncache.stores._segment_files import SegmentFiles, slot_bytes
from asyncache.stores._segment_index import SegmentIndex
from asyncache.stores._segment_version import Version
from asyncache.threads import Stop

FORMAT = "asyncache segments 4"
_LOG = logging.getLogger("asyncache")
_PRIVATE = 0o700
_MODE = 0o600
_PAUSE_S = 0.02


class SegmentDirectory:
    """A directory that this store uses until :meth:`close`. Blocking.

    Args:
        path: Made if it does not exist.
        max_segments: Segments to have, if nobody else uses the directory; None to
            set up nothing, and take what is there.
        segment_bytes: Length of each.
        durable: Whether commits wait for the disk.
        direct: Whether segments are opened for direct I/O.
        stop: Set when nobody waits for it any more.

    Raises:
        StoreError: If it cannot be used.
        ClosedError: If it was stopped.
    """

    def __init__(
        self,
        path: str,
        *,
        max_segments: int | None,
        segment_bytes: int,
        durable: bool,
        direct: bool,
        stop: Stop,
    ) -> None:
        self._root = Path(path)
        self._owners = str(self._root / "owners")
        self._durable = durable
        self._max_segments = max_segments
        self._stop = stop
        self._patience = Patience()
        self._owner: Owner | None = None
        self._databases: list[SegmentDatabase] = []
        self._lock = -1
        if max_segments is None:
            segment_bytes = _segment_bytes_of(path)
        self.files = SegmentFiles(path, segment_bytes, direct=direct)
        try:
            self._enter()
        except (OSError, sqlite3.Error) as error:
            self.close(owns_something=False)
            raise StoreError(f"cannot keep pages in {path!r}: {error}") from error
        except BaseException:
            self.close(owns_something=False)
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return self.files.num_segments * self.files.segment_bytes

    def new_index(self) -> tuple[SegmentIndex, SegmentDatabase]:
        """Return the index for one thread, and its connection; closed with all."""
        assert self._owner is not None
        database = self._connect()
        self._databases.append(database)
        index = SegmentIndex(
            database, self._owner.name, lambda name: is_alive(self._owners, name)
        )
        return index, database

    def collect_garbage(self, index: SegmentIndex, database: SegmentDatabase) -> int:
        """Drop segments without a file and files without a segment; free dead claims.

        Nobody makes a segment meanwhile: for that one has to be alone.

        Returns:
            The bytes of those files, and of the slots that were claimed.
        """
        for segment in index.segments():
            if not self.files.is_whole(segment):
                index.drop_segment(segment)
        num_bytes = self.files.sweep(set(index.segments()))
        num_slots = index.reclaim()
        return num_bytes + sum(
            num_slots[number] * slot_bytes(Frame(space))
            for number, space in spaces(database)
        )

    def usage(self, database: SegmentDatabase) -> SegmentUsage:
        """Return how full it is."""
        return usage(
            database,
            segment_bytes=self.files.segment_bytes,
            is_alive=lambda name: is_alive(self._owners, name),
        )

    def close(self, *, owns_something: bool) -> None:
        """Use it no more; tell whether slots of it may still be claimed."""
        while self._databases:
            self._databases.pop().close()
        self.files.close()
        if self._owner is not None:
            self._owner.leave(owns_something=owns_something)
            self._owner = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _connect(self) -> SegmentDatabase:
        return SegmentDatabase(
            str(self._root / "index.db"),
            Version(self._lock),
            self._patience,
            durable=self._durable,
        )

    # Coming in.

    def _enter(self) -> None:
        is_guest = self._max_segments is None
        if not is_guest:
            self._root.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        self._check_private()
        self._check_format()
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= 0 if is_guest else os.O_CREAT
        self._lock = os.open(self._root / "lock", flags, _MODE)
        self._lock_shared()
        if is_guest:
            self._check_index()
        self._owner = Owner(self._owners)
        index, _ = self.new_index()
        for segment in index.segments():
            if not self.files.open(segment) and not is_guest:
                index.drop_segment(segment)
        if not self.files.num_segments and not is_guest:
            raise StoreError(
                f"{self._root} has no room for a segment of {self.files.segment_bytes}"
            )

    def _lock_shared(self) -> None:
        """Have a share of the lock, on a directory that someone has set up."""
        while not self._stop.is_set():
            if self._max_segments is not None and self._try_lock(fcntl.LOCK_EX):
                self._set_up(self._max_segments)
            # Where we are alone with it, whoever held it has died in the middle.
            if self._try_lock(fcntl.LOCK_SH):
                if self._check_format():  # it is written last
                    return
                self._try_lock(fcntl.LOCK_UN)
            # The lock itself has no wait that could be called off.
            self._stop.wait(_PAUSE_S)
        raise ClosedError("the store was closed while it was opened")

    def _try_lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _check_index(self) -> None:
        """Raise StoreError unless the index is whole."""
        try:
            with closing(self._connect()) as database:
                is_sound = self._is_sound(database)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            is_sound = False
        if not is_sound:
            raise StoreError(f"the index of {self._root} is broken")

    def _check_private(self) -> None:
        found = self._root.stat()
        if found.st_uid not in {os.geteuid(), 0} or found.st_mode & 0o022:
            raise StoreError(
                f"{self._root} can be written by other users: give a directory that "
                "is this user's alone"
            )

    def _check_format(self) -> bool:
        """Return whether the directory says what it is.

        Raises:
            StoreError: If it is something else.
        """
        control = self._root / "asyncache.json"
        try:
            text = control.read_bytes()
        except FileNotFoundError:
            return False
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if found != self._format:
            raise StoreError(
                f"{control} says {text[:80]!r}, wanted {json.dumps(self._format)}: "
                "give the store another directory"
            )
        return True

    @property
    def _format(self) -> dict[str, object]:
        return {"format": FORMAT, "segment_bytes": self.files.segment_bytes}

    # While nobody else uses it.

    def _set_up(self, max_segments: int) -> None:
        owners = Path(self._owners)
        if owners.is_symlink():
            owners.unlink()
        owners.mkdir(mode=_PRIVATE, exist_ok=True)
        self._make_index_file()
        with closing(self._connect_or_start_anew()) as database:
            # Whoever had claims is gone.
            index = SegmentIndex(database, "", lambda _: False)
            index.reclaim()
            sweep(self._owners)
            self._fit(index, max_segments)
        self._write_format()

    def _make_index_file(self) -> None:
        path = self._root / "index.db"
        with suppress(FileNotFoundError):
            if not S_ISREG(path.lstat().st_mode):
                self._put_aside()
        # SQLite gives its other files the mode of this one.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE))

    def _connect_or_start_anew(self) -> SegmentDatabase:
        try:
            database = self._connect()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
        else:
            try:
                if self._is_sound(database):
                    database.create()
                    return database
            except BaseException:
                database.close()
                raise
            database.close()
        self._put_aside()
        self._make_index_file()
        database = self._connect()
        database.create()
        return database

    @staticmethod
    def _is_sound(database: SegmentDatabase) -> bool:
        try:
            return database.is_sound
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            return False

    def _put_aside(self) -> None:
        _LOG.warning("the index of %s is broken: starting empty", self._root)
        for name in ("index.db", "index.db-wal", "index.db-shm"):
            with suppress(FileNotFoundError):
                (self._root / name).rename(self._root / f"broken-{name}")

    def _fit(self, index: SegmentIndex, max_segments: int) -> None:
        """Have as many segments as were asked for, or as there is room for."""
        for segment in index.segments():
            if segment >= max_segments or not self.files.is_whole(segment):
                index.drop_segment(segment)
        there = set(index.segments())
        self.files.sweep(there)
        for segment in range(max_segments):
            if self._stop.is_set():
                raise ClosedError("the store was closed while it was opened")
            if segment not in there:
                try:
                    self.files.create(segment)
                except OSError as error:
                    _LOG.warning(
                        "%s has room for %d segments of %d bytes, not %d: %s",
                        self._root,
                        len(index.segments()),
                        self.files.segment_bytes,
                        max_segments,
                        error,
                    )
                    return
                index.add_segment(segment)

    def _write_format(self) -> None:
        control = self._root / "asyncache.json"
        draft = self._root / "asyncache.json.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(draft, flags, _MODE), "w") as file:
            file.write(json.dumps(self._format) + "\n")
        draft.rename(control)


def _segment_bytes_of(path: str) -> int:
    control = read_control(path)
    if control.kind is not StoreKind.SEGMENTS:
        raise StoreError(f"{path!r} holds {control.kind.value}, not segments")
    return control.segment_bytes
