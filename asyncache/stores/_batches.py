"""Batches cut into jobs for threads, and pages into layer slices."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

from asyncache.core import PageKey
from asyncache.stores._abc import PageBuffers
from asyncache.threads import Stop

# Where the hop between threads stops to count against the bytes that a job moves.
_JOB_BYTES = 4 * 2**20


def until(stop: Stop, part: range) -> Iterator[int]:
    """Yield the pages of a job, as long as anybody waits for them."""
    for index in part:
        stop.pause()
        if stop.is_set():
            return
        yield index


def first_places(keys: Sequence[PageKey]) -> dict[PageKey, int]:
    """Return the place at which each page is named first, in order."""
    places: dict[PageKey, int] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, place)
    return places


def share(
    pages: Sequence[PageBuffers], num_threads: int, *, rounds: int = 1
) -> list[range]:
    """Cut a batch into jobs for threads that do nothing but move bytes.

    More threads than there are cores would only wait for one another. In two rounds
    one that began late has less to do in the second.
    """
    num_bytes = sum(map(len, itertools.chain.from_iterable(pages)))
    num_jobs = rounds * max(1, min(num_threads, len(os.sched_getaffinity(0))))
    return split(pages, max(_JOB_BYTES, -(-num_bytes // num_jobs)))


def split(pages: Sequence[PageBuffers], num_bytes: int) -> list[range]:
    """Cut a batch into parts of at least so many bytes, the last one excepted."""
    parts, start, num_left = [], 0, num_bytes
    for index, page in enumerate(pages):
        num_left -= sum(map(len, page))
        if num_left <= 0:
            parts.append(range(start, index + 1))
            start, num_left = index + 1, num_bytes
    if start < len(pages):
        parts.append(range(start, len(pages)))
    return parts


def slices(buffers: PageBuffers, layer_bytes: int) -> list[memoryview]:
    """Cut a page's buffers into layer slices."""
    return [
        buffer[start : start + layer_bytes]
        for buffer in buffers
        for start in range(0, len(buffer), layer_bytes)
    ]


def runs(keys: Sequence[PageKey], part: range) -> Iterator[range]:
    """Yield the runs of a part whose pages are of one space."""
    start = part.start
    for place in part:
        here, first = keys[place].space, keys[start].space
        if here is not first and here != first:
            yield range(start, place)
            start = place
    if start < part.stop:
        yield range(start, part.stop)
