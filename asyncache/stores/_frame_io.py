"""Bytes of pages in and out of open files, with as few system calls as there can be."""

from __future__ import annotations

import os
from collections.abc import Sequence

_IOV_MAX = os.sysconf("SC_IOV_MAX")


def read_all(
    descriptor: int, views: Sequence[memoryview], offset: int, wanted: int
) -> bool:
    """Fill the views; return whether the file had exactly ``wanted`` bytes for them."""
    count = os.preadv(descriptor, views[:_IOV_MAX], offset)
    while count and count < wanted:
        more = os.preadv(
            descriptor, drop_bytes(views, count)[:_IOV_MAX], offset + count
        )
        if not more:
            break
        count += more
    return count == wanted


def write_all(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
    """Write the views one after the other."""
    while views:
        count = os.pwritev(descriptor, views[:_IOV_MAX], offset)
        views, offset = drop_bytes(views, count), offset + count


def drop_bytes(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what is left of the views without their first ``count`` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []
