"""What is behind a store, for a test to look at and to tamper with."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path

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
    """The pages of a memory store, by their keys' names."""

    def __init__(self, store: MemoryStore) -> None:
        self._pages = store._pages

    def __iter__(self) -> Iterator[str]:
        yield from [key.name for key in self._pages]

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, name: str) -> bytes:
        return bytes(self._pages[self._key(name)])

    def __setitem__(self, name: str, item: bytes) -> None:
        # It knows no page of another length than its key's.
        key = self._key(name)
        size = key.space.page_bytes
        self._pages[key] = memoryview(item.ljust(size, b"\0")[:size])

    def __delitem__(self, name: str) -> None:
        del self._pages[self._key(name)]

    def _key(self, name: str):
        return next(key for key in self._pages if key.name == name)
