"""What a FileStore's directory holds beside pages: its format, dead writers' files."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress
from pathlib import Path

import aiofiles.os

from asyncache.core import StoreError

FORMAT = 1
CONTROL_NAME = "asyncache.json"
TEMPORARY_NAME = "tmp"
# Longer than any page takes to write, on any disk that is worth a cache.
STALE_S = 3600.0


def prepare_blocking(directory: str) -> str:
    """Make a directory ready for pages; return where unfinished ones go.

    Any number of processes may do this at the same time.

    Raises:
        StoreError: If it cannot be created or written, is no store, or was written by
            a newer asyncache.
    """
    root = Path(directory)
    temporary = root / TEMPORARY_NAME
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        sweep(temporary)
        _agree_on_format(root / CONTROL_NAME, temporary / secrets.token_hex(8))
    except OSError as error:
        raise StoreError(f"cannot keep pages in {directory!r}: {error}") from error
    return str(temporary)


# One hop for all of it. A file object of aiofiles would be lost, open, when a call that
# opens it is cancelled.
prepare = aiofiles.os.wrap(prepare_blocking)


def sweep(temporary: Path) -> int:
    """Remove the files of dead writers; return their bytes.

    Raises:
        OSError: If that cannot be done.
    """
    oldest, num_bytes = time.time() - STALE_S, 0
    for path in temporary.iterdir():
        # Another process sweeps too; and a directory is none of ours.
        with suppress(FileNotFoundError, IsADirectoryError):
            found = path.lstat()
            if found.st_mtime < oldest:
                path.unlink()
                num_bytes += found.st_size
    return num_bytes


def _agree_on_format(control: Path, draft: Path) -> None:
    # Written in any case, to see now and not at the first page whether that works.
    try:
        draft.write_text(json.dumps({"format": FORMAT}) + "\n")
        found = _read_format(control)
        if found is None:
            draft.rename(control)
        elif found != FORMAT:
            raise StoreError(
                f"{control} says format {found}, this asyncache knows {FORMAT}: "
                "give the store another directory"
            )
    finally:
        draft.unlink(missing_ok=True)


def _read_format(control: Path) -> int | None:
    try:
        text = control.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return int(json.loads(text)["format"])
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{control} is no store's: {text[:80]!r}") from error
