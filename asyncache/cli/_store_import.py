"""Pages of an archive into a store, each verified before it is put."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from asyncache.cli._errors import InputError
from asyncache.cli._progress import Watch
from asyncache.cli._store_commands import BROKEN, tell
from asyncache.cli._store_pages import BATCH_BYTES, BATCH_PAGES, is_sane
from asyncache.cli._store_place import Place
from asyncache.cli._store_stream import reading
from asyncache.cli._store_tar import TarReader
from asyncache.core import PageKey
from asyncache.stores import Status, Store, frame_bytes, unframe_page


class Fate(Enum):
    """What became of a page of an archive."""

    NEW = "new"
    THERE = "there already"
    REFUSED = "refused"
    """The store has no room for it, or keeps no pages without digests."""
    BAD = "bad"
    """It is not, to the bit, what was written for this page."""
    UNANSWERED = "unanswered"


_FATES = {
    Status.HIT: Fate.NEW,
    Status.REJECTED: Fate.REFUSED,
    Status.UNAVAILABLE: Fate.UNANSWERED,
}


@dataclass
class _Batch:
    """Pages that lie in memory, and how the part of the archive ended."""

    good: dict[PageKey, memoryview] = field(default_factory=dict)
    plain: dict[PageKey, memoryview] = field(default_factory=dict)
    """Pages without digests."""
    num_bytes: int = 0
    num_bad: int = 0
    num_twice: int = 0
    num_foreign: int = 0
    is_last: bool = False
    error: InputError | None = None
    """What cut the archive short; the pages before it are as good as any."""

    def fill(self, reader: TarReader) -> None:
        """Read pages until there are enough for a batch."""
        try:
            while self.num_bytes < BATCH_BYTES and len(self) < BATCH_PAGES:
                member = reader.next()
                if member is None:
                    self.is_last = True
                    return
                if member.key is None:
                    self.num_foreign += 1
                else:
                    self._take(reader, member.key, member.num_bytes)
        except InputError as error:
            self.error = error

    def __len__(self) -> int:
        return len(self.good) + len(self.plain)

    def _take(self, reader: TarReader, key: PageKey, num_bytes: int) -> None:
        if not is_sane(key.space) or num_bytes != frame_bytes(key.space):
            self.num_bad += 1
            return
        framed = memoryview(bytearray(num_bytes))
        reader.read_into(framed)
        try:
            page, has_digests = unframe_page(key, framed)
        except ValueError:
            self.num_bad += 1
            return
        if key in self.good or key in self.plain:
            self.num_twice += 1
            return
        self.num_bytes += num_bytes
        (self.good if has_digests else self.plain)[key] = page


async def import_pages(place: Place, options: argparse.Namespace) -> int:
    """Put all pages of an archive, and print what became of them."""
    fates: Counter[Fate] = Counter()
    num_foreign, batch = 0, _Batch()
    async with reading(options.file) as stream:
        reader = TarReader(stream, options.file)
        with Watch(None, "pages") as watch:
            while not batch.is_last:
                batch = _Batch()
                await stream.run(partial(batch.fill, reader))
                num_foreign += batch.num_foreign
                for fate, count in (await _put_batch(place, batch)).items():
                    fates[fate] += count
                    for _ in range(count):
                        watch.advance(failed=fate is Fate.BAD)
                if batch.error is not None:
                    raise batch.error
    _tell_fates(place, options, fates, num_foreign)
    if count := fates[Fate.UNANSWERED]:
        raise InputError(f"{place.name}: the store did not answer for {count} pages")
    return BROKEN if fates[Fate.BAD] or fates[Fate.REFUSED] else 0


async def _put_batch(place: Place, batch: _Batch) -> Counter[Fate]:
    fates = Counter({Fate.BAD: batch.num_bad, Fate.THERE: batch.num_twice})
    if batch.good:
        fates += await _put(place.store, batch.good)
    if batch.plain:
        # Put with digests, they would pass for verified.
        plain = await place.plain()
        if plain is None:
            fates[Fate.REFUSED] += len(batch.plain)
        else:
            fates += await _put(plain, batch.plain)
    return fates


async def _put(store: Store, pages: dict[PageKey, memoryview]) -> Counter[Fate]:
    found = await store.contains(list(pages))
    new = [key for key, is_there in zip(pages, found, strict=True) if not is_there]
    statuses = await store.put(new, [[pages[key]] for key in new])
    fates = Counter(_FATES[status] for status in statuses)
    fates[Fate.THERE] += len(pages) - len(new)
    return fates


def _tell_fates(
    place: Place,
    options: argparse.Namespace,
    fates: Counter[Fate],
    num_foreign: int,
) -> None:
    if options.json:
        counts = {fate.value.replace(" ", "_"): fates[fate] for fate in Fate}
        told = {"file": options.file, "place": place.name, **counts}
        tell({**told, "foreign": num_foreign})
        return
    words = [f"{fates[fate]} {fate.value}" for fate in Fate if fates[fate]]
    foreign = f"; {num_foreign} members are no pages" if num_foreign else ""
    told_text = ", ".join(words) or "none"
    sys.stdout.write(f"{fates.total()} pages: {told_text}{foreign}\n")
