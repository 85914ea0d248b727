"""Page bytes by key, outside the device: memory, files, servers, tiers and codecs."""

from __future__ import annotations

from asyncache.stores._abc import PageBuffers, Status, Store, check_batch
from asyncache.stores._compressed import CompressedStore
from asyncache.stores._encrypted import EncryptedStore
from asyncache.stores._file import FileStore
from asyncache.stores._frame import Frame
from asyncache.stores._memory import MemoryStore
from asyncache.stores._redis import RedisStore
from asyncache.stores._segment import SegmentStore
from asyncache.stores._tiered import TieredStore

__all__ = [
    "CompressedStore",
    "EncryptedStore",
    "FileStore",
    "Frame",
    "MemoryStore",
    "PageBuffers",
    "RedisStore",
    "SegmentStore",
    "Status",
    "Store",
    "TieredStore",
    "check_batch",
]
