"""The file tiers of LMCache, driven through the calls that its engine makes.

The Python ones allocate what they read into from a pool of their own, as they do in an
engine. None writes a checksum.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.bench.file_tiers import FileTier, rows
from tests.bench.pages import Pages
from tests.bench.peers import find

POOL_GIB = 0.25  # the pages, and a batch that is read
WAIT_S = 60


class _Lmcache(FileTier):
    """A backend of LMCache, with the allocator that it reads into."""

    def __init__(self, folder: str, pages: Pages) -> None:
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        config, metadata = _lmcache_config(folder, pages)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._backend = self._new_backend(config, metadata)
        self._key = CacheEngineKey
        self._rows = rows(pages)
        self._objects = self._memory.batched_allocate(
            metadata.get_shapes(), metadata.get_dtypes(), pages.num_pages
        )
        for item, page in zip(self._objects, self._rows, strict=True):
            _bytes_of(item)[:] = page.numpy()

    @abstractmethod
    def _new_backend(self, config: Any, metadata: Any) -> Any: ...

    @staticmethod
    def is_installed() -> bool:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        return find("lmcache")

    def key(self, page_hash: bytes) -> Any:
        return self._key(
            "bench", 1, 0, int.from_bytes(page_hash[:8], "big"), torch.float16
        )

    def put(self, keys: Sequence[Any], places: range) -> None:
        num_left, lock, over = len(keys), threading.Lock(), threading.Event()

        def count_down(_: Any) -> None:
            nonlocal num_left
            with lock:
                num_left -= 1
                if not num_left:
                    over.set()

        self._backend.batched_submit_put_task(
            keys,
            self._objects[places.start : places.stop],
            on_complete_callback=count_down,
        )
        assert over.wait(WAIT_S)

    def get(self, keys: Sequence[Any], places: range) -> None:
        for item in self._found(keys):
            item.ref_count_down()

    def read_back(self, keys: Sequence[Any], places: range) -> list[np.ndarray]:
        found = self._found(keys)
        copies = [_bytes_of(item).copy() for item in found]
        for item in found:
            item.ref_count_down()
        return copies

    def remove(self, keys: Sequence[Any]) -> None:
        for key in keys:
            assert self._backend.remove(key)

    def close(self) -> None:
        for item in self._objects:
            item.ref_count_down()
        self._backend.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._memory.close()

    def _found(self, keys: Sequence[Any]) -> list[Any]:
        found = self._backend.batched_get_blocking(keys)
        assert all(item is not None for item in found)
        return found


class LmcacheDisk(_Lmcache):
    """LMCache's local disk, as ``retrieve`` reads it: a pool of threads."""

    name = "LMCache local disk"

    def _new_backend(self, config: Any, metadata: Any) -> Any:
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        return LocalDiskBackend(
            config, self._loop, self._memory, dst_device="cpu", metadata=metadata
        )


class LmcacheFs(_Lmcache):
    """LMCache's remote backend with its ``fs`` connector: aiofiles, a task a page."""

    name = "LMCache fs connector"

    def _new_backend(self, config: Any, metadata: Any) -> Any:
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        return RemoteBackend(
            config, metadata, self._loop, self._memory, dst_device="cpu"
        )


class LmcacheNative(FileTier):
    """LMCache's ``fs_native``: a C++ client of the system calls, with four threads."""

    name = "LMCache fs_native, C++"
    is_native = True

    def __init__(self, folder: str, pages: Pages) -> None:
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.distributed.l2_adapters.factory import (
            create_l2_adapter_from_registry,
        )
        from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import (
            FSNativeL2AdapterConfig,
        )

        self._adapter = create_l2_adapter_from_registry(FSNativeL2AdapterConfig(folder))
        self._key = ObjectKey
        self._rows = rows(pages)
        self._objects = [_memory_object(page) for page in self._rows]

    @staticmethod
    def is_installed() -> bool:
        return _Lmcache.is_installed()

    def key(self, page_hash: bytes) -> Any:
        return self._key(page_hash, "bench", 0)

    def put(self, keys: Sequence[Any], places: range) -> None:
        task = self._adapter.submit_store_task(
            keys, self._objects[places.start : places.stop]
        )
        self._wait(self._adapter.get_store_event_fd())
        assert self._adapter.pop_completed_store_tasks()[task].is_successful()

    def get(self, keys: Sequence[Any], places: range) -> None:
        task = self._adapter.submit_load_task(
            keys, self._objects[places.start : places.stop]
        )
        self._wait(self._adapter.get_load_event_fd())
        assert self._adapter.query_load_result(task).popcount() == len(keys)

    def remove(self, keys: Sequence[Any]) -> None:
        self._adapter.delete(list(keys))

    def close(self) -> None:
        self._adapter.close()

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(event, select.POLLIN)
        assert poll.poll(1e3 * WAIT_S)
        os.read(event, 8)


def _lmcache_config(folder: str, pages: Pages) -> tuple[Any, Any]:
    """Return a configuration for both backends, and chunks as long as our pages."""
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    _, num_layers, num_parts, num_tokens, num_heads, head_dim = pages.device.tensor(
        "kv"
    ).shape
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=num_tokens,
        local_cpu=False,  # or nothing would be read from files
        max_local_cpu_size=POOL_GIB,
        local_disk=folder,
        max_local_disk_size=4.0,
        remote_url=f"fs://localhost:1{folder}",
    )
    shape = (num_layers, num_parts, num_tokens, num_heads, head_dim)
    metadata = LMCacheMetadata(
        "bench", 1, 1, 0, 0, torch.float16, shape, chunk_size=num_tokens
    )
    return config, metadata


def _bytes_of(item: Any) -> np.ndarray:
    """Return the memory of an object of LMCache."""
    return np.frombuffer(item.byte_array, np.uint8)


def _memory_object(page: torch.Tensor) -> Any:
    from lmcache.v1.memory_management import (
        MemoryFormat,
        MemoryObjMetadata,
        TensorMemoryObj,
    )

    metadata = MemoryObjMetadata(
        shape=page.shape,
        dtype=page.dtype,
        address=0,
        phy_size=len(page),
        fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
    )
    return TensorMemoryObj(raw_data=page, metadata=metadata, parent_allocator=None)
