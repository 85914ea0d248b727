"""A store in this process's memory: a byte budget, and the pages used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

import anyio.lowlevel

from asyncache.core import ClosedError, PageKey
from asyncache.stores._abc import PageBuffers, Status, Store, check_batch

# A millisecond or two, into memory that is new: what other tasks may wait for.
_TURN_BYTES = 2 * 2**20
_TURN_KEYS = 1024


class MemoryStore(Store):
    """Pages in memory, up to ``max_bytes``; the least recently used give way.

    Reading a page and putting it are uses, asking for it is none. No threads: it
    copies on the event loop, and lets other tasks run every 2 MiB.

    Args:
        max_bytes: Bytes of pages, those being put included. A page that can never fit
            is REJECTED, and so is one that finds all room taken by overlapping puts.

    Raises:
        ValueError: If ``max_bytes`` is below 0.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be at least 0, not {max_bytes}")
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pages: OrderedDict[PageKey, memoryview] = OrderedDict()  # oldest first
        self._is_closed = False

    def __repr__(self) -> str:
        return (
            f"<MemoryStore {len(self._pages)} pages, "
            f"{self._num_bytes} of {self._max_bytes} bytes>"
        )

    @property
    def num_bytes(self) -> int:
        """Bytes taken by pages that are stored or being put."""
        return self._num_bytes

    @property
    def num_pages(self) -> int:
        """Pages stored."""
        return len(self._pages)

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        self._check_usable()
        await anyio.lowlevel.checkpoint()
        return [key in self._pages for key in keys]

    async def get_into(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None = None,
    ) -> list[Status]:
        self._check_usable()
        check_batch(keys, targets, layers)
        copier = _Copier()
        await copier.rest()
        statuses = []
        for key, buffers in zip(keys, targets, strict=True):
            page = self._pages.get(key)
            if page is None:
                statuses.append(Status.MISS)
                continue
            offset = 0 if layers is None else layers.start * key.space.layer_bytes
            for buffer in buffers:
                piece = page[offset : offset + len(buffer)]
                if not copier.copy_now(buffer, piece):
                    await copier.copy(buffer, piece)
                offset += len(buffer)
            statuses.append(Status.HIT)
        self._note_used(keys)
        return statuses

    async def put(
        self, keys: Sequence[PageKey], sources: Sequence[PageBuffers]
    ) -> list[Status]:
        self._check_usable()
        check_batch(keys, sources)
        copier = _Copier()
        await copier.rest()
        statuses = [
            await self._put_page(key, buffers, copier)
            for key, buffers in zip(keys, sources, strict=True)
        ]
        self._note_used(keys)
        return statuses

    async def remove(self, keys: Sequence[PageKey]) -> None:
        self._check_usable()
        await anyio.lowlevel.checkpoint()
        for key in keys:
            self._drop(key)

    async def keys(self) -> AsyncIterator[PageKey]:
        self._check_usable()
        for place, key in enumerate(list(self._pages)):
            if place % _TURN_KEYS == 0:
                await anyio.lowlevel.checkpoint()
                self._check_usable()
            if key in self._pages:
                yield key

    async def aclose(self) -> None:
        self._is_closed = True
        for key in list(self._pages):
            self._drop(key)

    def _note_used(self, keys: Sequence[PageKey]) -> None:
        """Make pages the youngest, the first one last: without it others are no use."""
        for key in reversed(keys):
            if key in self._pages:
                self._pages.move_to_end(key)

    async def _put_page(
        self, key: PageKey, buffers: PageBuffers, copier: _Copier
    ) -> Status:
        if key in self._pages:
            return Status.HIT
        num_bytes = key.space.page_bytes
        if not self._reserve(num_bytes):
            return Status.REJECTED
        # The reservation is the page's only once nothing can go wrong any more.
        is_stored = False
        try:
            page = await copier.join(buffers, num_bytes)
            if self._is_closed:
                return Status.UNAVAILABLE
            is_stored = self._pages.setdefault(key, page) is page
        finally:
            if not is_stored:
                self._num_bytes -= num_bytes
        return Status.HIT

    def _reserve(self, num_bytes: int) -> bool:
        """Take room for a page, from the pages used longest ago if need be."""
        if num_bytes > self._max_bytes:
            return False
        while self._pages and self._num_bytes + num_bytes > self._max_bytes:
            self._drop(next(iter(self._pages)))
        if self._num_bytes + num_bytes > self._max_bytes:
            return False
        self._num_bytes += num_bytes
        return True

    def _drop(self, key: PageKey) -> None:
        page = self._pages.pop(key, None)
        if page is not None:
            self._num_bytes -= len(page)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("the store is closed")


class _Copier:
    """Copies for one batch, and lets other tasks run in between."""

    def __init__(self) -> None:
        self._num_left = _TURN_BYTES

    def copy_now(self, target: memoryview, source: memoryview) -> bool:
        """Copy without a rest if this turn has room; return whether it had."""
        if len(source) >= self._num_left:
            return False
        target[:] = source
        self._num_left -= len(source)
        return True

    async def copy(self, target: memoryview, source: memoryview) -> None:
        start = 0
        while start < len(source):
            stop = min(len(source), start + self._num_left)
            target[start:stop] = source[start:stop]
            self._num_left -= stop - start
            start = stop
            if not self._num_left:
                await self.rest()

    async def join(self, sources: PageBuffers, num_bytes: int) -> memoryview:
        """Return a copy of the buffers, one after another."""
        if num_bytes <= self._num_left:
            self._num_left -= num_bytes
            return memoryview(b"".join(sources))
        page, offset = memoryview(bytearray(num_bytes)), 0
        for source in sources:
            await self.copy(page[offset : offset + len(source)], source)
            offset += len(source)
        return page

    async def rest(self) -> None:
        await anyio.lowlevel.checkpoint()
        self._num_left = _TURN_BYTES
