"""The contract of a device: pools of pages, and copies into and out of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from asyncache.core import KVLayout

if TYPE_CHECKING:
    import torch


class Device(ABC):
    """Pools of pages on an accelerator.

    The device owns the memory of its pools, or holds on to the tensors it adopted,
    until :meth:`aclose`. It does not know which page belongs to whom: that is for the
    core to decide.
    """

    layout: KVLayout
    num_pages: Mapping[str, int]
    """Pages of each pool, by pool name; of a state pool, slots."""
    host_addressable: bool
    """Whether :meth:`page_views` works: the host can read and write pages in place."""

    @abstractmethod
    def tensor(self, pool: str) -> torch.Tensor:
        """Return all pages of a pool, owned by the device.

        Shape [num_pages, num_layers, num_parts, page_tokens, num_kv_heads, head_dim],
        of a state pool [num_pages, num_layers, *shape], whatever the order in memory;
        for an adopted tensor the axes after the first two are as the owner gave them.
        """

    @abstractmethod
    def page_views(
        self, pool: str, pages: Sequence[int], layers: range | None = None
    ) -> list[list[memoryview]]:
        """Return the memory of each page, in place.

        The caller must own the pages for as long as it touches the views.

        Args:
            pool: Name of the pool.
            pages: Page ids, shape [num_pages].
            layers: Layers wanted; all when None.

        Returns:
            For each page its buffers in layer order, writable, format "B", each a
            whole number of layer slices: one buffer where layers are neighbours in
            memory, else one a layer.

        Raises:
            DeviceError: If the pool's memory is not the host's.
        """

    @abstractmethod
    async def write_pages(
        self,
        pool: str,
        pages: Sequence[int],
        sources: Sequence[Sequence[memoryview]],
        layers: range | None = None,
    ) -> None:
        """Copy host memory into pages; returns once the bytes are there.

        A copy that has started cannot be recalled: cancelled, the call raises only
        when nothing of it touches pages or sources any more.

        Args:
            pool: Name of the pool.
            pages: Page ids, shape [num_pages].
            sources: For each page its buffers in layer order.
            layers: Layers to write; all when None.

        Raises:
            DeviceError: If a copy failed; which bytes were written is undefined.
        """

    @abstractmethod
    async def read_pages(
        self,
        pool: str,
        pages: Sequence[int],
        targets: Sequence[Sequence[memoryview]],
        layers: range | None = None,
    ) -> None:
        """Copy pages into host memory; the reverse of :meth:`write_pages`."""

    @abstractmethod
    def copy_pages(
        self,
        pool: str,
        sources: Sequence[int],
        targets: Sequence[int],
        *,
        stream: int | None = None,
    ) -> None:
        """Copy pages onto other pages of a pool, all layers, in a stream's order.

        What the stream was given before, the copy sees; what comes after sees the copy.
        It is a step of the forward that runs there, so nothing waits for it here.

        Args:
            pool: Name of the pool.
            sources: Page ids, shape [num_pages].
            targets: Page ids, shape [num_pages].
            stream: Handle of the stream of the forward. Host memory has none: there the
                bytes are in place on return.

        Raises:
            ValueError: If the lengths differ or a page is both source and target.
            DeviceError: If the copy could not be begun.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Give the memory back. Closing twice is harmless."""
