"""Which tensors may become a pool: refused here, or safe to read and write as bytes.

Nothing is changed before every tensor of every pool has passed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from asyncache.core import DeviceError, PageSpace
from asyncache.devices._pool import (
    TORCH_DTYPES,
    PageOrder,
    Pool,
    Region,
    build_pool,
)

CheckMemory = Callable[[torch.Tensor, str], None]
"""Raises DeviceError unless a tensor, called by a name, lies where it should."""


def adopt_pool(
    space: PageSpace,
    tensors: torch.Tensor | Sequence[torch.Tensor],
    order: PageOrder,
    check_memory: CheckMemory,
) -> Pool:
    """Return the pool that an owner's tensors are.

    Raises:
        TypeError: If it is not given tensors.
        DeviceError: If a tensor does not fit the layout, or cannot be used in place.
    """
    if isinstance(tensors, torch.Tensor):
        _check_tensor(tensors, f"pool {space.pool!r}")
        whole = _page_first(space, tensors, order)
        layers = whole.unbind(1)
    else:
        whole, layers = None, tuple(tensors)
        _check_num_layers(space, len(layers))
    for index, layer in enumerate(layers):
        name = f"layer {index} of pool {space.pool!r}"
        _check_tensor(layer, name)
        check_memory(layer, name)
        _check_slices(layer, name, space)
        if layer.shape[0] != layers[0].shape[0]:
            raise DeviceError(
                f"{name} has {layer.shape[0]} pages, layer 0 has {layers[0].shape[0]}"
            )
    return build_pool(space, layers, whole)


def _page_first(
    space: PageSpace, tensor: torch.Tensor, order: PageOrder
) -> torch.Tensor:
    if tensor.ndim < 2:  # noqa: PLR2004 - pages and layers
        raise DeviceError(
            f"pool {space.pool!r} needs an axis of pages and one of layers, "
            f"got shape {tuple(tensor.shape)}"
        )
    whole = tensor if order is PageOrder.PAGE_FIRST else tensor.transpose(0, 1)
    _check_num_layers(space, whole.shape[1])
    return whole


def _check_num_layers(space: PageSpace, num_layers: int) -> None:
    if num_layers != space.num_layers:
        raise DeviceError(
            f"pool {space.pool!r} has {space.num_layers} layers in the layout, "
            f"{num_layers} in its tensors"
        )


def check_on_host(tensor: torch.Tensor, name: str) -> None:
    """Check that a tensor is host memory.

    Raises:
        DeviceError: If it is not.
    """
    if tensor.device.type != "cpu":
        raise DeviceError(f"{name} must be a CPU tensor, not one on {tensor.device}")


def _check_tensor(tensor: torch.Tensor, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise DeviceError(f"{name} must be a dense tensor, not {tensor.layout}")
    if tensor.requires_grad:
        raise DeviceError(f"{name} requires grad: bytes are written behind autograd")
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    reach = tensor.storage_offset() + sum((n - 1) * stride for n, stride in axes) + 1
    num_bytes = tensor.untyped_storage().nbytes()
    if tensor.numel() and num_bytes < reach * tensor.element_size():
        raise DeviceError(f"{name} has lost its storage: {num_bytes} bytes are left")


def _check_slices(layer: torch.Tensor, name: str, space: PageSpace) -> None:
    if layer.dtype is not TORCH_DTYPES[space.dtype]:
        raise DeviceError(f"{name} is {layer.dtype}, the layout says {space.dtype}")
    if layer.ndim < 1 or layer.shape[0] < 1:
        raise DeviceError(f"{name} has no pages: shape {tuple(layer.shape)}")
    num_bytes = layer[0].nbytes
    if num_bytes != space.layer_bytes:
        raise DeviceError(
            f"{name} has {num_bytes} bytes a page, the layout says "
            f"{space.layer_bytes}: shape {tuple(layer.shape)}, where each index of the "
            f"first axis must be one page, keys and values included"
        )
    if not layer[0].is_contiguous():
        raise DeviceError(
            f"{name} must hold a page in one piece, got strides {layer.stride()}"
        )


class _Span(NamedTuple):
    start: int
    stop: int
    pool: str


def check_disjoint(pools: Mapping[str, Pool]) -> None:
    """Check that no byte belongs to two slices.

    Raises:
        DeviceError: If two pools, layers or pages share memory.
    """
    # Page by page only where regions interleave: there may be millions of slices.
    if _overlap(_region_spans(pools)) and (pool := _overlap(_page_spans(pools))):
        raise DeviceError(f"pages of pool {pool!r} share memory with others")


def check_writable(memory: Mapping[Region, memoryview], pool: str) -> None:
    """Check that the process may write to all pages, as the first and last byte show.

    Raises:
        DeviceError: If the memory is mapped for reading only.
    """
    for view in memory.values():
        if not (_is_writable(view[:1]) and _is_writable(view[-1:])):
            raise DeviceError(f"pool {pool!r} lies in read-only memory")


def _is_writable(byte: memoryview) -> bool:
    """Have the kernel put a byte back: where we would crash, it returns an error."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        os.write(writer, byte)
        return os.readv(reader, [byte]) == 1
    except OSError:
        return False
    finally:
        os.close(reader)
        os.close(writer)


def _overlap(spans: Iterator[_Span]) -> str | None:
    for left, right in pairwise(sorted(spans)):
        if right.start < left.stop:
            return right.pool
    return None


def _region_spans(pools: Mapping[str, Pool]) -> Iterator[_Span]:
    for name, pool in pools.items():
        for region in pool.regions:
            # Pages that overlap each other: show the region twice, to be looked into.
            crowded = pool.num_pages > 1 and region.page_stride < region.page_bytes
            span = _Span(
                region.address, region.address + region.num_bytes(pool.num_pages), name
            )
            yield from [span, span] if crowded else [span]


def _page_spans(pools: Mapping[str, Pool]) -> Iterator[_Span]:
    for name, pool in pools.items():
        for region in pool.regions:
            for page in range(pool.num_pages):
                start = region.address + page * region.page_stride
                yield _Span(start, start + region.page_bytes, name)
