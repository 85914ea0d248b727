"""An asyncio KV-cache engine for LLM serving loops.

The rooms, each entered by its ``__init__``. One imports only from those above it, and
ranks, stores and devices not from each other:

    core      decides: layout, page hashes, ledger, tree, agenda, replica
    threads   jobs on threads of our own, and waits that outlast every cancellation
    ranks     ranks agree: one, several in a process, or torch.distributed
    stores    page bytes by key, outside the device
    devices   pools of pages on an accelerator, and copies into and out of them
    linkers   the transport between pools and stores
    engine    KVCache and its requests: drives the core, awaits the rest
    testing   fakes with gates, faults, conformance kits, a simulator
    adapters  thin fits for other engines, each optional
    cli       ``python -m asyncache``

Names here are loaded from their rooms when first used, so that importing asyncache
brings in neither torch nor a client of any store.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# A public name has two lines: one here, one for type checkers below.
_ROOM_OF = {
    "AbortedError": "core",
    "AsyncacheError": "core",
    "AttentionPool": "core",
    "BlockingCache": "engine",
    "BlockingHit": "engine",
    "BlockingRequest": "engine",
    "ClosedError": "core",
    "CompressedStore": "stores",
    "Counters": "engine",
    "CpuDevice": "devices",
    "CudaDevice": "devices",
    "Device": "devices",
    "DeviceError": "core",
    "EncryptedStore": "stores",
    "Event": "engine",
    "Fact": "core",
    "FactKind": "core",
    "FileStore": "stores",
    "Gates": "engine",
    "Group": "ranks",
    "Hit": "engine",
    "InvariantError": "core",
    "KVCache": "engine",
    "KVLayout": "core",
    "Limits": "engine",
    "Linker": "linkers",
    "LoadBatch": "engine",
    "LocalGroup": "ranks",
    "MemoryStore": "stores",
    "MooncakeLinker": "linkers",
    "MooncakeSetup": "linkers",
    "Namespace": "core",
    "ObjectStore": "stores",
    "Observer": "engine",
    "OrderError": "core",
    "OutOfPagesError": "core",
    "Outcome": "linkers",
    "Overdue": "engine",
    "PageHash": "core",
    "PageKey": "core",
    "PageOrder": "devices",
    "PageSpace": "core",
    "PagesCached": "core",
    "PagesDropped": "core",
    "Policy": "core",
    "Prompt": "engine",
    "RankError": "core",
    "ReadOnly": "engine",
    "RedisStore": "stores",
    "Request": "engine",
    "SegmentStore": "stores",
    "SoloGroup": "ranks",
    "StatePool": "core",
    "Statistics": "engine",
    "Status": "stores",
    "StepReport": "engine",
    "Store": "stores",
    "StoreDown": "engine",
    "StoreError": "core",
    "StoreFull": "engine",
    "StoreHealth": "engine",
    "StoreSmaller": "engine",
    "StoreLinker": "linkers",
    "TieredStore": "stores",
    "TooManyRequestsError": "core",
    "TorchGroup": "ranks",
    "TransferFailed": "engine",
    "TransferKind": "engine",
    "WindowPool": "core",
    "WriteBack": "engine",
    "WriteThrough": "engine",
    "content_tokens": "core",
    "fifo": "core",
    "filo": "core",
    "lfu": "core",
    "lru": "core",
    "mru": "core",
    "priority": "core",
    "slru": "core",
}
__all__ = sorted(_ROOM_OF)  # noqa: PLE0605 - one list of names, not two

if TYPE_CHECKING:
    from asyncache.core import (
        AbortedError as AbortedError,
        AsyncacheError as AsyncacheError,
        AttentionPool as AttentionPool,
        ClosedError as ClosedError,
        DeviceError as DeviceError,
        Fact as Fact,
        FactKind as FactKind,
        InvariantError as InvariantError,
        KVLayout as KVLayout,
        Namespace as Namespace,
        OrderError as OrderError,
        OutOfPagesError as OutOfPagesError,
        PageHash as PageHash,
        PageKey as PageKey,
        PagesCached as PagesCached,
        PagesDropped as PagesDropped,
        PageSpace as PageSpace,
        Policy as Policy,
        RankError as RankError,
        StatePool as StatePool,
        StoreError as StoreError,
        TooManyRequestsError as TooManyRequestsError,
        WindowPool as WindowPool,
        content_tokens as content_tokens,
        fifo as fifo,
        filo as filo,
        lfu as lfu,
        lru as lru,
        mru as mru,
        priority as priority,
        slru as slru,
    )
    from asyncache.devices import (
        CpuDevice as CpuDevice,
        CudaDevice as CudaDevice,
        Device as Device,
        PageOrder as PageOrder,
    )
    from asyncache.engine import (
        BlockingCache as BlockingCache,
        BlockingHit as BlockingHit,
        BlockingRequest as BlockingRequest,
        Counters as Counters,
        Event as Event,
        Gates as Gates,
        Hit as Hit,
        KVCache as KVCache,
        Limits as Limits,
        LoadBatch as LoadBatch,
        Observer as Observer,
        Overdue as Overdue,
        Prompt as Prompt,
        ReadOnly as ReadOnly,
        Request as Request,
        Statistics as Statistics,
        StepReport as StepReport,
        StoreDown as StoreDown,
        StoreFull as StoreFull,
        StoreHealth as StoreHealth,
        StoreSmaller as StoreSmaller,
        TransferFailed as TransferFailed,
        TransferKind as TransferKind,
        WriteBack as WriteBack,
        WriteThrough as WriteThrough,
    )
    from asyncache.linkers import (
        Linker as Linker,
        MooncakeLinker as MooncakeLinker,
        MooncakeSetup as MooncakeSetup,
        Outcome as Outcome,
        StoreLinker as StoreLinker,
    )
    from asyncache.ranks import (
        Group as Group,
        LocalGroup as LocalGroup,
        SoloGroup as SoloGroup,
        TorchGroup as TorchGroup,
    )
    from asyncache.stores import (
        CompressedStore as CompressedStore,
        EncryptedStore as EncryptedStore,
        FileStore as FileStore,
        MemoryStore as MemoryStore,
        ObjectStore as ObjectStore,
        RedisStore as RedisStore,
        SegmentStore as SegmentStore,
        Status as Status,
        Store as Store,
        TieredStore as TieredStore,
    )
else:
    # A type checker that saw __getattr__ would take any name for granted.
    def __getattr__(name: str) -> object:
        if name not in _ROOM_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
