"""What a page is in Mooncake: an object under a name, its slices and then a tail.

The tail is the head of a page file, and vouches for the key and for each layer slice.
Pages of memory that the host cannot address have none, nor where nobody wants any: such
pages have other names, because they are other objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncache.core import PageKey, PageSpace
from asyncache.devices import Device, Span
from asyncache.linkers._batches import Batch, Batches
from asyncache.stores import Frame

_SEALED, _BARE = "sealed-1", "bare-1"
"""Formats, of which each key has one: Mooncake never replaces an object."""


class Objects(NamedTuple):
    """A batch as Mooncake takes it: names, shape [num_pages]; pieces of each page."""

    names: list[str]
    addresses: list[list[int]]
    sizes: list[list[int]]


class Packer:
    """Makes objects of the pages of a device, one batch at a time.

    Args:
        device: Where the pages are.
        batches: What the batches come from.
        prefix: What all names begin with.
        checksums: Whether there are tails, where there can be.
    """

    def __init__(
        self, device: Device, batches: Batches, prefix: str, *, checksums: bool
    ) -> None:
        self._device = device
        self._frames: dict[PageSpace, Frame] = {}
        num_bytes = 0
        if checksums and device.host_addressable:
            self._frames = {space: Frame(space) for space in batches.spaces}
            num_bytes = max(
                batches.most_pages(space) * frame.head_bytes
                for space, frame in self._frames.items()
            )
        self._tails = np.zeros(num_bytes, dtype=np.uint8)
        self._prefix = f"{prefix}:{_SEALED if self._frames else _BARE}"

    @property
    def memory(self) -> list[Span]:
        """The memory of tails, for Mooncake to know."""
        tails = self._tails
        return [Span(tails.ctypes.data, tails.nbytes, tails)] if tails.nbytes else []

    def names(self, keys: Sequence[PageKey]) -> list[str]:
        """Return what pages are called."""
        return [f"{self._prefix}:{key.name}" for key in keys]

    def num_bytes(self, space: PageSpace) -> int:
        """Return the size of an object."""
        frame = self._frames.get(space)
        return space.page_bytes if frame is None else frame.file_bytes

    def pack(self, batch: Batch) -> Objects:
        """Return the objects of a batch; the tails of the one before are no more."""
        addresses, sizes = self._device.whereabouts(batch.pool, batch.pages)
        frame = self._frames.get(batch.space)
        if frame is not None:
            sizes = [*sizes, frame.head_bytes]
            start = self._tails.ctypes.data
            for place, row in enumerate(addresses):
                row.append(start + place * frame.head_bytes)
        return Objects(self.names(batch.keys), addresses, [sizes] * len(addresses))

    def seal(self, batch: Batch) -> None:
        """Write the tails of a batch whose pages are final."""
        frame = self._frames.get(batch.space)
        if frame is None:
            return
        views = self._device.page_views(batch.pool, batch.pages)
        tails = b"".join(
            frame.head(page_hash, frame.digests(page))
            for page_hash, page in zip(batch.hashes, views, strict=True)
        )
        self._tails[: len(tails)] = np.frombuffer(tails, dtype=np.uint8)

    def num_good(self, batch: Batch, num_read: int) -> int:
        """Return how many of the leading pages, once read, are what was stored."""
        frame = self._frames.get(batch.space)
        if frame is None:
            return num_read
        views = self._device.page_views(batch.pool, batch.pages[:num_read])
        layers = range(frame.num_layers)
        for place, page in enumerate(views):
            start = place * frame.head_bytes
            tail = bytearray(self._tails[start : start + frame.head_bytes])
            page_hash = batch.hashes[place]
            if not (
                frame.is_head_of(page_hash, tail)
                and frame.are_slices_of(tail, layers, page)
            ):
                return place
        return num_read
