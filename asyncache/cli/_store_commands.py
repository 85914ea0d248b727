"""What is done at one store: list, count, read, tidy up."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping

import anyio.to_thread

from asyncache.cli._errors import InputError
from asyncache.cli._progress import Watch
from asyncache.cli._store_pages import Found, count_for, list_keys, read_pages
from asyncache.cli._store_place import Place
from asyncache.core import PageSpace
from asyncache.stores import SegmentStore, StoreKind

BROKEN = 1
"""The exit code where a page was corrupt, or did not get to where it should."""


async def ls(place: Place, options: argparse.Namespace) -> int:
    """Print a line for each page."""
    num_left = options.limit
    async for key in list_keys(place, options.space):
        if num_left is not None:
            if num_left == 0:
                break
            num_left -= 1
        row = {
            "hash": key.hash.hex(),
            "space": key.space.name,
            "bytes": key.space.page_bytes,
        }
        words = json.dumps(row) if options.json else " ".join(map(str, row.values()))
        sys.stdout.write(f"{words}\n")
    return 0


async def stat(place: Place, options: argparse.Namespace) -> int:
    """Print how many pages there are, and how full the store is."""
    pages: Counter[PageSpace] = Counter()
    with Watch(None, "pages") as watch:
        async for key in list_keys(place, None):
            pages[key.space] += 1
            watch.advance(failed=False)
    spaces = [
        {
            "space": space.name,
            "pages": pages[space],
            "bytes": pages[space] * space.page_bytes,
        }
        for space in sorted(pages, key=lambda space: space.name)
    ]
    told: dict[str, object] = {
        "place": place.name,
        "kind": place.kind,
        "format": None if place.control is None else place.control.version,
        "pages": pages.total(),
        "bytes": sum(pages[space] * space.page_bytes for space in pages),
        **await _room(place, options.place),
    }
    if options.json:
        tell({**told, "spaces": spaces})
        return 0
    for name, value in told.items():
        if value is not None:
            sys.stdout.write(f"{name.replace('_', ' ')}: {value}\n")
    for row in spaces:
        sys.stdout.write("{space}: {pages} pages, {bytes} bytes\n".format(**row))
    return 0


async def _room(place: Place, directory: str) -> dict[str, object]:
    """Return how full a store is, as far as it can be known; None is not."""
    if isinstance(place.store, SegmentStore):
        usage = await place.store.usage()
        return {
            "capacity_bytes": usage.num_bytes,
            "free_bytes": usage.free_bytes,
            "claims": usage.num_claims,
            "dead_claims": usage.num_dead_claims,
        }
    free = cap = None
    if place.control is not None and place.control.kind is StoreKind.FILES:
        found = await anyio.to_thread.run_sync(os.statvfs, directory)
        free = found.f_bavail * found.f_frsize  # of the disk
        cap = place.control.max_bytes
    return {
        "capacity_bytes": cap,
        "free_bytes": free,
        "claims": None,
        "dead_claims": None,
    }


async def verify(place: Place, options: argparse.Namespace) -> int:
    """Read all pages, and print how many are good."""
    found: Counter[Found] = Counter()
    num_bytes = 0
    with Watch(await count_for(place, options.space), "pages") as watch:
        async for pages in read_pages(place, options.space, watch):
            for page in pages:
                found[page.found] += 1
                num_bytes += page.memory.nbytes
    told = {"pages": found.total(), "bytes": num_bytes, **as_counts(found)}
    if options.json:
        tell({"place": place.name, **told})
    else:
        sys.stdout.write(
            f"{found.total()} pages, {num_bytes} bytes: {as_text(found)}\n"
        )
    check_answered(place, found)
    return BROKEN if found[Found.CORRUPT] else 0


async def collect(place: Place, options: argparse.Namespace) -> int:
    """Give back what dead writers left, and print how much that was."""
    num_bytes = await place.store.collect_garbage()
    if options.json:
        tell({"place": place.name, "freed_bytes": num_bytes})
    else:
        sys.stdout.write(f"{num_bytes} bytes freed\n")
    return 0


# What is told.


def tell(value: Mapping[str, object]) -> None:
    """Print one JSON object."""
    sys.stdout.write(json.dumps(value) + "\n")


def as_counts(found: Counter[Found]) -> dict[str, int]:
    """Return how many pages there were of each kind, by names for JSON."""
    return {kind.value.replace(" ", "_"): found[kind] for kind in Found}


def as_text(found: Counter[Found]) -> str:
    """Return the same for a person, without what there was none of."""
    words = {kind: f"{found[kind]} {kind.value}" for kind in Found if found[kind]}
    if Found.CORRUPT in words:
        words[Found.CORRUPT] += " and removed"
    return ", ".join(words.values()) or "none"


def check_answered(place: Place, found: Counter[Found]) -> None:
    """Raise InputError if the store had no answer for some pages."""
    if count := found[Found.UNANSWERED]:
        raise InputError(f"{place.name}: the store did not answer for {count} pages")
