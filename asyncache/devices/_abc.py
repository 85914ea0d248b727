"""The contract of a device: pools of pages, and copies into and out of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio.lowlevel

from asyncache.core import DeviceError, KVLayout
from asyncache.devices._copy import Copy, Word
from asyncache.devices._memory import Span, Whereabouts
from asyncache.devices._staging import allocate

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

    def spans(self) -> list[Span]:
        """Return all memory that pages lie in, for a transport to register.

        Disjoint, in the order of addresses. On an accelerator they are addresses there.

        Raises:
            DeviceError: If the device does not tell where its pages are.
        """
        raise DeviceError(f"{self!r} does not tell where its pages are")

    def whereabouts(self, pool: str, pages: Sequence[int]) -> Whereabouts:
        """Return where pages lie, within :meth:`spans`, all layers.

        The caller must own the pages for as long as something touches them there.

        Args:
            pool: Name of the pool.
            pages: Page ids, shape [num_pages].

        Raises:
            DeviceError: As for :meth:`spans`.
        """
        del pool, pages
        raise DeviceError(f"{self!r} does not tell where its pages are")

    @abstractmethod
    def start_write(
        self,
        pool: str,
        pages: Sequence[int],
        source: memoryview,
        layers: range | None = None,
    ) -> Copy:
        """Begin to copy host memory into pages.

        Args:
            pool: Name of the pool.
            pages: Page ids, shape [num_pages]; read before this returns.
            source: The pages one after the other, the layers of each in order; the
                copy's until it is over. Fast where :meth:`allocate_staging` made it.
            layers: Layers to write; all when None.

        Raises:
            ValueError: If a page or layer does not exist, a page is named twice, or the
                buffer has not the bytes of these layers of these pages.
            ClosedError: If the device is closed.
            DeviceError: If nothing can be copied any more.
        """

    @abstractmethod
    def start_read(
        self,
        pool: str,
        pages: Sequence[int],
        target: memoryview,
        layers: range | None = None,
    ) -> Copy:
        """Begin to copy pages into host memory; the reverse of :meth:`start_write`."""

    async def write_pages(
        self,
        pool: str,
        pages: Sequence[int],
        source: memoryview,
        layers: range | None = None,
    ) -> None:
        """Copy host memory into pages; returns once the bytes are there.

        Cancelled, it raises only when nothing of it touches pages or source any more.

        Raises:
            DeviceError: If the copy failed; which bytes were written is undefined. Else
                as for :meth:`start_write`.
        """
        await anyio.lowlevel.checkpoint()  # cancelled here, it has touched nothing
        await self.start_write(pool, pages, source, layers).wait()

    async def read_pages(
        self,
        pool: str,
        pages: Sequence[int],
        target: memoryview,
        layers: range | None = None,
    ) -> None:
        """Copy pages into host memory; the reverse of :meth:`write_pages`."""
        await anyio.lowlevel.checkpoint()
        await self.start_read(pool, pages, target, layers).wait()

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

    async def allocate_staging(self, num_bytes: int) -> memoryview:
        """Return host memory for copies to and from here, format "B", zeros.

        It is the device's, who takes it back in :meth:`free_staging` or at its close.

        Raises:
            DeviceError: If there is not enough of it.
        """
        return allocate(num_bytes)

    async def free_staging(self, memory: memoryview) -> None:  # noqa: B027 - see below
        """Take staging memory back that no copy uses any more.

        Ordinary memory ends with the last view of it.
        """

    def when_done(self, stream: int | None, call: Callable[[], object]) -> None:
        """Make a call once a stream has run all that it was given until now.

        Host memory has no streams: what was computed there was when it returned.

        Args:
            stream: Handle of the stream; the one that is current, if None.
            call: Made once, here or from any thread; also if the device dies, for then
                nothing runs there any more.
        """
        del stream
        call()

    def new_word(self) -> Word | None:
        """Return a number that streams wait for, or None: they wait for fences then."""
        return None

    @property
    def failure(self) -> DeviceError | None:
        """Why nothing runs on this device any more; None while it works."""
        return None

    @abstractmethod
    async def aclose(self) -> None:
        """Give the memory back. Closing twice is harmless."""
