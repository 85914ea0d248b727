"""Which packs nobody points at, and which pointers lead nowhere.

Packs are noted before pages. So a pack that is noted and not pointed at afterwards was
left by a dead writer, if it is old enough for every writer to be done with it; and a
pointer to one that is not noted may be to a newer one, for which is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from asyncache.core import PageKey, StoreError
from asyncache.stores._abc import Status
from asyncache.stores._object_bucket import Entry
from asyncache.stores._object_catalog import Catalog
from asyncache.stores._object_lane import Lane
from asyncache.stores._object_pages import POINTER_BYTES

# Longer than any call may take, by far.
_STALE = timedelta(hours=1)


class Census:
    """What is in a bucket, for whoever tidies up.

    Args:
        catalog: The pages.
        lane: Bounds what is under way.

    Attributes:
        num_bytes: Bytes removed so far.
    """

    def __init__(self, catalog: Catalog, lane: Lane) -> None:
        self._catalog = catalog
        self._lane = lane
        self._oldest = datetime.now(UTC) - _STALE
        self._packs: set[str] = set()
        self._unused: dict[str, int] = {}
        self.num_bytes = 0

    def note_packs(self, entries: Sequence[Entry]) -> None:
        """Note packs that are there, before any page."""
        for entry in entries:
            self._packs.add(entry.path)
            if entry.made < self._oldest:
                self._unused[entry.path] = entry.num_bytes

    async def note_pages(self, entries: Sequence[Entry]) -> None:
        """Note which packs these pages are in; remove those that are in none.

        Raises:
            StoreError: If there is no answer: nothing is known of these pages.
        """
        keys = filter(None, (self._catalog.key(entry.path) for entry in entries))
        packed = [key for key in keys if self._catalog.shelf(key.space).is_packed]
        left = set(packed)

        async def note(key: PageKey) -> None:
            status, place = await self._catalog.look(key)
            if place is not None:
                self._unused.pop(place.path, None)
                if place.path not in self._packs:
                    status = await self._catalog.bucket.has(place.path)
                if status is Status.MISS:
                    await self._catalog.drop(key)
                    self.num_bytes += POINTER_BYTES
            if status is not Status.UNAVAILABLE:
                left.discard(key)

        await self._lane.each(packed, note)
        if left:
            raise StoreError("cannot tell garbage from pages: no answer")

    async def remove_packs(self) -> None:
        """Remove the packs that no page is in."""

        async def remove(path: str) -> None:
            if await self._catalog.bucket.delete(path):
                self.num_bytes += self._unused[path]

        await self._lane.each(list(self._unused), remove)
