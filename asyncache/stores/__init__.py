"""Page bytes by key, outside the device: the contract, memory, files, Redis, tiers."""

from __future__ import annotations

from asyncache.stores._abc import PageBuffers, Status, Store, check_batch
from asyncache.stores._file import FileStore
from asyncache.stores._memory import MemoryStore
from asyncache.stores._redis import RedisStore
from asyncache.stores._tiered import TieredStore

__all__ = [
    "FileStore",
    "MemoryStore",
    "PageBuffers",
    "RedisStore",
    "Status",
    "Store",
    "TieredStore",
    "check_batch",
]
