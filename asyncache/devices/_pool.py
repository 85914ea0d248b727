"""Where the pages of one pool lie in memory, the host's or an accelerator's.

Whatever order its owner chose, a pool is one tensor a layer, each slice of it in one
piece. Layers that are neighbours in memory are joined into one region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from asyncache.core import DeviceError, PageSpace

TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


class PageOrder(Enum):
    """Which axis of a pool's tensor comes first in memory."""

    PAGE_FIRST = "page_first"
    """[num_pages, num_layers, ...]: a page is one piece of memory."""
    LAYER_FIRST = "layer_first"
    """[num_layers, num_pages, ...]: a layer is one piece of memory."""


@dataclass(frozen=True, slots=True)
class Region:
    """Layers that are neighbours in memory, in every page of a pool."""

    layers: range
    address: int
    page_stride: int
    """Bytes from a page to the next."""
    page_bytes: int
    """Bytes of these layers in one page."""

    def num_bytes(self, num_pages: int) -> int:
        """Return the bytes from the first page's first to the last page's last."""
        return (num_pages - 1) * self.page_stride + self.page_bytes


class Cut(NamedTuple):
    """What some layers are in each page of a region.

    ``start`` is where they begin in a page of the region, ``offset`` where they begin
    in a buffer that holds all layers asked for.
    """

    region: Region
    start: int
    num_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool: its tensors, and where its slices are."""

    space: PageSpace
    num_pages: int
    whole: torch.Tensor | None
    """Shape [num_pages, num_layers, ...]; None when the owner has a tensor a layer."""
    layers: tuple[torch.Tensor, ...]
    """Each of shape [num_pages, ...]."""
    regions: tuple[Region, ...]

    def cuts(self, layers: range) -> list[Cut]:
        """Return the pieces that some layers of any page consist of, in order."""
        size, cuts = self.space.layer_bytes, []
        for region in self.regions:
            first = max(layers.start, region.layers.start)
            stop = min(layers.stop, region.layers.stop)
            if first < stop:
                start = (first - region.layers.start) * size
                offset = (first - layers.start) * size
                cuts.append(Cut(region, start, (stop - first) * size, offset))
        return cuts


def allocate_pool(
    space: PageSpace,
    num_pages: int,
    order: PageOrder,
    device: torch.device | None = None,
) -> Pool:
    """Return a pool of zeros, in host memory if no device is named.

    Raises:
        DeviceError: If there is not enough memory.
    """
    num_layers, *slice_shape = space.shape
    leading = [num_pages, num_layers]
    if order is PageOrder.LAYER_FIRST:
        leading.reverse()
    dtype = TORCH_DTYPES[space.dtype]
    try:
        tensor = torch.zeros(leading + slice_shape, dtype=dtype, device=device)
    except RuntimeError as error:
        num_bytes = num_pages * space.page_bytes
        raise DeviceError(f"no {num_bytes} bytes for pool {space.pool!r}") from error
    whole = tensor if order is PageOrder.PAGE_FIRST else tensor.transpose(0, 1)
    return build_pool(space, whole.unbind(1), whole)


def build_pool(
    space: PageSpace, layers: Sequence[torch.Tensor], whole: torch.Tensor | None
) -> Pool:
    """Return the pool that these tensors are, once they have passed every check."""
    size, num_pages = space.layer_bytes, layers[0].shape[0]
    runs: list[list[torch.Tensor]] = []
    for layer in layers:
        end = runs[-1][0].data_ptr() + len(runs[-1]) * size if runs else None
        if end == layer.data_ptr() and _stride(layer) == _stride(runs[-1][0]):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    regions, first = [], 0
    for run in runs:
        held = range(first, first + len(run))
        regions.append(
            Region(held, run[0].data_ptr(), _stride(run[0]), len(run) * size)
        )
        first = held.stop
    return Pool(space, num_pages, whole, tuple(layers), tuple(regions))


def _stride(layer: torch.Tensor) -> int:
    """Return the bytes from a page to the next; any will do where there is no next."""
    if layer.shape[0] == 1:
        return layer.nbytes
    return layer.stride(0) * layer.element_size()
