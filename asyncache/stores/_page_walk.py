"""What is under names of pages in a FileStore's directory. Blocking, for threads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from stat import S_ISREG
from typing import NamedTuple

from asyncache.core import PageHash, PageKey, PageSpace
from asyncache.stores._frame import frame_bytes

_PAGE = re.compile(r"([0-9a-f]{64})\.kv")
_ABSENT = (FileNotFoundError, NotADirectoryError)


class Entry(NamedTuple):
    """What is where a page would be."""

    key: PageKey
    is_page: bool
    """Whether it is a regular file, as long as the page."""
    num_bytes: int
    """Its length; 0 if it is no file."""


def walk(directory: str) -> Iterator[Entry | None]:
    """Yield what has the name of a page, and None for all else that was looked at.

    So whoever takes a number of them has done a bounded part of the walk.

    Raises:
        OSError: If a directory that is there cannot be read.
    """
    for name in _names(directory):
        yield None
        with suppress(ValueError):
            yield from _walk_space(f"{directory}/{name}", PageSpace.from_name(name))


def _walk_space(directory: str, space: PageSpace) -> Iterator[Entry | None]:
    for half in _names(directory):
        yield None
        for name in _names(f"{directory}/{half}"):
            match = _PAGE.fullmatch(name)
            if match is None or not name.startswith(half) or len(half) != 2:  # noqa: PLR2004
                yield None
            else:
                key = PageKey(PageHash(bytes.fromhex(match[1])), space)
                yield _look(f"{directory}/{half}/{name}", key)


def _look(path: str, key: PageKey) -> Entry | None:
    try:
        found = os.lstat(path)
    except _ABSENT:
        return None
    if not S_ISREG(found.st_mode):
        return Entry(key, is_page=False, num_bytes=0)
    is_page = found.st_size == frame_bytes(key.space)
    return Entry(key, is_page=is_page, num_bytes=found.st_size)


def _names(directory: str) -> Iterator[str]:
    """Yield what is in a directory; nothing if it is none, or gone."""
    with suppress(*_ABSENT), os.scandir(directory) as entries:
        for entry in entries:
            yield entry.name
