"""The contract that every page store keeps, whatever it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from enum import Enum, auto
from types import TracebackType
from typing import Self

from asyncache.core import PageKey, PageSpace, StoreError

PageBuffers = Sequence[memoryview]


class Status(Enum):
    """What became of one page of a batch."""

    HIT = auto()
    """It is there: read in full and verified, or stored for others to read."""
    MISS = auto()
    """It is not in the store."""
    CORRUPT = auto()
    """It was there and is not what was put; the store has removed it."""
    UNAVAILABLE = auto()
    """The store has no answer now; later it may."""
    REJECTED = auto()
    """The store will not keep it: no room, or larger than it takes."""


class Store(ABC):
    """Page bytes by key, in batches, outside the device.

    A store is used from one event loop, and its calls may overlap. It neither retries
    nor logs: the engine decides both. A page that is missing, late or broken is a
    :class:`Status`, never an exception. One bad page costs the others of its batch
    nothing. Nobody ever reads a page that was put in part.

    Buffers are lent: a call touches them only until it returns or raises. Cancelled,
    it stops early and raises as soon as nothing of it, no thread and no transfer,
    touches them any more.

    ``async with store`` opens and closes it. A call after :meth:`aclose` raises
    ClosedError; one that is under way then stops early, and pages it did not reach are
    UNAVAILABLE.
    """

    async def open(self) -> None:
        """Make the store ready; call it before any other. Opening twice is harmless.

        A store that may come up later must not raise: until then it answers
        UNAVAILABLE.

        Raises:
            StoreError: If the store can never work as it was set up.
        """
        return

    @property
    def missing_bytes(self) -> int:
        """Bytes by which an open store is smaller than it was set up to be."""
        return 0

    @abstractmethod
    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return for each key whether its page is stored.

        The answer is a hint: a page may be gone by the time it is read, and asking
        extends no page's life. An unreachable store holds nothing.
        """

    @abstractmethod
    async def get_into(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None = None,
    ) -> list[Status]:
        """Read pages into the caller's memory.

        Args:
            keys: Pages to read, shape [num_pages].
            targets: For each page its buffers in layer order, each writable,
                contiguous, of format "B" and a whole number of layer slices long; in
                sum ``len(layers) * key.space.layer_bytes`` bytes.
            layers: Layers to read; all when None.

        Returns:
            HIT, MISS, CORRUPT or UNAVAILABLE for each page. The contents of a target
            are undefined unless its status is HIT.

        Raises:
            ValueError: If the lengths do not fit.
        """

    @abstractmethod
    async def put(
        self, keys: Sequence[PageKey], sources: Sequence[PageBuffers]
    ) -> list[Status]:
        """Store pages; each is visible whole or not at all.

        Pages are written once: putting one that is there is a HIT and moves no bytes.

        Args:
            keys: Pages to store, shape [num_pages].
            sources: For each page its buffers in layer order, as for
                :meth:`get_into`, all layers.

        Returns:
            HIT, UNAVAILABLE or REJECTED for each page.

        Raises:
            ValueError: If the lengths do not fit.
        """

    @abstractmethod
    async def remove(self, keys: Sequence[PageKey]) -> None:
        """Forget pages. Removing an absent one is harmless.

        A page that the store cannot remove now stays; :meth:`contains` tells.
        """

    async def keys(self) -> AsyncIterator[PageKey]:
        """Yield the keys of all pages, in no order.

        A hint, as :meth:`contains`: a page that is put or removed meanwhile may be
        among them or not. One that stays is, at least once. Nothing is held between
        two keys that a caller who leaves would have to give back.

        Raises:
            StoreError: If the store cannot list its pages, or not now.
        """
        raise StoreError(f"{type(self).__name__} cannot list its pages")
        yield  # type: ignore[unreachable]  # so that it is a generator

    async def collect_garbage(self) -> int:
        """Give back what nobody can read any more: what dead writers left.

        Pages stay, and so does what writers who live have begun.

        Returns:
            The bytes freed, as far as the store knows of any.

        Raises:
            StoreError: If it cannot be done now.
        """
        return 0

    @abstractmethod
    async def aclose(self) -> None:
        """Release what the store holds. Closing twice is harmless."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def check_batch(
    keys: Sequence[PageKey], buffers: Sequence[PageBuffers], layers: range | None = None
) -> None:
    """Raise ValueError unless each page comes with as many bytes as it has."""
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys, but buffers for {len(buffers)} pages")
    space, layer_bytes, page_bytes = None, 0, 0
    for key, page in zip(keys, buffers, strict=True):
        if key.space is not space:
            space = key.space
            layer_bytes = space.layer_bytes
            page_bytes = len(_check_layers(layers, space.num_layers)) * layer_bytes
        if len(page) != 1 or page[0].nbytes != page_bytes:
            _check_pieces(space, page, layer_bytes, page_bytes)


def _check_pieces(
    space: PageSpace, page: PageBuffers, layer_bytes: int, page_bytes: int
) -> None:
    sizes = [buffer.nbytes for buffer in page]
    if sum(sizes) != page_bytes:
        raise ValueError(
            f"a page of {space.name} has {page_bytes} bytes here, not {sum(sizes)}"
        )
    if len(sizes) > 1 and not all(size and not size % layer_bytes for size in sizes):
        raise ValueError(
            f"a buffer has whole layer slices of {layer_bytes} bytes, not {sizes}"
        )


def _check_layers(layers: range | None, num_layers: int) -> range:
    if layers is None:
        return range(num_layers)
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= num_layers:
        raise ValueError(f"layers must lie in [0, {num_layers}), not {layers}")
    return layers
