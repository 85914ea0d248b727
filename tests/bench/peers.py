"""The peers that benchmarks compare with, where ``make bench-peers`` put them.

Of SGLang and vLLM we run single parts alone: their own files, as they are in the wheel.
What those files import from the rest needs a GPU build; the parts never call it with
events and metrics off, so empty stand-ins take its place. LMCache runs as it is, but
for what it imports and no file tier calls.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from array import array
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(sys.prefix) / "peers"
_STOOD_IN = {"sglang", "vllm"}
_FILES = {
    *(
        f"sglang.srt.{name}"
        for name in (
            "environ",
            "mem_cache.base_prefix_cache",
            "mem_cache.cache_init_params",
            "mem_cache.events",
            "mem_cache.evict_policy",
            "mem_cache.hicache_storage",
            "mem_cache.radix_cache",
            "mem_cache.storage.file.lru_file_evictor",
            "mem_cache.unified_cache.unified_cache_linker",
            "mem_cache.utils",
        )
    ),
    *(
        f"vllm.v1.{name}"
        for name in (
            "kv_offload.base",
            "kv_offload.config",
            "kv_offload.file_mapper",
            "kv_offload.tiering.async_lookup",
            "kv_offload.tiering.backpressure",
            "kv_offload.tiering.base",
            "kv_offload.tiering.fs.io",
            "kv_offload.tiering.fs.manager",
            "kv_offload.tiering.fs.thread_pool",
            "metrics.cache_hit_source",
        )
    ),
}
_COMPILED = {"vllm.fs_io_C": "vllm/fs_io_C.abi3.so"}
# What LMCache encrypts and compresses with, and reaches other tiers and models with.
_UNCALLED = {"aiofile", "cryptography", "huggingface_hub", "numba", "transformers"}


class SglangTree:
    """SGLang's ``RadixCache``, with pages of 16 tokens and no pools behind it."""

    def __init__(self, page_tokens: int) -> None:
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import (
            InsertParams,
            MatchPrefixParams,
        )
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        self._torch = torch
        self._to_match, self._to_insert = MatchPrefixParams, InsertParams
        self._key = RadixKey
        self._tree = RadixCache.create_simulated(page_size=page_tokens)

    @staticmethod
    def pack(tokens: Sequence[int]) -> array[int]:
        """Return tokens as its keys hold them."""
        return array("q", tokens)

    def slots(self, num_tokens: int) -> Any:
        """Return what it stores: a slot a token."""
        return self._torch.arange(num_tokens)

    def match(self, tokens: array[int]) -> Any:
        """Return the slots of the longest prefix, as its scheduler asks for them."""
        params = self._to_match(key=self._key(tokens))
        found = self._tree.match_prefix(params)
        return self._tree.path_device_indices(found.last_device_node)

    def insert(self, tokens: array[int], slots: Any) -> None:
        """Insert a prefix."""
        params = self._to_insert(key=self._key(tokens), value=slots)
        self._tree.insert(params)


def sglang_tree(page_tokens: int) -> SglangTree | None:
    """Return a tree of SGLang, or None if it is not installed."""
    return SglangTree(page_tokens) if find("sglang") else None


def sglang_layer_counter() -> Callable[[int], Any] | None:
    """Return what makes SGLang's counter of layers, or None if it is not installed."""
    if not find("sglang"):
        return None
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
        LayerWiseLoadCounter,
    )

    made: Callable[[int], Any] = LayerWiseLoadCounter
    return made


def find(name: str) -> bool:
    """Make a peer importable; return whether it is installed."""
    if not (FOLDER / name).is_dir():
        return False
    if not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StandIns(_STOOD_IN))
        # Last: whatever is installed goes first.
        sys.path.append(str(FOLDER))
        sys.meta_path.append(_StandIns(_UNCALLED))
    return True


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds our parts of some packages in their files, and empty modules for the rest.

    Args:
        names: The packages.
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: object, target: object = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._names:
            return None
        file = FOLDER / _COMPILED.get(fullname, f"{fullname.replace('.', '/')}.py")
        if fullname in _FILES or (fullname in _COMPILED and file.exists()):
            return importlib.util.spec_from_file_location(fullname, file)
        if fullname in _COMPILED:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


class _Empty(ModuleType):
    """Has every name, as a class without content."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Blank(name, (_Nothing,), {})


class _Nothing:
    """Takes every call, for a logger or what wraps a function."""

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> _Nothing:
        return self


class _Blank(type):
    """A class that has every name, for what is an enumeration in truth."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    def __call__(cls, *args: object, **kwargs: object) -> object:
        """Take whatever the other's module gives it as it is loaded."""
        return super().__call__()
