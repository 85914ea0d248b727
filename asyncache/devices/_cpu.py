"""Pages in host memory: read and written in place, or copied as on an accelerator.

The device changes a page only within the calls below, and only where it was told to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ctypes import memmove
from typing import TYPE_CHECKING, Self

from asyncache.core import DeviceError, KVLayout
from asyncache.devices._adopt import check_on_host, check_writable
from asyncache.devices._arguments import (
    check_order,
    check_page_counts,
    check_page_ids,
    layer_range,
)
from asyncache.devices._copy import Copy
from asyncache.devices._pieces import Pieces
from asyncache.devices._pool import PageOrder, Pool, Region, allocate_pool
from asyncache.devices._pooled import Buffer, Direction, PooledDevice, adopt_pools
from asyncache.devices._threads import CopyThread
from asyncache.devices._views import PageViews, host_memory, page_views

if TYPE_CHECKING:
    import torch


class CpuDevice(PooledDevice):
    """Pools of pages in host memory.

    Copies of more than 256 KiB run in order on one thread of the device's own, smaller
    ones at once. One event loop uses a device.

    Args:
        layout: Pools to allocate, filled with zeros.
        num_pages: Pages of each pool, or of every pool when it is one number; slots of
            a state pool.
        order: How pages lie in memory.
        host_addressable: False makes :meth:`page_views` refuse, so that an engine
            copies as it would on an accelerator.

    Raises:
        ValueError: If a pool would have no page, or the names are not the layout's.
        DeviceError: If there is not enough memory.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int | Mapping[str, int],
        *,
        order: PageOrder = PageOrder.PAGE_FIRST,
        host_addressable: bool = True,
    ) -> None:
        check_order(order)
        counts = check_page_counts(layout, num_pages)
        pools = {
            pool.name: allocate_pool(layout.space(pool), counts[pool.name], order)
            for pool in layout.pools
        }
        self._begin(layout, pools, host_addressable)

    @classmethod
    def adopt(
        cls,
        layout: KVLayout,
        tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        *,
        order: PageOrder = PageOrder.PAGE_FIRST,
        host_addressable: bool = True,
    ) -> Self:
        """Return a device over tensors that the caller goes on using.

        The device keeps the tensors alive until :meth:`aclose`; until then their
        storage must not be resized. Memory mapped for reading only is refused; what
        Python alone calls read-only, such as a tensor over a bytes object, looks like
        any other: do not adopt it.

        Args:
            layout: What the tensors hold.
            tensors: For each pool either one tensor, in ``order``, or one tensor a
                layer, shape [num_pages, ...]. One index of the page axis is one page;
                a layer of it is one piece of memory, of the layout's bytes and dtype,
                in the order of axes that the owner likes. Keys and values in front of
                the page axis are refused.
            order: Which axis comes first where a pool is one tensor.
            host_addressable: As for :class:`CpuDevice`.

        Raises:
            ValueError: If the names are not the layout's.
            TypeError: If something is not a tensor.
            DeviceError: If a tensor does not fit the layout, is not dense CPU memory,
                requires grad, is read-only, or shares bytes with another.
        """
        pools = adopt_pools(layout, tensors, order, check_on_host)
        for name, pool in pools.items():
            check_writable(host_memory(pool), name)
        device = cls.__new__(cls)
        device._begin(layout, pools, host_addressable)  # noqa: SLF001 - our own
        return device

    def _begin(
        self,
        layout: KVLayout,
        pools: Mapping[str, Pool],
        host_addressable: bool,  # noqa: FBT001 - private
    ) -> None:
        self._take(layout, pools)
        self.host_addressable = host_addressable
        self._memory: dict[str, dict[Region, memoryview]] = {}
        self._copies = CopyThread()

    def __repr__(self) -> str:
        """Show the pools and whether copies run."""
        state = "closed" if self._is_closed else f"{self._copies.num_running} copies"
        return f"<CpuDevice pages {dict(self.num_pages)}, {state}>"

    def page_views(
        self, pool: str, pages: Sequence[int], layers: range | None = None
    ) -> PageViews:
        if not self.host_addressable:
            raise DeviceError(f"pool {pool!r} is not addressable by the host")
        held = self._pool(pool)
        check_page_ids(pages, held.num_pages)
        if pool not in self._memory:
            self._memory[pool] = host_memory(held)
        return page_views(self._memory[pool], held, pages, layer_range(layers, held))

    def _start(self, pieces: Pieces, buffer: Buffer, direction: Direction) -> Copy:
        is_read = direction is Direction.OUT_OF_PAGES

        def move(_: object = buffer) -> None:  # which lives as long as this
            for in_pages, in_buffer, size in _rows(pieces):
                if is_read:
                    memmove(in_buffer, in_pages, size)
                else:
                    memmove(in_pages, in_buffer, size)

        return self._copies.start(move, num_bytes=buffer.nbytes)

    def _move(self, pieces: Pieces, stream: int | None) -> None:
        """Copy at once, on this thread: host memory has no streams."""
        del stream
        for target, source, size in _rows(pieces):
            memmove(target, source, size)

    async def aclose(self) -> None:
        """Give the memory back once no copy runs; views handed out keep theirs."""
        self._is_closed = True
        try:
            await self._copies.aclose()
        finally:
            self._pools = {}
            self._memory = {}


def _rows(pieces: Pieces) -> Iterator[tuple[int, int, int]]:
    return zip(
        pieces.pool.tolist(),
        pieces.other.tolist(),
        pieces.num_bytes.tolist(),
        strict=True,
    )
