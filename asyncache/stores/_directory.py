"""What a FileStore's directory holds beside pages: its format, dead writers' files."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress
from pathlib import Path

import aiofiles.os

from asyncache.core import StoreError
from asyncache.stores._control import CONTROL_NAME, StoreKind, read_control
from asyncache.stores._page_files import make_private

FORMAT = 2
TEMPORARY_NAME = "tmp"
_MODE = 0o600
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
        make_private(str(temporary))
        sweep(temporary)
        _agree_on_format(root / CONTROL_NAME, temporary / secrets.token_hex(8))
    except OSError as error:
        raise StoreError(f"cannot keep pages in {directory!r}: {error}") from error
    return str(temporary)


def look_up_blocking(directory: str) -> str:
    """Return where unfinished pages go in a directory, and change nothing in it.

    Raises:
        StoreError: If it is no store of files, or was written by a newer asyncache.
    """
    control = read_control(directory)
    if control.kind is not StoreKind.FILES or control.version != FORMAT:
        raise StoreError(
            f"{directory!r} holds {control.kind.value} of format {control.version}, "
            f"not files of format {FORMAT}"
        )
    return str(Path(directory) / TEMPORARY_NAME)


# One hop for all of it. A file object of aiofiles would be lost, open, when a call that
# opens it is cancelled.
prepare = aiofiles.os.wrap(prepare_blocking)
look_up = aiofiles.os.wrap(look_up_blocking)


def sweep(temporary: Path) -> int:
    """Remove the files of dead writers; return their bytes.

    Raises:
        OSError: If that cannot be done.
    """
    oldest, num_bytes = time.time() - STALE_S, 0
    for path in temporary.iterdir() if temporary.exists() else ():
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
        draft.touch(_MODE)
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
