"""What a directory says that it holds: pages in files, or in segments."""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from asyncache.core import StoreError
from asyncache.stores._file_room import read_cap

CONTROL_NAME = "asyncache.json"
_SEGMENTS = re.compile(r"asyncache segments ([0-9]{1,9})")


class StoreKind(Enum):
    """What keeps pages in a directory."""

    FILES = "files"
    """A :class:`FileStore`."""
    SEGMENTS = "segments"
    """A :class:`SegmentStore`."""


class Control(NamedTuple):
    """What the control file of a directory says."""

    kind: StoreKind
    version: int
    """Of the format; another asyncache may have written it."""
    segment_bytes: int
    """Length of a segment; 0 where there are none."""
    max_bytes: int | None = None
    """What the pages in files may take, as who wrote last has it; None if all."""


def read_control(directory: str) -> Control:
    """Return what a directory says that it holds. Blocking.

    Raises:
        StoreError: If that is no store.
    """
    control = Path(directory) / CONTROL_NAME
    try:
        text = control.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreError(
            f"{directory!r} holds no store: it has no {control.name}"
        ) from (error)
    except OSError as error:
        raise StoreError(f"cannot read {str(control)!r}: {error}") from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    match found:
        case {"format": int(version)} if not isinstance(version, bool):
            return Control(StoreKind.FILES, version, 0, read_cap(directory))
        case {"format": str(words), "segment_bytes": int(num_bytes)}:
            if (match := _SEGMENTS.fullmatch(words)) and num_bytes > 0:
                return Control(StoreKind.SEGMENTS, int(match[1]), num_bytes)
    raise StoreError(f"{control} is no store's: {text[:80]!r}")
