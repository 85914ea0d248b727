"""How pages are written: small ones packed, and published only when their pack is.

obstore reads what it sends on threads of its own, and lets go of it some time after
it was called off. So it is given a copy, which takes a hundredth of the time that a
server takes; the caller's memory is read by threads that a cancelled call waits for.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from asyncache.core import ClosedError, PageKey
from asyncache.stores._abc import PageBuffers, Status
from asyncache.stores._batches import until
from asyncache.stores._object_bucket import Made
from asyncache.stores._object_catalog import Catalog
from asyncache.stores._object_lane import Lane
from asyncache.stores._object_pages import PACK_ID_BYTES, Pointer, Shelf
from asyncache.threads import Stop

_Group = list[PageKey]


class Writing:
    """A call that writes.

    Args:
        catalog: Where to.
        lane: Bounds what is under way: requests, and with them memory. Its threads
            read the sources.
        keys: What is written.
        sources: Its bytes.
    """

    def __init__(
        self,
        catalog: Catalog,
        lane: Lane,
        keys: Sequence[PageKey],
        sources: Sequence[PageBuffers],
    ) -> None:
        self._bucket = catalog.bucket
        self._catalog = catalog
        self._lane = lane
        self._keys = keys
        # A page that is named twice is written once, the first of the two.
        self._sources = dict(zip(reversed(keys), reversed(sources), strict=True))
        self._found = dict.fromkeys(keys, Status.UNAVAILABLE)

    @property
    def statuses(self) -> list[Status]:
        """What became of each page so far."""
        return [self._found[key] for key in self._keys]

    async def run(self) -> None:
        """Write; cancelled, it leaves the status of a page that it did not reach."""
        new = set(filter(self._catalog.pop_missing, self._found))

        async def look(key: PageKey) -> None:
            status, _ = await self._catalog.look(key)
            if status in {Status.MISS, Status.CORRUPT}:
                self._catalog.pop_missing(key)
                new.add(key)
            else:
                self._found[key] = status

        await self._lane.each([key for key in self._found if key not in new], look)
        groups = self._grouped(key for key in self._found if key in new)
        await self._lane.spread(groups, self._store)

    def _grouped(self, keys: Iterable[PageKey]) -> list[_Group]:
        """Return what goes into an object each, in order."""
        groups: list[_Group] = []
        open_groups: dict[Shelf, _Group] = {}
        for key in keys:
            shelf = self._catalog.shelf(key.space)
            group = open_groups.get(shelf)
            if group is None or len(group) == shelf.num_together:
                group = open_groups[shelf] = []
                groups.append(group)
            group.append(key)
        return groups

    async def _store(self, group: _Group) -> None:
        shelf = self._catalog.shelf(group[0].space)
        pack = secrets.token_bytes(PACK_ID_BYTES)
        async with self._lane.room:
            data = await self._encode(shelf, group)
            if data is None:
                return
            if shelf.is_packed:
                made = await self._bucket.write(self._catalog.pack_path(pack), data)
            else:
                made = await self._bucket.make(self._catalog.path(group[0]), data)
            del data  # what the room bounds
        if shelf.is_packed and made is Made.NOW:
            await self._publish(shelf, group, pack)
        else:
            self._found.update(dict.fromkeys(group, made.status))

    async def _publish(self, shelf: Shelf, group: _Group, pack: bytes) -> None:
        starts = {key: n * shelf.frame.file_bytes for n, key in enumerate(group)}
        made: list[Made] = []

        async def publish(key: PageKey) -> None:
            made.append(await self._catalog.publish(key, Pointer(pack, starts[key])))
            self._found[key] = made[-1].status

        await self._lane.each(group, publish)
        # What was not answered may be done all the same, and lead to the pack.
        if not {Made.NOW, Made.UNKNOWN} & set(made):
            await self._lane.each([self._catalog.pack_path(pack)], self._bucket.delete)

    async def _encode(self, shelf: Shelf, group: _Group) -> memoryview | None:
        """Return a copy of the pages' frames; None if the store was closed."""
        num_bytes = shelf.frame.file_bytes
        data = np.empty(len(group) * num_bytes, dtype=np.uint8).data
        has_ended = True

        def copy(part: range, stop: Stop) -> None:
            nonlocal has_ended
            for number in until(stop, part):
                key, start = group[number], number * num_bytes
                target = data[start : start + num_bytes]
                shelf.write_frame(key.hash, self._sources[key], target)
            has_ended = stop.is_set()

        with suppress(ClosedError):  # closed meanwhile: nothing was reached
            await self._lane.workers.run(copy, [range(len(group))])
        return None if has_ended else data
