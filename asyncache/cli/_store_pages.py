"""All pages of a store, read a bounded number of bytes at a time."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum

from asyncache.cli._progress import Watch
from asyncache.cli._store_place import Place
from asyncache.core import PageKey, PageSpace
from asyncache.stores import Status, frame_bytes

BATCH_BYTES = 32 * 2**20
BATCH_PAGES = 256
_MOST_PAGE_BYTES = 2**30
_MOST_LAYERS = 2**16


class Found(Enum):
    """What became of a page that was listed."""

    GOOD = "good"
    PLAIN = "without digests"
    """It was stored without digests: nobody can say whether its bytes are good."""
    CORRUPT = "corrupt"
    GONE = "gone"
    """Evicted or removed meanwhile, most likely."""
    UNANSWERED = "unanswered"
    TOO_LARGE = "too large"
    """A page of its space is no page of any model."""


_FOUND = {
    Status.HIT: Found.GOOD,
    Status.MISS: Found.GONE,
    Status.CORRUPT: Found.CORRUPT,
    Status.UNAVAILABLE: Found.UNANSWERED,
}


@dataclass(slots=True)
class Page:
    """A page that was read, or was to be."""

    key: PageKey
    memory: memoryview
    """All its layers, if it was GOOD or PLAIN; empty if it is too large."""
    found: Found


def is_sane(space: PageSpace) -> bool:
    """Return whether a space's pages can be read: anybody can write a name."""
    return frame_bytes(space) <= _MOST_PAGE_BYTES and space.num_layers <= _MOST_LAYERS


async def list_keys(place: Place, space: PageSpace | None) -> AsyncIterator[PageKey]:
    """Yield the keys of all pages, or of those of one space."""
    async for key in place.store.keys():
        if space is None or key.space == space:
            yield key


async def count_for(place: Place, space: PageSpace | None) -> int | None:
    """Return how many pages there are, for a bar to have an end; None if none has."""
    if not sys.stderr.isatty():
        return None
    return sum([1 async for _ in list_keys(place, space)])


async def read_pages(
    place: Place, space: PageSpace | None, watch: Watch
) -> AsyncIterator[list[Page]]:
    """Yield all pages, or those of one space, in batches of bounded bytes."""
    async for keys in _batches(list_keys(place, space)):
        pages = [_new_page(key) for key in keys]
        await _read(place, [page for page in pages if page.found is Found.GONE])
        yield pages
        for page in pages:
            watch.advance(failed=page.found is Found.CORRUPT)


def _new_page(key: PageKey) -> Page:
    if not is_sane(key.space):
        return Page(key, memoryview(b""), Found.TOO_LARGE)
    return Page(key, memoryview(bytearray(key.space.page_bytes)), Found.GONE)


async def _batches(keys: AsyncIterator[PageKey]) -> AsyncIterator[list[PageKey]]:
    batch: list[PageKey] = []
    num_bytes = 0
    async for key in keys:
        size = key.space.page_bytes if is_sane(key.space) else 0
        if batch and (num_bytes + size > BATCH_BYTES or len(batch) == BATCH_PAGES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(key)
        num_bytes += size
    if batch:
        yield batch


async def _read(place: Place, pages: Sequence[Page]) -> None:
    keys, targets = [page.key for page in pages], [[page.memory] for page in pages]
    for page, status in zip(
        pages, await place.store.get_into(keys, targets), strict=True
    ):
        page.found = _FOUND[status]
    missing = [page for page in pages if page.found is Found.GONE]
    plain = await place.plain() if missing else None
    if plain is None:
        return
    keys, targets = [page.key for page in missing], [[page.memory] for page in missing]
    statuses = await plain.get_into(keys, targets)
    for page, status in zip(missing, statuses, strict=True):
        page.found = Found.PLAIN if status is Status.HIT else _FOUND[status]
