"""The peers that benchmarks compare with, where ``make bench-peers`` put them.

Of SGLang we run the prefix tree alone: its own files, as they are in the wheel. What
those files import from the rest of SGLang needs a GPU build; the tree never calls it
with events and metrics off, so empty stand-ins take its place.
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
_ROOM = "sglang.srt.mem_cache."
_FILES = {
    "base_prefix_cache",
    "cache_init_params",
    "events",
    "evict_policy",
    "radix_cache",
    "unified_cache.unified_cache_linker",
    "utils",
}


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
    return SglangTree(page_tokens) if _find_sglang() else None


def sglang_layer_counter() -> Callable[[int], Any] | None:
    """Return what makes SGLang's counter of layers, or None if it is not installed."""
    if not _find_sglang():
        return None
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
        LayerWiseLoadCounter,
    )

    made: Callable[[int], Any] = LayerWiseLoadCounter
    return made


def _find_sglang() -> bool:
    if not (FOLDER / "sglang").is_dir():
        return False
    if not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StandIns())
    return True


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds SGLang's tree in its files, and for the rest of SGLang an empty module."""

    def find_spec(
        self, fullname: str, path: object, target: object = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "sglang":
            return None
        if fullname.removeprefix(_ROOM) in _FILES:
            file = FOLDER / f"{fullname.replace('.', '/')}.py"
            return importlib.util.spec_from_file_location(fullname, file)
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
        return _Blank(name, (), {})


class _Blank(type):
    """A class that has every name, for what is an enumeration in truth."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    def __call__(cls, *args: object, **kwargs: object) -> object:
        """Take whatever the other's module gives it as it is loaded."""
        return super().__call__()
