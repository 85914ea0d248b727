"""Pages in host memory, read and written in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncache.devices._pool import Pool, Region

if TYPE_CHECKING:
    import torch

PageViews = list[list[memoryview]]


def host_memory(pool: Pool) -> dict[Region, memoryview]:
    """Return the memory of each region, format "B"; it keeps the pool's owner alive."""
    firsts = [pool.layers[region.layers.start] for region in pool.regions]
    return {
        region: _memory(region.address, region.num_bytes(pool.num_pages), first)
        for region, first in zip(pool.regions, firsts, strict=True)
    }


def page_views(
    memory: dict[Region, memoryview], pool: Pool, pages: Sequence[int], layers: range
) -> PageViews:
    """Return the memory of each page: a buffer a region."""
    cuts = [
        (memory[region], region.page_stride, start, start + num_bytes)
        for region, start, num_bytes, _ in pool.cuts(layers)
    ]
    return [
        [
            view[page * stride + start : page * stride + stop]
            for view, stride, start, stop in cuts
        ]
        for page in pages
    ]


def _memory(address: int, num_bytes: int, owner: torch.Tensor) -> memoryview:
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    # A view may outlive the device; the memory it points to must live as long.
    memory.owner = owner  # type: ignore[attr-defined]  # ctypes arrays take attributes
    return memoryview(memory).cast("B")
