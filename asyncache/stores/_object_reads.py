"""How pages are read: what is together in an object is asked for together.

A page that is not where it was remembered, or not what was put, is looked at once
more: its pointer is asked for again, and what that leads to is read on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from asyncache.core import ClosedError, PageKey
from asyncache.stores._abc import PageBuffers, Status
from asyncache.stores._batches import until
from asyncache.stores._object_catalog import Catalog, Place
from asyncache.stores._object_lane import Lane
from asyncache.stores._object_pages import PACK_BYTES, Shelf
from asyncache.threads import Stop

# What can be transferred in the time of a round trip: less than that is skipped by
# reading it.
_GAP_BYTES = 256 * 2**10
# Bounds the memory that a request holds to this and a page.
_MAX_BYTES = PACK_BYTES


@dataclass(frozen=True, slots=True)
class _Asked:
    """A page that is read: its number in the batch, its kind, where, and what of it."""

    number: int
    shelf: Shelf
    place: Place
    layers: range

    @property
    def head(self) -> range:
        """Where in its object its head is."""
        start = self.place.start
        return range(start, start + self.shelf.frame.head_bytes)

    @property
    def slices(self) -> range:
        """Where in its object the slices are that are wanted."""
        size, start = self.shelf.frame.layer_bytes, self.head.stop
        return range(start + self.layers.start * size, start + self.layers.stop * size)

    @property
    def is_object(self) -> bool:
        """Whether all of an object is wanted."""
        all_layers = len(self.layers) == self.shelf.frame.num_layers
        return self.place.is_alone and all_layers

    @property
    def spans(self) -> list[range]:
        """What of its object to read."""
        if self.slices.start - self.head.stop > _GAP_BYTES:
            return [self.head, self.slices]
        return [range(self.head.start, self.slices.stop)]


class _Run:
    """Parts of an object that are read at once: one of many pages, or two of one."""

    def __init__(self, page: _Asked) -> None:
        self.path = page.place.path
        self.pages = [page]
        self.spans = page.spans
        self.is_object = page.is_object

    def takes(self, page: _Asked) -> bool:
        """Add a page that lies behind, if near; return whether it does."""
        if page.place.path != self.path or len(self.spans) > 1 or len(page.spans) > 1:
            return False
        [mine], [other] = self.spans, page.spans
        span = range(mine.start, max(mine.stop, other.stop))
        if other.start - mine.stop > _GAP_BYTES or len(span) > _MAX_BYTES:
            return False
        self.spans = [span]
        self.pages.append(page)
        return True

    def widen(self, num_bytes: int) -> None:
        """Read all of the object, so that all is of one and the same."""
        self.spans = [range(num_bytes)]
        self.is_object = True

    def source(
        self, page: _Asked, parts: Sequence[memoryview]
    ) -> tuple[memoryview, memoryview]:
        """Return a page's head and slices in what was read."""
        head = _cut(parts[0], self.spans[0], page.head)
        return head, _cut(parts[-1], self.spans[-1], page.slices)


class Reading:
    """A call that reads.

    Args:
        catalog: Where the pages are.
        lane: Bounds what is under way: requests, and with them memory. Its threads
            verify and copy.
        keys: What is read.
        targets: Where to.
        layers: What of it; all when None.

    Attributes:
        statuses: What became of each page so far.
    """

    def __init__(
        self,
        catalog: Catalog,
        lane: Lane,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None,
    ) -> None:
        self._bucket = catalog.bucket
        self._catalog = catalog
        self._lane = lane
        self._keys = keys
        self._targets = targets
        self._layers = layers
        self.statuses = [Status.UNAVAILABLE] * len(keys)
        # Pages that are not there, or not what was put: MISS or CORRUPT.
        self._doubts: dict[int, Status] = {}

    async def run(self) -> None:
        """Read; cancelled, it leaves the status of a page that it did not reach."""
        places = dict(enumerate(map(self._catalog.place, self._keys)))
        unknown = [number for number, place in places.items() if place is None]

        async def look(number: int) -> None:
            places[number] = await self._look(number)

        await self._lane.each(unknown, look)
        await self._lane.each(_runs(self._asked(places)), self._fetch)
        if self._doubts:
            await self._look_again()

    async def _look_again(self) -> None:
        runs: list[_Run] = []
        doubts, self._doubts = self._doubts, {}

        async def look(number: int) -> None:
            key = self._keys[number]
            self._catalog.forget(key)
            place = self._catalog.place(key) or await self._look(number)
            for page in self._asked({number: place}):
                run = _Run(page)
                if page.place.is_alone:
                    run.widen(page.shelf.frame.file_bytes)
                runs.append(run)

        async def drop(number: int) -> None:
            await self._catalog.drop(self._keys[number])

        await self._lane.each(list(doubts), look)
        await self._lane.each(runs, self._fetch)
        for number, status in self._doubts.items():
            self.statuses[number] = status
        await self._lane.each(list(self._doubts), drop)

    async def _look(self, number: int) -> Place | None:
        status, place = await self._catalog.look(self._keys[number])
        if status is not Status.HIT:
            self.statuses[number] = status
        return place if status is Status.HIT else None

    async def _fetch(self, run: _Run) -> None:
        if run.is_object:
            status, parts = await self._bucket.read(run.path, run.spans[0].stop)
        else:
            status, parts = await self._bucket.read_spans(run.path, run.spans)
        if status is Status.HIT:
            await self._take_all(run, parts)
        elif status is Status.MISS and run.pages[0].place.is_alone:
            # Nothing leads to it, so that nothing has to be mended.
            for page in run.pages:
                self.statuses[page.number] = status
        elif status is not Status.UNAVAILABLE:
            self._doubts.update((page.number, status) for page in run.pages)

    async def _take_all(self, run: _Run, parts: Sequence[memoryview]) -> None:
        def take(numbers: range, stop: Stop) -> None:
            for number in until(stop, numbers):
                self._take(run, run.pages[number], parts)

        with suppress(ClosedError):  # closed meanwhile: nothing was reached
            await self._lane.workers.run(take, [range(len(run.pages))])

    def _take(self, run: _Run, page: _Asked, parts: Sequence[memoryview]) -> None:
        status = page.shelf.read_frame(
            self._keys[page.number].hash,
            page.layers,
            run.source(page, parts),
            self._targets[page.number],
        )
        if status is Status.HIT:
            self.statuses[page.number] = status
        else:
            self._doubts[page.number] = status

    def _asked(self, places: Mapping[int, Place | None]) -> Iterator[_Asked]:
        for number, place in places.items():
            if place is not None:
                shelf = self._catalog.shelf(self._keys[number].space)
                layers = self._layers or range(shelf.frame.num_layers)
                yield _Asked(number, shelf, place, layers)


def _runs(pages: Iterable[_Asked]) -> list[_Run]:
    runs: list[_Run] = []
    for page in sorted(pages, key=lambda page: (page.place.path, page.place.start)):
        if not runs or not runs[-1].takes(page):
            runs.append(_Run(page))
    return runs


def _cut(part: memoryview, base: range, span: range) -> memoryview:
    return part[span.start - base.start : span.stop - base.start]
