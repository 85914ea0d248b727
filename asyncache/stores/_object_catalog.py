"""Which pages a bucket has, and where.

Pointers that were read are remembered, so that the load that follows a lookup needs no
more than the bytes. One that is out of date does no harm: what it leads to is gone, or
verified; and a page that was removed meanwhile is what it was.

So are pages that were not there, for a moment: the put that follows a lookup need not
ask again. Who was wrong sends bytes for nothing, for no page is made over another; and
takes a pointer that leads nowhere for a page, until that is read.
"""

from __future__ import annotations

from binascii import unhexlify
from collections import OrderedDict
from typing import NamedTuple, TypeVar

import anyio

from asyncache.core import PageHash, PageKey, PageSpace
from asyncache.stores._abc import Status
from asyncache.stores._object_bucket import Bucket, Made
from asyncache.stores._object_pages import POINTER_BYTES, Pointer, Shelf

# Some 20 MB of them, and of pages that are missing.
_MAX_POINTERS = 65_536
# As long as a prompt's prefill takes. Others who compute the same pages may be first
# with them, and who asks sends nothing then.
_MISSING_S = 10.0
# Where the digits of the hash are in "hh/hash.at".
_HASH = slice(3, 67)

_Known = TypeVar("_Known")


class Place(NamedTuple):
    """Where the frame of a page is.

    Args:
        path: The object.
        start: Where in it the frame begins, in bytes.
        is_alone: Whether there is nothing else in it.
    """

    path: str
    start: int
    is_alone: bool


class Found(NamedTuple):
    """What was said about a page.

    Args:
        status: HIT, MISS, UNAVAILABLE, or CORRUPT: what was there is removed then.
        place: Where it is, if it is a hit.
    """

    status: Status
    place: Place | None = None


class Catalog:
    """Finds, publishes and removes pages.

    Args:
        bucket: Where they are.
        prefix: What all names begin with.
        checksums: Whether pages have digests of their slices.

    Attributes:
        bucket: Where they are.
    """

    def __init__(self, bucket: Bucket, prefix: str, *, checksums: bool) -> None:
        self.bucket = bucket
        self._prefix = prefix
        self._checksums = checksums
        self._shelves: dict[PageSpace, Shelf] = {}
        self._pointers: OrderedDict[PageKey, Pointer] = OrderedDict()
        self._missing: OrderedDict[PageKey, float] = OrderedDict()
        """Pages that were not there, and until when that is believed."""

    def shelf(self, space: PageSpace) -> Shelf:
        """Return how the pages of a space are kept."""
        shelf = self._shelves.get(space)
        if shelf is None:
            shelf = Shelf(self._prefix, space, checksums=self._checksums)
            self._shelves[space] = shelf
        return shelf

    def path(self, key: PageKey) -> str:
        """Return the name of a page's own object."""
        return self.shelf(key.space).path(key.hash)

    def key(self, path: str) -> PageKey | None:
        """Return the page whose own object has this name; None if none has."""
        name, _, rest = path.removeprefix(self._prefix).partition("/")
        try:
            digits = rest[_HASH].encode()
            key = PageKey(PageHash(unhexlify(digits)), PageSpace.from_name(name))
        except ValueError:
            return None
        return key if self.path(key) == path else None

    @property
    def packs(self) -> str:
        """The folder of the packs."""
        return f"{self._prefix}packs/"

    def pack_path(self, pack: bytes) -> str:
        """Return the name of a pack."""
        return f"{self.packs}{pack.hex()}"

    def place(self, key: PageKey) -> Place | None:
        """Return where a page is, as far as that is known without asking."""
        if not self.shelf(key.space).is_packed:
            return Place(self.path(key), 0, is_alone=True)
        pointer = self._pointers.get(key)
        if pointer is None:
            return None
        self._pointers.move_to_end(key)
        return self._pointed_at(pointer)

    async def look(self, key: PageKey) -> Found:
        """Ask whether there is a page, and remember where it is."""
        shelf = self.shelf(key.space)
        if shelf.is_packed:
            found = await self._look_up(shelf, key)
        else:
            status = await self.bucket.has(self.path(key), shelf.frame.file_bytes)
            found = Found(status, self.place(key))
        self._missing.pop(key, None)
        if found.status is Status.CORRUPT:
            await self.drop(key)
        elif found.status is Status.MISS:
            self.forget(key)
            _remember(self._missing, key, anyio.current_time() + _MISSING_S)
        return found

    def pop_missing(self, key: PageKey) -> bool:
        """Return whether a page was not there a moment ago; the next time, no more."""
        return self._missing.pop(key, 0.0) > anyio.current_time()

    async def publish(self, key: PageKey, pointer: Pointer) -> Made:
        """Point at a page of a pack, unless somebody else's is there."""
        data = self.shelf(key.space).pack_pointer(key.hash, pointer)
        made = await self.bucket.make(self.path(key), data)
        if made is Made.NOW:
            _remember(self._pointers, key, pointer)
        return made

    async def drop(self, key: PageKey) -> None:
        """Remove a page, if it is there and if that can be done now.

        Without comparing: the worst that may happen is that a page which was stored
        anew in between must be stored once more. A pack stays for the collector.
        """
        self.forget(key)
        await self.bucket.delete(self.path(key))
        self.forget(key)  # somebody may have looked meanwhile

    def forget(self, key: PageKey) -> None:
        """Forget where a page is."""
        self._pointers.pop(key, None)

    async def _look_up(self, shelf: Shelf, key: PageKey) -> Found:
        status, parts = await self.bucket.read_small(self.path(key), POINTER_BYTES)
        if status is not Status.HIT:
            return Found(status)
        pointer = shelf.unpack_pointer(key.hash, bytes(parts[0]))
        if pointer is None:
            return Found(Status.CORRUPT)
        _remember(self._pointers, key, pointer)
        return Found(status, self._pointed_at(pointer))

    def _pointed_at(self, pointer: Pointer) -> Place:
        return Place(self.pack_path(pointer.pack), pointer.start, is_alone=False)


def _remember(
    memory: OrderedDict[PageKey, _Known], key: PageKey, known: _Known
) -> None:
    memory[key] = known
    memory.move_to_end(key)
    if len(memory) > _MAX_POINTERS:
        memory.popitem(last=False)
