"""What is behind a store, for a test to look at and to tamper with."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path

from asyncache.core import PageHash, PageKey, PageSpace
from asyncache.stores import MemoryStore


class PageFiles(MutableMapping):
    """The page files of a directory, by their paths."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __iter__(self) -> Iterator[str]:
        yield from sorted(map(str, self._directory.rglob("*.kv")))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> bytes:
        return Path(name).read_bytes()

    def __setitem__(self, name: str, item: bytes) -> None:
        Path(name).write_bytes(item)

    def __delitem__(self, name: str) -> None:
        Path(name).unlink()


class MemoryPages(MutableMapping):
    """The pages of a memory store, by their keys' names, oldest first."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def __iter__(self) -> Iterator[str]:
        yield from [key.name for key in self._store._pages]

    def __len__(self) -> int:
        return len(self._store._pages)

    def __getitem__(self, name: str) -> bytes:
        return bytes(self._store._pages[_key(name)])

    def __setitem__(self, name: str, item: bytes) -> None:
        key = _key(name)
        if len(item) == key.space.page_bytes:
            self._store._pages[key] = memoryview(item)
        else:
            self._store._drop(key)  # it knows no page of another length

    def __delitem__(self, name: str) -> None:
        self._store._drop(_key(name))


def _key(name: str) -> PageKey:
    page_hash, pool, shard, dtype, shape = name.split("-")
    space = PageSpace(pool, shard, dtype, tuple(map(int, shape.split("x"))))
    return PageKey(PageHash(bytes.fromhex(page_hash)), space)
