"""Decides: what is cached where, what moves, what is dropped. Pure and synchronous."""

from __future__ import annotations

from asyncache.core._errors import (
    AbortedError,
    AsyncacheError,
    ClosedError,
    DeviceError,
    InvariantError,
    OrderError,
    OutOfPagesError,
    RankError,
    StoreError,
    TooManyRequestsError,
)
from asyncache.core._hashes import (
    HASH_BYTES,
    Namespace,
    PageHash,
    PageKey,
    hash_pages,
    root_hash,
)
from asyncache.core._layout import (
    ITEM_BYTES,
    AttentionPool,
    Coverage,
    KVLayout,
    PageSpace,
    Pool,
    WindowPool,
)
from asyncache.core._tokens import MAX_TOKEN, TOKEN_BYTES, Tokens, pack_tokens

__all__ = [
    "HASH_BYTES",
    "ITEM_BYTES",
    "MAX_TOKEN",
    "TOKEN_BYTES",
    "AbortedError",
    "AsyncacheError",
    "AttentionPool",
    "ClosedError",
    "Coverage",
    "DeviceError",
    "InvariantError",
    "KVLayout",
    "Namespace",
    "OrderError",
    "OutOfPagesError",
    "PageHash",
    "PageKey",
    "PageSpace",
    "Pool",
    "RankError",
    "StoreError",
    "Tokens",
    "TooManyRequestsError",
    "WindowPool",
    "hash_pages",
    "pack_tokens",
    "root_hash",
]
