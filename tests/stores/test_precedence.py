"""A put lets reads pass between two pages, and goes on however long they take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import pytest

from asyncache.stores import (
    CompressedStore,
    FileStore,
    MemoryStore,
    Status,
    Store,
    _compressed as compressed,
    _page_files as page_files,
    _segment_files as segment_files,
)
from asyncache.threads import _pauses as pauses
from tests.stores.segments import get, numbered, put, small_store

HIT = Status.HIT


class Kind(NamedTuple):
    """A store that reads and writes on threads, and how it does that to a page."""

    make: Callable[[Path], Store]
    place: object
    read: str
    write: str


KINDS = {
    "segments": Kind(
        lambda folder: small_store(folder, 1, 8), segment_files, "read_all", "write_all"
    ),
    "files": Kind(FileStore, page_files, "read_all", "write_all"),
    "compressed": Kind(
        lambda _: CompressedStore(MemoryStore(2**20)),
        compressed._ZstdCoder,
        "decode",
        "encode",
    ),
}


class Held:
    """Holds reads until they are let go; notes what ends in which order."""

    def __init__(self, kind: Kind, monkeypatch) -> None:
        self.arrived, self.let_go = threading.Event(), threading.Event()
        self.pauses = threading.Event()
        self.order: list[str] = []
        original_read = getattr(kind.place, kind.read)
        original_write = getattr(kind.place, kind.write)

        pause = pauses.Pauses.pause

        def note_pause(*arguments):
            self.pauses.set()
            pause(*arguments)

        def read(*arguments):
            self.arrived.set()
            self.let_go.wait(30)
            self.order.append("read")
            return original_read(*arguments)

        def write(*arguments):
            self.order.append("write")
            return original_write(*arguments)

        monkeypatch.setattr(pauses.Pauses, "pause", note_pause)
        monkeypatch.setattr(kind.place, kind.read, read)
        monkeypatch.setattr(kind.place, kind.write, write)


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@asynccontextmanager
async def reading(kind, folder, monkeypatch):
    """Yield a store and a read of its first page, which is let go at the end."""
    async with kind.make(folder) as store:
        assert await put(store, numbered(0, 1)) == [HIT]
        held = Held(kind, monkeypatch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(get, store, numbered(0, 1))
            await anyio.to_thread.run_sync(held.arrived.wait)
            yield store, held, tasks
            held.let_go.set()
        assert await get(store, numbered(0, 4)) == [HIT] * 4


async def test_a_put_waits_for_a_read(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(pauses, "_MOST_S", 600.0)
    async with reading(kind, tmp_path, monkeypatch) as (store, held, tasks):
        tasks.start_soon(put, store, numbered(1, 4))
        assert await anyio.to_thread.run_sync(held.pauses.wait, 30)
    assert held.order[0] == "read"
    assert "write" in held.order


async def test_a_read_that_hangs_does_not_keep_a_put(kind, tmp_path, monkeypatch):
    async with reading(kind, tmp_path, monkeypatch) as (store, held, _):
        assert await put(store, numbered(1, 4)) == [HIT] * 3
        assert "read" not in held.order
    assert held.order[0] == "write"
