"""An archive's bytes in and out of a file or a pipe, off the event loop.

A read of a pipe that nobody writes to, and a write to one that nobody reads, would
outlast the user's patience: here Ctrl-C ends them at once.
"""

from __future__ import annotations

import os
import secrets
import select
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Self

from asyncache.cli._errors import InputError
from asyncache.threads import Stop, Workers

STANDARD = "-"
_MODE = 0o600
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class StoppedError(Exception):
    """Nobody waits for the bytes any more."""


class Stream:
    """A file or a pipe, and the thread that reads or writes it.

    ``async with`` opens and closes it. The blocking methods are for :meth:`run`.

    Args:
        open_blocking: Returns a descriptor, which the stream closes.
        tidy_blocking: Called when no byte moves any more, whatever happened.
    """

    def __init__(
        self,
        open_blocking: Callable[[], int],
        tidy_blocking: Callable[[], None] = lambda: None,
    ) -> None:
        self._open_blocking = open_blocking
        self._tidy_blocking = tidy_blocking
        self._workers = Workers(1, "asyncache-archive", owner="archive")
        self._descriptors: list[int] = []
        self._most: int | None = None
        self.num_bytes = 0
        """Bytes that went through."""

    async def __aenter__(self) -> Self:
        try:
            await self._workers.run(self._open, [None])
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._workers.aclose(self._close)

    async def run(self, call: Callable[[], None]) -> None:
        """Do something with the stream; cancelled, end that at once."""

        def job(_: None, stop: Stop) -> None:
            with stop.interrupting(self._interrupt):
                call()

        await self._workers.run(job, [None])

    def read_into(self, view: memoryview) -> int:
        """Fill a view; return how many bytes there were, fewer only at the end."""
        start = 0
        while start < len(view):
            self._wait(select.POLLIN)
            count = os.readv(self._descriptors[0], [view[start:]])
            if not count:
                break
            start += count
        self.num_bytes += start
        return start

    def write(self, views: Sequence[memoryview]) -> None:
        """Write all views, one after another."""
        for view in views:
            start = 0
            while start < len(view):
                self._wait(select.POLLOUT)
                stop = None if self._most is None else start + self._most
                start += os.write(self._descriptors[0], view[start:stop])
            self.num_bytes += len(view)

    def flush(self) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(self._descriptors[0])

    def _open(self, _: None, __: Stop) -> None:
        self._descriptors.append(self._open_blocking())
        self._descriptors.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        # So much a pipe takes without waiting, once it says that it takes anything.
        is_file = S_ISREG(os.fstat(self._descriptors[0]).st_mode)
        self._most = None if is_file else select.PIPE_BUF

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._tidy_blocking()

    def _interrupt(self) -> None:
        os.eventfd_write(self._descriptors[1], 1)

    def _wait(self, event: int) -> None:
        descriptor, wake = self._descriptors
        poll = select.poll()
        poll.register(descriptor, event)
        poll.register(wake, select.POLLIN)
        if any(ready == wake for ready, _ in poll.poll()):
            raise StoppedError


@asynccontextmanager
async def reading(file: str) -> AsyncIterator[Stream]:
    """Open an archive to be read.

    Raises:
        InputError: If that cannot be done.
    """
    opened = (
        partial(os.dup, sys.stdin.fileno())
        if file == STANDARD
        else partial(os.open, file, os.O_RDONLY | os.O_CLOEXEC)
    )
    try:
        async with Stream(opened) as stream:
            yield stream
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from error


@asynccontextmanager
async def writing(file: str) -> AsyncIterator[Stream]:
    """Open a new archive. A file is there when the block was left well, and whole.

    Raises:
        InputError: If that cannot be done.
        BrokenPipeError: If nobody reads stdout any more.
    """
    if file == STANDARD:
        if sys.stdout.isatty():
            raise InputError("FILE -: stdout is a terminal, no place for an archive")
        async with Stream(partial(os.dup, sys.stdout.fileno())) as stream:
            yield stream
        return
    path = Path(file)
    draft = path.parent / f".asyncache-{secrets.token_hex(8)}"

    def publish() -> None:
        stream.flush()
        draft.rename(path)

    try:
        async with Stream(
            partial(_create, path, draft), partial(draft.unlink, missing_ok=True)
        ) as stream:
            yield stream
            await stream.run(publish)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from error


def _create(path: Path, draft: Path) -> int:
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: no regular file; write - for stdout")
    return os.open(draft, _NEW, _MODE)
