"""Drives the core and awaits the rest: the only room that awaits across rooms."""

from asyncache.engine._blocking import BlockingCache
from asyncache.engine._blocking_request import BlockingHit, BlockingRequest
from asyncache.engine._cache import KVCache
from asyncache.engine._gates import Gates, LoadBatch
from asyncache.engine._limits import Limits
from asyncache.engine._observe import (
    Counters,
    Event,
    Observer,
    Overdue,
    Statistics,
    StoreDown,
    StoreFull,
    StoreHealth,
    StoreSmaller,
    TransferFailed,
    TransferKind,
)
from asyncache.engine._prompt import Prompt, ScopeId
from asyncache.engine._reports import StepReport
from asyncache.engine._request import Hit, Request
from asyncache.engine._writes import ReadOnly, WriteBack, WriteThrough

__all__ = [
    "BlockingCache",
    "BlockingHit",
    "BlockingRequest",
    "Counters",
    "Event",
    "Gates",
    "Hit",
    "KVCache",
    "Limits",
    "LoadBatch",
    "Observer",
    "Overdue",
    "Prompt",
    "ReadOnly",
    "Request",
    "ScopeId",
    "Statistics",
    "StepReport",
    "StoreDown",
    "StoreFull",
    "StoreHealth",
    "StoreSmaller",
    "TransferFailed",
    "TransferKind",
    "WriteBack",
    "WriteThrough",
]
