"""A device over pools of one kind of memory: what it is asked is checked here.

Nothing is touched before everything has passed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from asyncache.core import ClosedError, DeviceError, KVLayout
from asyncache.devices._abc import Device
from asyncache.devices._adopt import CheckMemory, adopt_pool, check_disjoint
from asyncache.devices._arguments import (
    check_apart,
    check_buffer,
    check_names,
    check_order,
    check_pages,
    check_target,
    check_unique,
    layer_range,
)
from asyncache.devices._copy import Copy
from asyncache.devices._memory import Span, Whereabouts, spans, whereabouts
from asyncache.devices._pieces import Pieces, buffer_pieces, page_pieces
from asyncache.devices._pool import PageOrder, Pool

if TYPE_CHECKING:
    import torch

Buffer = npt.NDArray[np.uint8]
Tensors = Mapping[str, "torch.Tensor | Sequence[torch.Tensor]"]


class Direction(Enum):
    """Which way a copy goes."""

    INTO_PAGES = auto()
    OUT_OF_PAGES = auto()


class PooledDevice(Device):
    """What devices share whose pools are tensors."""

    _pools: Mapping[str, Pool]
    _is_closed: bool

    def _take(self, layout: KVLayout, pools: Mapping[str, Pool]) -> None:
        self.layout = layout
        self.num_pages = MappingProxyType(
            {name: pool.num_pages for name, pool in pools.items()}
        )
        self._pools = pools
        self._is_closed = False

    @abstractmethod
    def _start(self, pieces: Pieces, buffer: Buffer, direction: Direction) -> Copy:
        """Begin to copy between pages and a buffer, which the copy keeps."""

    @abstractmethod
    def _move(self, pieces: Pieces, stream: int | None) -> None:
        """Copy pages onto pages, in a stream's order."""

    def tensor(self, pool: str) -> torch.Tensor:
        """Return all pages of a pool, as the contract says.

        Raises:
            DeviceError: If the pool was adopted as one tensor a layer: use
                :meth:`layer`.
        """
        whole = self._pool(pool).whole
        if whole is None:
            raise DeviceError(f"pool {pool!r} is one tensor a layer: ask for a layer")
        return whole

    def layer(self, pool: str, layer: int) -> torch.Tensor:
        """Return all pages of one layer of a pool, owned by the device.

        Shape [num_pages, num_parts, page_tokens, num_kv_heads, head_dim], of a state
        pool [num_pages, *shape]; for an adopted tensor the axes after the first are as
        the owner gave them.
        """
        layers = self._pool(pool).layers
        if not 0 <= layer < len(layers):
            raise ValueError(f"layer must be in [0, {len(layers)}), not {layer}")
        return layers[layer]

    def spans(self) -> list[Span]:
        self._pool(next(iter(self.num_pages)))  # raises if the device is closed
        return spans(self._pools.values())

    def whereabouts(self, pool: str, pages: Sequence[int]) -> Whereabouts:
        held = self._pool(pool)
        return whereabouts(held, check_pages(pages, held.num_pages))

    def start_write(
        self,
        pool: str,
        pages: Sequence[int],
        source: memoryview,
        layers: range | None = None,
    ) -> Copy:
        held = self._pool(pool)
        wanted, ids = layer_range(layers, held), check_pages(pages, held.num_pages)
        check_unique(ids, held.num_pages)
        buffer = check_buffer(source, len(ids), wanted, held)
        pieces = buffer_pieces(held, ids, wanted, buffer.ctypes.data)
        return self._start(pieces, buffer, Direction.INTO_PAGES)

    def start_read(
        self,
        pool: str,
        pages: Sequence[int],
        target: memoryview,
        layers: range | None = None,
    ) -> Copy:
        held = self._pool(pool)
        wanted, ids = layer_range(layers, held), check_pages(pages, held.num_pages)
        buffer = check_target(target, len(ids), wanted, held)
        pieces = buffer_pieces(held, ids, wanted, buffer.ctypes.data)
        return self._start(pieces, buffer, Direction.OUT_OF_PAGES)

    def copy_pages(
        self,
        pool: str,
        sources: Sequence[int],
        targets: Sequence[int],
        *,
        stream: int | None = None,
    ) -> None:
        held = self._pool(pool)
        origins = check_pages(sources, held.num_pages)
        aims = check_pages(targets, held.num_pages)
        check_apart(origins, aims, held.num_pages)
        self._move(page_pieces(held, origins, aims), stream)

    def _pool(self, name: str) -> Pool:
        if self._is_closed:
            raise ClosedError("the device is closed")
        if name not in self._pools:
            raise ValueError(f"pool must be one of {sorted(self._pools)}, not {name!r}")
        return self._pools[name]


def adopt_pools(
    layout: KVLayout, tensors: Tensors, order: PageOrder, check_memory: CheckMemory
) -> dict[str, Pool]:
    """Return the pools that an owner's tensors are, once all have passed every check.

    Raises:
        ValueError: If the names are not the layout's.
        TypeError: If something is not a tensor.
        DeviceError: If a tensor does not fit, or shares bytes with another.
    """
    check_names(layout, tensors)
    check_order(order)
    pools = {
        pool.name: adopt_pool(
            layout.space(pool), tensors[pool.name], order, check_memory
        )
        for pool in layout.pools
    }
    check_disjoint(pools)
    return pools
