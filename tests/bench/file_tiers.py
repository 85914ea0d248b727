"""The file tiers of SGLang and vLLM, driven through the calls that their engines make.

They read and write the memory of :class:`Pages` itself, and write no checksums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bench.pages import Pages
from tests.bench.peers import FOLDER, find


class FileTier(ABC):
    """A peer's pages in files under a folder; blocking.

    Args:
        folder: There already.
        pages: What is stored, and where it is read to.
    """

    name: str
    is_native = False
    """Whether C++ does the work: nothing that Python is held against."""
    _rows: torch.Tensor

    @abstractmethod
    def __init__(self, folder: str, pages: Pages) -> None: ...

    @staticmethod
    @abstractmethod
    def is_installed() -> bool:
        """Return whether it can be made."""

    @abstractmethod
    def key(self, page_hash: bytes) -> Any:
        """Return what it calls a page."""

    @abstractmethod
    def put(self, keys: Sequence[Any], places: range) -> None:
        """Write the pages at some places; return when all are in their files."""

    @abstractmethod
    def get(self, keys: Sequence[Any], places: range) -> None:
        """Read pages to some places, or to memory of its own; all are there."""

    @abstractmethod
    def remove(self, keys: Sequence[Any]) -> None:
        """Delete the files of pages."""

    def read_back(self, keys: Sequence[Any], places: range) -> list[np.ndarray]:
        """Read pages; return copies of what was read."""
        self.get(keys, places)
        return [page.numpy().copy() for page in self._rows[places.start : places.stop]]

    def close(self) -> None:  # noqa: B027 - not all have threads
        """Stop its threads."""


class HiCacheFile(FileTier):
    """SGLang's, without a bound: a batch is read and written page after page.

    On a thread of its own, which takes batches from a queue, for SGLang has it so.
    """

    name = "SGLang HiCacheFile"

    def __init__(self, folder: str, pages: Pages) -> None:
        from sglang.srt.mem_cache.hicache_storage import (
            HiCacheFile as Storage,
            HiCacheStorageConfig,
        )

        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench",
        )
        self._thread = ThreadPoolExecutor(1)
        self._folder = folder
        self._storage = Storage(config, folder)
        self._rows = rows(pages)
        self._pages = list(self._rows)

    @staticmethod
    def is_installed() -> bool:
        return find("sglang")

    def key(self, page_hash: bytes) -> str:
        return page_hash.hex()

    def put(self, keys: Sequence[str], places: range) -> None:
        some = self._pages[places.start : places.stop]
        assert self._thread.submit(self._storage.batch_set, keys, some).result()

    def get(self, keys: Sequence[str], places: range) -> None:
        some = self._pages[places.start : places.stop]
        found = self._thread.submit(self._storage.batch_get, keys, some).result()
        assert all(page is not None for page in found)

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            Path(self._folder, f"{self._storage._get_suffixed_key(key)}.bin").unlink()

    def close(self) -> None:
        self._thread.shutdown()


class VllmFiles(FileTier):
    """vLLM's fs tier as its Python does it, with the page cache.

    A batch is one job, as for a request. Where its probe finds direct I/O the tier uses
    that; here, as on a file system that has none, it does not.
    """

    name = "vLLM fs tier, Python"

    def __init__(self, folder: str, pages: Pages) -> None:
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob
        from vllm.v1.kv_offload.tiering.fs import io
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self._rows = rows(pages)
        self._tier = FileSystemTierManager(
            _vllm_spec(), memoryview(self._rows.numpy()), "fs", folder
        )
        self._tier._use_o_direct = False
        self._job, self._key, self._io = TransferJob, make_offload_key, io
        self._context, self._numbers = ReqContext("bench"), count()

    @staticmethod
    def is_installed() -> bool:
        return find("vllm")

    def key(self, page_hash: bytes) -> bytes:
        return self._key(page_hash, 0)

    def put(self, keys: Sequence[bytes], places: range) -> None:
        self._run(self._tier.submit_store, keys, places, is_promotion=False)

    def get(self, keys: Sequence[bytes], places: range) -> None:
        self._run(self._tier.submit_load, keys, places, is_promotion=True)

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            Path(self._tier.file_mapper.get_file_name(key)).unlink()

    def close(self) -> None:
        self._tier.shutdown()

    def _run(
        self,
        submit: Callable[[Any], None],
        keys: Sequence[bytes],
        places: range,
        *,
        is_promotion: bool,
    ) -> None:
        self._io._HAS_FSIO_C = self.is_native
        submit(
            self._job(
                next(self._numbers),
                keys,
                np.array(places, dtype=np.int32),
                is_promotion,
                self._context,
            )
        )
        self._tier.drain_jobs()
        assert [result.success for result in self._tier.get_finished_jobs()] == [True]


class VllmNativeFiles(VllmFiles):
    """The same with its C++ for the system calls of a job, where the wheel has it."""

    name = "vLLM fs tier, C++"
    is_native = True

    @staticmethod
    def is_installed() -> bool:
        return find("vllm") and (FOLDER / "vllm/fs_io_C.abi3.so").exists()


def rows(pages: Pages) -> torch.Tensor:
    """Return the pages as rows of bytes, in the same memory."""
    tensor: torch.Tensor = pages.device.tensor("kv")
    return tensor.view(pages.num_pages, -1).view(torch.uint8)


def _vllm_spec() -> Any:
    """Return what the tier asks of its engine: no events, one worker."""
    from vllm.v1.kv_offload import config
    from vllm.v1.kv_offload.base import OffloadingSpec

    class Spec(OffloadingSpec):
        get_manager = get_worker = None

    parallel = config.OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=True,
    )
    return Spec(
        config.OffloadingConfig(
            groups=(),
            worker_kv_bytes_per_block=0,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="bench",
            model=config.OffloadingModelConfig("bench", "float16"),
            cache=config.OffloadingCacheConfig(16, 1),
            parallel=parallel,
        )
    )
