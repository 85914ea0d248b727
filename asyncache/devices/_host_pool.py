"""Where the pages of one pool lie in host memory.

Whatever order its owner chose, a pool is one tensor a layer, each slice of it in one
piece. Layers that are neighbours in memory are joined into one region.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
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

Views = list[list[memoryview]]


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
    memory: memoryview
    """From the first page's first byte to the last page's last; keeps the owner."""


class Span(NamedTuple):
    """Two pieces of memory of one length: the pool's, and the other one's."""

    address: int
    other: int
    num_bytes: int


class _Cut(NamedTuple):
    """What some layers are in each page of a region: ``[start, stop)`` of it."""

    memory: memoryview
    address: int
    stride: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class HostPool:
    """One pool: its tensors, and where its slices are."""

    space: PageSpace
    num_pages: int
    whole: torch.Tensor | None
    """Shape [num_pages, num_layers, ...]; None when the owner has a tensor a layer."""
    layers: tuple[torch.Tensor, ...]
    """Each of shape [num_pages, ...]."""
    regions: tuple[Region, ...]

    def views(self, pages: Sequence[int], layers: range) -> Views:
        """Return the memory of each page: a buffer a region."""
        cuts = self._cuts(layers)
        return [
            [
                memory[page * stride + start : page * stride + stop]
                for memory, _, stride, start, stop in cuts
            ]
            for page in pages
        ]

    def spans(
        self,
        pages: Sequence[int],
        layers: range,
        pages_buffers: Sequence[Sequence[memoryview]],
    ) -> Iterator[Span]:
        """Yield each piece of the pages beside its piece of a buffer.

        A piece is valid until the next is asked for. A read-only buffer is copied
        first: only a writable one tells ctypes its address.

        Args:
            pages: Page ids.
            layers: Layers that the buffers of each page hold.
            pages_buffers: For each page its buffers in layer order, each a whole number
                of layer slices.
        """
        known: dict[range, list[_Cut]] = {}
        for page, buffers in zip(pages, pages_buffers, strict=True):
            first = layers.start
            for buffer in buffers:
                own = bytearray(buffer) if buffer.readonly else buffer
                holder = ctypes.c_char.from_buffer(own)
                address = ctypes.addressof(holder)
                held = range(first, first + buffer.nbytes // self.space.layer_bytes)
                if held not in known:
                    known[held] = self._cuts(held)
                for cut in known[held]:
                    size = cut.stop - cut.start
                    origin = cut.address + page * cut.stride + cut.start
                    yield Span(origin, address, size)
                    address += size
                first = held.stop

    def moves(self, sources: Sequence[int], targets: Sequence[int]) -> Iterator[Span]:
        """Yield each piece of the targets beside its piece of the sources."""
        cuts = self._cuts(range(self.space.num_layers))
        for source, target in zip(sources, targets, strict=True):
            for _, address, stride, start, stop in cuts:
                origin = address + start
                yield Span(
                    origin + target * stride, origin + source * stride, stop - start
                )

    def _cuts(self, layers: range) -> list[_Cut]:
        size, cuts = self.space.layer_bytes, []
        for region in self.regions:
            first = max(layers.start, region.layers.start) - region.layers.start
            stop = min(layers.stop, region.layers.stop) - region.layers.start
            if first < stop:
                cuts.append(
                    _Cut(
                        region.memory,
                        region.address,
                        region.page_stride,
                        first * size,
                        stop * size,
                    )
                )
        return cuts


def allocate_pool(space: PageSpace, num_pages: int, order: PageOrder) -> HostPool:
    """Return a pool of zeros.

    Raises:
        DeviceError: If there is not enough memory.
    """
    num_layers, *slice_shape = space.shape
    leading = [num_pages, num_layers]
    if order is PageOrder.LAYER_FIRST:
        leading.reverse()
    try:
        tensor = torch.zeros(leading + slice_shape, dtype=TORCH_DTYPES[space.dtype])
    except RuntimeError as error:
        num_bytes = num_pages * space.page_bytes
        raise DeviceError(f"no {num_bytes} bytes for pool {space.pool!r}") from error
    whole = tensor if order is PageOrder.PAGE_FIRST else tensor.transpose(0, 1)
    return build_pool(space, whole.unbind(1), whole)


def build_pool(
    space: PageSpace, layers: Sequence[torch.Tensor], whole: torch.Tensor | None
) -> HostPool:
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
        regions.append(_region(range(first, first + len(run)), run[0], size))
        first += len(run)
    return HostPool(space, num_pages, whole, tuple(layers), tuple(regions))


def _region(layers: range, first: torch.Tensor, layer_bytes: int) -> Region:
    num_pages, stride = first.shape[0], _stride(first)
    page_bytes = len(layers) * layer_bytes
    num_bytes = (num_pages - 1) * stride + page_bytes
    memory = (ctypes.c_ubyte * num_bytes).from_address(first.data_ptr())
    # A view may outlive the device; the memory it points to must live as long.
    memory.owner = first  # type: ignore[attr-defined]  # ctypes arrays take attributes
    view = memoryview(memory).cast("B")
    return Region(layers, first.data_ptr(), stride, page_bytes, view)


def _stride(layer: torch.Tensor) -> int:
    """Return the bytes from a page to the next; any will do where there is no next."""
    if layer.shape[0] == 1:
        return layer.nbytes
    return layer.stride(0) * layer.element_size()
