"""Page bytes by key, outside the device: memory, files, servers, tiers and codecs."""

from __future__ import annotations

from asyncache.stores._abc import PageBuffers, Status, Store, check_batch
from asyncache.stores._compressed import CompressedStore
from asyncache.stores._control import Control, StoreKind, read_control
from asyncache.stores._encrypted import EncryptedStore
from asyncache.stores._file import FileStore
from asyncache.stores._frame import Frame, frame_bytes
from asyncache.stores._framed import FramedPage, frame_page, unframe_page
from asyncache.stores._memory import MemoryStore
from asyncache.stores._object import ObjectStore
from asyncache.stores._redis import RedisStore
from asyncache.stores._segment import SegmentStore
from asyncache.stores._segment_census import SegmentUsage
from asyncache.stores._tiered import TieredStore

__all__ = [
    "CompressedStore",
    "Control",
    "EncryptedStore",
    "FileStore",
    "Frame",
    "FramedPage",
    "MemoryStore",
    "ObjectStore",
    "PageBuffers",
    "RedisStore",
    "SegmentStore",
    "SegmentUsage",
    "Status",
    "Store",
    "StoreKind",
    "TieredStore",
    "check_batch",
    "frame_bytes",
    "frame_page",
    "read_control",
    "unframe_page",
]
