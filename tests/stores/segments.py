"""What tests of SegmentStore share: a store of few slots, a look at its index."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import anyio.to_thread

from asyncache.core import TAG_BYTES, PageHash, PageKey, PageSpace
from asyncache.stores import (
    PageBuffers,
    SegmentStore,
    Status,
    Store,
    _segment_files as segment_files,
)
from asyncache.stores._segment_room import SLOTS_PER_SEGMENT
from asyncache.testing._samples import SPACE, content, new_source, new_target

# A slot each.
SLOT = 4096
WIDE = PageSpace("wide", "all", "uint8", (4, 2, 4, 2, 64))
WIDE_SLOT = 2 * SLOT


def small_store(
    directory: Path, num_segments: int = 1, num_slots: int = 4, **options: bool | int
) -> SegmentStore:
    """Return a store with few slots for pages of SPACE."""
    segment_bytes = num_slots * SLOT
    return SegmentStore(
        directory, num_segments * segment_bytes, segment_bytes=segment_bytes, **options
    )


def numbered(start: int, stop: int, space: PageSpace = SPACE) -> list[PageKey]:
    return [
        PageKey(PageHash(number.to_bytes(32, "little")), space)
        for number in range(start, stop)
    ]


async def put(store: Store, keys: Sequence[PageKey]) -> list[Status]:
    return await store.put(keys, [new_source(key) for key in keys])


async def get(store: Store, keys: Sequence[PageKey]) -> list[Status]:
    """Read pages, and check the bytes of those that are hits."""
    targets = [new_target(key) for key in keys]
    statuses = await store.get_into(keys, targets)
    for key, status, [target] in zip(keys, statuses, targets, strict=True):
        assert status is not Status.HIT or target == content(key)
    return statuses


async def which(store: Store, keys: Sequence[PageKey]) -> list[int]:
    """Return the places of the keys that are stored."""
    found = await store.contains(keys)
    return [place for place, is_there in enumerate(found) if is_there]


@contextmanager
def index_of(directory: Path) -> Iterator[sqlite3.Connection]:
    with closing(
        sqlite3.connect(directory / "index.db", isolation_level=None)
    ) as index:
        yield index


def check_index(index: sqlite3.Connection) -> dict[str, int]:
    """Raise unless each slot is in one state; return how many are in each.

    And unless each namespace has as many pages as are counted.
    """
    index.execute("BEGIN")
    per_space = dict(index.execute("SELECT id, slots FROM space"))
    segments = dict(index.execute("SELECT id, space FROM segment"))
    states = {
        state: dict(index.execute(f"SELECT slot, space FROM {state}"))
        for state in ("page", "free", "claim")
    }
    num_rows = sum(
        index.execute(f"SELECT count(*) FROM {state}").fetchone()[0] for state in states
    )
    assert index.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    found = Counter(
        (PageHash(page_hash)[:TAG_BYTES], space)
        for page_hash, space in index.execute("SELECT hash, space FROM page")
    )
    counted = index.execute("SELECT tag, space, pages FROM usage").fetchall()
    assert found == Counter({(tag, space): pages for tag, space, pages in counted})
    index.execute("COMMIT")
    slots = {
        segment * SLOTS_PER_SEGMENT + place: space
        for segment, space in segments.items()
        if space is not None
        for place in range(per_space[space])
    }
    assert num_rows == len(slots)
    assert {k: v for state in states.values() for k, v in state.items()} == slots
    return {state: len(rows) for state, rows in states.items()}


def counts(directory: Path) -> dict[str, int]:
    with index_of(directory) as index:
        return check_index(index)


def slot_of(directory: Path, key: PageKey) -> int:
    """Return where in its segment, the first, a page begins."""
    with index_of(directory) as index:
        query = "SELECT slot FROM page JOIN space ON id = space WHERE hash = ?"
        [(slot,)] = index.execute(
            f"{query} AND name = ?", (key.hash, key.space.name)
        ).fetchall()
    return slot * SLOT


class HeldRead:
    """Holds the first read of a slot when some bytes of it are read.

    Args:
        monkeypatch: Puts it in place.
        num_bytes: How many are read before it is held.
    """

    def __init__(self, monkeypatch, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._arrived, self._opened = threading.Event(), threading.Event()
        self._read_all = segment_files.read_all
        monkeypatch.setattr(segment_files, "read_all", self._read)

    async def arrived(self) -> None:
        await anyio.to_thread.run_sync(self._arrived.wait)

    def open(self) -> None:
        self._opened.set()

    def _read(
        self, descriptor: int, views: PageBuffers, offset: int, wanted: int
    ) -> bool:
        if self._arrived.is_set():
            return self._read_all(descriptor, views, offset, wanted)
        first, rest, left = [], [], self._num_bytes
        for view in views:
            first.append(view[:left])
            rest.append(view[left:])
            left -= min(left, len(view))
        self._read_all(descriptor, first, offset, self._num_bytes)
        self._arrived.set()
        self._opened.wait(30)
        return self._read_all(
            descriptor, rest, offset + self._num_bytes, wanted - self._num_bytes
        )
