"""Page bytes by key, outside the device: the contract, memory and files."""

from __future__ import annotations

from asyncache.stores._abc import PageBuffers, Status, Store, check_batch
from asyncache.stores._file import FileStore
from asyncache.stores._memory import MemoryStore

__all__ = [
    "FileStore",
    "MemoryStore",
    "PageBuffers",
    "Status",
    "Store",
    "check_batch",
]
