"""The directory of a SegmentStore, and how it is opened and left.

::

    asyncache.json   what the directory is
    lock             shared by all users; exclusive while one that is alone sets up
    index.db         which page is where
    owners/          a locked file for each user
    000000.seg ...   the segments
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from asyncache.core import StoreError
from asyncache.stores._owners import Owner, is_alive, sweep
from asyncache.stores._segment_files import SegmentFiles
from asyncache.stores._segment_index import SegmentIndex
from asyncache.threads import Stop

FORMAT = "asyncache segments 1"
_LOG = logging.getLogger("asyncache")
_PRIVATE = 0o700


class SegmentDirectory:
    """A directory that this store uses until :meth:`close`. Blocking.

    Args:
        path: Made if it does not exist.
        max_segments: Segments to have, if nobody else uses the directory.
        segment_bytes: Length of each.
        durable: Whether commits wait for the disk.
        direct: Whether segments are opened for direct I/O.
        stop: Set when nobody waits for it any more.

    Raises:
        StoreError: If it cannot be used.
    """

    def __init__(
        self,
        path: str,
        *,
        max_segments: int,
        segment_bytes: int,
        durable: bool,
        direct: bool,
        stop: Stop,
    ) -> None:
        self._root = Path(path)
        self._durable = durable
        self._max_segments = max_segments
        self._stop = stop
        self._owner: Owner | None = None
        self._indices: list[SegmentIndex] = []
        self._lock = -1
        self.files = SegmentFiles(path, segment_bytes, direct=direct)
        try:
            self._root.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            (self._root / "owners").mkdir(mode=_PRIVATE, exist_ok=True)
            self._enter()
        except OSError as error:
            self.close()
            raise StoreError(f"cannot keep pages in {path!r}: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return self.files.num_segments * self.files.segment_bytes

    def new_index(self) -> SegmentIndex:
        """Return a connection to the index, for one thread; closed with all others."""
        assert self._owner is not None
        return self._connect(self._owner.name)

    def close(self) -> None:
        """Use it no more."""
        while self._indices:
            self._indices.pop().close()
        self.files.close()
        if self._owner is not None:
            self._owner.leave()
            self._owner = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _connect(self, owner: str) -> SegmentIndex:
        owners = str(self._root / "owners")
        index = SegmentIndex(
            str(self._root / "index.db"),
            owner,
            lambda name: is_alive(owners, name),
            durable=self._durable,
        )
        self._indices.append(index)
        return index

    def _enter(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._lock = os.open(self._root / "lock", flags, 0o600)
        if self._try_lock(fcntl.LOCK_EX):
            self._set_up()
        # Whoever is alone sets up in a moment; and what it set up holds for all.
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self._check_format()
        self._owner = Owner(str(self._root / "owners"))
        self.files.num_segments = len(self.new_index().segments())
        if not self.files.num_segments:
            raise StoreError(
                f"{self._root} has no room for a segment of {self.files.segment_bytes}"
            )

    def _try_lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    # While nobody else uses it.

    def _set_up(self) -> None:
        self._write_format()
        sweep(str(self._root / "owners"))
        index = self._connect("")
        if not index.is_sound:
            index.close()
            self._indices.remove(index)
            self._put_aside()
            index = self._connect("")
        index.create()
        index.reclaim()
        self._fit(index)
        index.close()
        self._indices.remove(index)

    def _put_aside(self) -> None:
        aside = f"broken-{secrets.token_hex(4)}"
        _LOG.warning("the index of %s is broken: starting empty", self._root)
        for name in ("index.db", "index.db-wal", "index.db-shm"):
            with suppress(FileNotFoundError):
                (self._root / name).rename(self._root / f"{name}.{aside}")

    def _fit(self, index: SegmentIndex) -> None:
        """Have as many segments as were asked for, or as there is room for."""
        for segment in index.segments():
            if segment >= self._max_segments or not self.files.is_whole(segment):
                index.drop_segment(segment)
                self.files.delete(segment)
        there = set(index.segments())
        for segment in range(self._max_segments):
            if self._stop.is_set():
                return
            if segment not in there:
                try:
                    self.files.create(segment)
                except OSError as error:
                    _LOG.warning(
                        "%s has room for %d segments of %d bytes, not %d: %s",
                        self._root,
                        segment,
                        self.files.segment_bytes,
                        self._max_segments,
                        error,
                    )
                    return
                index.add_segment(segment)

    def _write_format(self) -> None:
        control = self._root / "asyncache.json"
        if not control.exists():
            draft = self._root / f"asyncache.json.{secrets.token_hex(4)}"
            draft.write_text(json.dumps(self._format) + "\n")
            draft.rename(control)
        self._check_format()

    def _check_format(self) -> None:
        control = self._root / "asyncache.json"
        text = control.read_bytes()
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if found != self._format:
            raise StoreError(
                f"{control} says {text[:80]!r}, wanted {json.dumps(self._format)}: "
                "give the store another directory"
            )

    @property
    def _format(self) -> dict[str, object]:
        return {"format": FORMAT, "segment_bytes": self.files.segment_bytes}
