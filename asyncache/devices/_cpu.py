"""Pages in host memory: read and written in place, or copied as on an accelerator.

The device changes a page only within the calls below, and only where it was told to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import memmove
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from asyncache.core import ClosedError, DeviceError, KVLayout
from asyncache.devices._abc import Device
from asyncache.devices._adopt import adopt_pool, check_disjoint, check_writable
from asyncache.devices._arguments import (
    check_buffers,
    check_names,
    check_order,
    check_page_counts,
    check_pages,
    check_unique,
    layer_range,
)
from asyncache.devices._host_pool import (
    HostPool,
    PageOrder,
    Views,
    allocate_pool,
)
from asyncache.devices._threads import CopyThread

if TYPE_CHECKING:
    import torch


class CpuDevice(Device):
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
        self._take(layout, pools, host_addressable)

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
        check_names(layout, tensors)
        check_order(order)
        pools = {
            pool.name: adopt_pool(layout.space(pool), tensors[pool.name], order)
            for pool in layout.pools
        }
        check_disjoint(pools)
        check_writable(pools)
        device = cls.__new__(cls)
        device._take(layout, pools, host_addressable)  # noqa: SLF001 - our own
        return device

    def _take(
        self,
        layout: KVLayout,
        pools: dict[str, HostPool],
        host_addressable: bool,  # noqa: FBT001 - private
    ) -> None:
        self.layout = layout
        self.num_pages = MappingProxyType(
            {name: pool.num_pages for name, pool in pools.items()}
        )
        self.host_addressable = host_addressable
        self._pools = pools
        self._copies = CopyThread()
        self._is_closed = False

    def __repr__(self) -> str:
        """Show the pools and whether copies run."""
        state = "closed" if self._is_closed else f"{self._copies.num_running} copies"
        return f"<CpuDevice pages {dict(self.num_pages)}, {state}>"

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

    def page_views(
        self, pool: str, pages: Sequence[int], layers: range | None = None
    ) -> Views:
        if not self.host_addressable:
            raise DeviceError(f"pool {pool!r} is not addressable by the host")
        memory = self._pool(pool)
        check_pages(pages, memory.num_pages)
        return memory.views(pages, layer_range(layers, memory))

    async def write_pages(
        self,
        pool: str,
        pages: Sequence[int],
        sources: Sequence[Sequence[memoryview]],
        layers: range | None = None,
    ) -> None:
        memory = self._pool(pool)
        wanted = layer_range(layers, memory)
        check_pages(pages, memory.num_pages)
        check_unique(pages)
        num_bytes = check_buffers(sources, len(pages), wanted, memory)
        chosen = tuple(pages)  # the caller's list may grow while the copy runs

        def copy() -> None:
            for address, other, size in memory.spans(chosen, wanted, sources):
                memmove(address, other, size)

        await self._copies.run(copy, num_bytes=num_bytes)

    async def read_pages(
        self,
        pool: str,
        pages: Sequence[int],
        targets: Sequence[Sequence[memoryview]],
        layers: range | None = None,
    ) -> None:
        memory = self._pool(pool)
        wanted = layer_range(layers, memory)
        check_pages(pages, memory.num_pages)
        num_bytes = check_buffers(targets, len(pages), wanted, memory)
        if any(target.readonly for buffers in targets for target in buffers):
            raise ValueError("targets must be writable")
        chosen = tuple(pages)

        def copy() -> None:
            for address, other, size in memory.spans(chosen, wanted, targets):
                memmove(other, address, size)

        await self._copies.run(copy, num_bytes=num_bytes)

    def copy_pages(
        self,
        pool: str,
        sources: Sequence[int],
        targets: Sequence[int],
        *,
        stream: int | None = None,
    ) -> None:
        """Copy at once, on this thread: host memory has no streams."""
        del stream
        memory = self._pool(pool)
        check_pages(sources, memory.num_pages)
        check_pages(targets, memory.num_pages)
        check_unique(targets)
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources for {len(targets)} targets")
        if shared := set(sources) & set(targets):
            raise ValueError(f"pages {sorted(shared)} are both source and target")
        for address, other, size in memory.moves(sources, targets):
            memmove(address, other, size)

    async def aclose(self) -> None:
        """Give the memory back once no copy runs; views handed out keep theirs."""
        self._is_closed = True
        try:
            await self._copies.aclose()
        finally:
            self._pools = {}

    def _pool(self, name: str) -> HostPool:
        if self._is_closed:
            raise ClosedError("the device is closed")
        if name not in self._pools:
            raise ValueError(f"pool must be one of {sorted(self._pools)}, not {name!r}")
        return self._pools[name]
