"""Where pages are: which store that is, and how it is opened as it is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from asyncache.cli._errors import InputError
from asyncache.cli._store_stream import STANDARD
from asyncache.core import StoreError
from asyncache.stores import (
    Control,
    FileStore,
    ObjectStore,
    RedisStore,
    SegmentStore,
    Store,
    StoreKind,
    read_control,
)

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")
_SECRETS = re.compile(r"(?<=://)[^/]*@|\?.*", re.DOTALL)
_REDIS = frozenset({"redis", "rediss", "unix"})
_SEGMENT_BYTES = 256 * 2**20


@dataclass(kw_only=True)
class Place:
    """A store that is open, and what else is known of where it is."""

    name: str
    """As the user gave it, without passwords."""
    kind: str
    store: Store
    """Serves what it can verify."""
    stack: AsyncExitStack
    """Closes what is opened."""
    control: Control | None = None
    """What the directory says of itself; None if there is none."""
    open_plain: Callable[[], Store] | None = None
    """Opens the store so that it serves pages without digests too, if it can."""
    _plain: Store | None = None

    async def plain(self) -> Store | None:
        """Return the store that serves and keeps pages without digests, if one does."""
        if self._plain is None and self.open_plain is not None:
            self._plain = await _opened(self.open_plain(), self.stack)
        return self._plain


Command = Callable[[Place, argparse.Namespace], Awaitable[int]]


def run_at(options: argparse.Namespace, command: Command) -> int:
    """Run a command at the place that the options say; return the exit code."""
    name = _SECRETS.sub("", options.place)
    try:
        return anyio.run(partial(_run, name, options, command))
    except (StoreError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise InputError(f"{name}: {error}") from error


async def _run(name: str, options: argparse.Namespace, command: Command) -> int:
    found = _SCHEME.match(options.place)
    async with AsyncExitStack() as stack:
        if found is None:
            place = await _at_directory(name, options, stack)
        else:
            place = await _at_url(name, found[1], options, stack)
        return await command(place, options)


async def _opened(store: Store, stack: AsyncExitStack) -> Store:
    # Closed also if it cannot be opened, for its threads.
    stack.push_async_callback(store.aclose)
    await store.open()
    return store


async def _at_url(
    name: str, scheme: str, options: argparse.Namespace, stack: AsyncExitStack
) -> Place:
    if "create" in options and options.create is not None:
        raise InputError(f"--create makes a directory, not {name}")
    is_redis = scheme in _REDIS
    make: Callable[..., Store] = RedisStore if is_redis else ObjectStore
    prefix = {} if options.prefix is None else {"prefix": options.prefix}
    try:
        store = make(options.place, **prefix)
    except ValueError as error:
        raise InputError(f"--prefix: {error}") from error
    return Place(
        name=name,
        kind="redis" if is_redis else "objects",
        store=await _opened(store, stack),
        stack=stack,
    )


async def _at_directory(
    name: str, options: argparse.Namespace, stack: AsyncExitStack
) -> Place:
    _refuse_prefix(name, options)
    if "create" in options and options.create is not None:
        await _create(options)
    control = await anyio.to_thread.run_sync(read_control, options.place)
    opened: Callable[..., Store] = (
        partial(FileStore, options.place, control.max_bytes, create=False)
        if control.kind is StoreKind.FILES
        else partial(SegmentStore, options.place, None)
    )
    return Place(
        name=name,
        kind=control.kind.value,
        store=await _opened(opened(), stack),
        stack=stack,
        control=control,
        open_plain=partial(opened, checksums=False),
    )


async def _create(options: argparse.Namespace) -> None:
    await anyio.to_thread.run_sync(_check_new, Path(options.place), options.file)
    try:
        new: Store = (
            FileStore(options.place)
            if options.create == "files"
            else SegmentStore(
                options.place,
                options.max_bytes,
                segment_bytes=options.segment_bytes or _SEGMENT_BYTES,
            )
        )
    except ValueError as error:
        raise InputError(f"--create {options.create}: {error}") from error
    async with AsyncExitStack() as stack:
        await _opened(new, stack)


def _check_new(directory: Path, file: str) -> None:
    """Refuse a directory that is something, and a file that cannot be read."""
    if file != STANDARD:
        try:
            Path(file).open("rb").close()
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}") from error
    try:
        is_empty = not any(directory.iterdir())
    except FileNotFoundError:
        return
    if not is_empty:
        raise InputError(f"--create makes a new store, and {directory} is not empty")


def _refuse_prefix(name: str, options: argparse.Namespace) -> None:
    if options.prefix is not None:
        raise InputError(
            f"--prefix is for servers and buckets, and {name} is a directory"
        )
