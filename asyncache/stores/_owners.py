"""Who uses a directory: each user holds a lock that the kernel lets go at its death.

A process id would do on one machine; but containers count theirs apart, and a store in
shared memory has users in several.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import suppress

_MODE = 0o600
_NAME = re.compile(r"[0-9a-f]{32}")


class Owner:
    """A user of a directory, for as long as its file is locked.

    Args:
        directory: Where users' files are; it exists.

    Raises:
        OSError: If there cannot be one more.
    """

    def __init__(self, directory: str) -> None:
        self.name = secrets.token_hex(16)
        self._path = f"{directory}/{self.name}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, _MODE)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def leave(self, *, owns_something: bool) -> None:
        """Be no user any more; what is left behind is a dead user's."""
        if not owns_something:
            with suppress(OSError):
                os.unlink(self._path)  # noqa: PTH108 - a string all along
        os.close(self._descriptor)


def is_alive(directory: str, name: str) -> bool:
    """Return whether a user may still be there.

    One whose file is gone may be: whoever tidies up a disk asks no lock.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(f"{directory}/{name}", flags)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def sweep(directory: str) -> None:
    """Forget all users: none is there, and their claims are gone."""
    for name in os.listdir(directory):  # noqa: PTH208 - strings all along
        if _NAME.fullmatch(name):
            os.unlink(f"{directory}/{name}")  # noqa: PTH108 - as above
