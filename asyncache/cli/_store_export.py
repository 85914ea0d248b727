"""Pages of a store into an archive."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial

from asyncache.cli._progress import Watch
from asyncache.cli._store_commands import (
    BROKEN,
    as_counts,
    as_text,
    check_answered,
    tell,
)
from asyncache.cli._store_pages import Found, Page, count_for, read_pages
from asyncache.cli._store_place import Place
from asyncache.cli._store_stream import STANDARD, Stream, writing
from asyncache.cli._store_tar import END, member_head, padding
from asyncache.stores import frame_page


async def export_pages(place: Place, options: argparse.Namespace) -> int:
    """Copy all pages into an archive, and print how many."""
    found: Counter[Found] = Counter()
    total = await count_for(place, options.space)
    async with writing(options.file) as stream:
        with Watch(total, "pages") as watch:
            async for pages in read_pages(place, options.space, watch):
                await stream.run(partial(_write, stream, pages))
                found.update(page.found for page in pages)
        await stream.run(partial(stream.write, [memoryview(END)]))
        check_answered(place, found)
    if options.json:
        told = {"bytes": stream.num_bytes, **as_counts(found)}
        tell({"place": place.name, "file": options.file, **told})
    else:
        out = sys.stderr if options.file == STANDARD else sys.stdout
        out.write(f"{found.total()} pages: {as_text(found)}\n")
    return BROKEN if found[Found.CORRUPT] else 0


def _write(stream: Stream, pages: Sequence[Page]) -> None:
    for page in pages:
        if page.found in {Found.GOOD, Found.PLAIN}:
            # No digests for bytes that nobody could verify.
            is_good = page.found is Found.GOOD
            head = frame_page(page.key, page.memory, checksums=is_good)
            num_bytes = len(head) + len(page.memory)
            begin = memoryview(member_head(page.key, num_bytes) + head)
            stream.write([begin, page.memory, memoryview(padding(num_bytes))])
