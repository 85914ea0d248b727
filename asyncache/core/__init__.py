"""Decides: what is cached where, what moves, what is dropped. Pure and synchronous."""

from __future__ import annotations

from asyncache.core._agenda import Request as RequestState
from asyncache.core._boundaries import restorable
from asyncache.core._effects import (
    Asked,
    AskStore,
    Effect,
    Ended,
    Fact,
    FactKind,
    LoadPlan,
    LookupPlan,
    Moved,
    OfferOffload,
    OffloadPlan,
    Restored,
    Settled,
    Shortened,
    StartLoad,
    StartOffload,
    Stop,
)
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
from asyncache.core._eviction import Policy, lru
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
from asyncache.core._ledger import PageState
from asyncache.core._look import PoolStatistics, ReplicaStatistics
from asyncache.core._offloads import FAILED, GOOD, PARENT_MISSING
from asyncache.core._replica import Replica
from asyncache.core._state import Bounds
from asyncache.core._tokens import MAX_TOKEN, TOKEN_BYTES, Tokens, pack_tokens
from asyncache.core._votes import Ballot, Votes

__all__ = [
    "FAILED",
    "GOOD",
    "HASH_BYTES",
    "ITEM_BYTES",
    "MAX_TOKEN",
    "PARENT_MISSING",
    "TOKEN_BYTES",
    "AbortedError",
    "AskStore",
    "Asked",
    "AsyncacheError",
    "AttentionPool",
    "Ballot",
    "Bounds",
    "ClosedError",
    "Coverage",
    "DeviceError",
    "Effect",
    "Ended",
    "Fact",
    "FactKind",
    "InvariantError",
    "KVLayout",
    "LoadPlan",
    "LookupPlan",
    "Moved",
    "Namespace",
    "OfferOffload",
    "OffloadPlan",
    "OrderError",
    "OutOfPagesError",
    "PageHash",
    "PageKey",
    "PageSpace",
    "PageState",
    "Policy",
    "Pool",
    "PoolStatistics",
    "RankError",
    "Replica",
    "ReplicaStatistics",
    "RequestState",
    "Restored",
    "Settled",
    "Shortened",
    "StartLoad",
    "StartOffload",
    "Stop",
    "StoreError",
    "Tokens",
    "TooManyRequestsError",
    "Votes",
    "WindowPool",
    "hash_pages",
    "lru",
    "pack_tokens",
    "restorable",
    "root_hash",
]
