"""A store that fails when and as a test says, over one that works."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Collection, Sequence
from enum import Enum, auto

from asyncache.core import PageKey
from asyncache.stores import PageBuffers, Status, Store, check_batch
from asyncache.testing._nth import FailPoint


class Fault(Enum):
    """What goes wrong."""

    MISSING = auto()
    """The page seems not to be there, though it is."""
    LOST = auto()
    """The page is contained, and gone when it is read: evicted in between."""
    CORRUPT = auto()
    """The page is contained, found corrupt when it is read, and removed."""
    TORN = auto()
    """As CORRUPT, with half of the page already in the target."""
    UNAVAILABLE = auto()
    """No answer: contained nowhere, UNAVAILABLE to read and to put."""
    REJECTED = auto()
    """No room: the page is not kept."""
    UNREPORTED = auto()
    """The page is stored, and the store says UNAVAILABLE."""
    RAISES = auto()
    """The call raises OSError, which no store may; an embedder's own might."""


# What put says instead of keeping the page.
_UNKEPT = {Fault.UNAVAILABLE: Status.UNAVAILABLE, Fault.REJECTED: Status.REJECTED}
# What a read says of a page that is there.
_UNREAD = {
    Fault.MISSING: Status.MISS,
    Fault.LOST: Status.MISS,
    Fault.CORRUPT: Status.CORRUPT,
    Fault.TORN: Status.CORRUPT,
}
_REMOVED = frozenset({Fault.LOST, Fault.CORRUPT, Fault.TORN})
_HIDDEN = frozenset({Fault.MISSING, Fault.UNAVAILABLE})


class FaultyStore(Store):
    """Fails for chosen pages, in chosen calls, and is the inner store otherwise.

    Nest two to have two faults. With a :class:`FailPoint` it fails in one call of all,
    as :func:`fail_nth` wants it.

    Args:
        inner: The store that works.
        fault: What goes wrong, nothing when None.
        keys: The pages that fail; all when None.
        point: Counts :meth:`contains`, :meth:`get_into` and :meth:`put`, and says which
            call fails; each when None.

    Attributes:
        fault: As given; a test may change it.
    """

    def __init__(
        self,
        inner: Store,
        fault: Fault | None = None,
        *,
        keys: Collection[PageKey] | None = None,
        point: FailPoint | None = None,
    ) -> None:
        self._inner = inner
        self.fault = fault
        self._keys = None if keys is None else frozenset(keys)
        self._point = point

    def __repr__(self) -> str:
        return f"<FaultyStore {self.fault} of {self._inner!r}>"

    async def open(self) -> None:
        await self._inner.open()

    @property
    def missing_bytes(self) -> int:
        return self._inner.missing_bytes

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        fault, failing = self._next_call(keys)
        found = await self._inner.contains(keys)
        if fault in _HIDDEN:
            for index in failing:
                found[index] = False
        return found

    async def get_into(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None = None,
    ) -> list[Status]:
        fault, failing = self._next_call(keys)
        statuses = await self._inner.get_into(keys, targets, layers)
        if fault in _REMOVED:
            await self._inner.remove([keys[index] for index in failing])
        for index in failing:
            statuses[index] = _reading(fault, statuses[index])
            if statuses[index] is not Status.HIT:
                _scribble(targets[index], half=fault is Fault.TORN)
        return statuses

    async def put(
        self, keys: Sequence[PageKey], sources: Sequence[PageBuffers]
    ) -> list[Status]:
        check_batch(keys, sources)
        fault, failing = self._next_call(keys)
        unkept = None if fault is None else _UNKEPT.get(fault)
        skipped = failing if unkept else ()
        kept = [index for index in range(len(keys)) if index not in skipped]
        answers = await self._inner.put(
            [keys[index] for index in kept], [sources[index] for index in kept]
        )
        statuses = [unkept or Status.HIT] * len(keys)
        for index, answer in zip(kept, answers, strict=True):
            statuses[index] = answer
        if fault is Fault.UNREPORTED:
            for index in failing:
                statuses[index] = Status.UNAVAILABLE
        return statuses

    async def remove(self, keys: Sequence[PageKey]) -> None:
        await self._inner.remove(keys)

    async def keys(self) -> AsyncIterator[PageKey]:
        async for key in self._inner.keys():
            yield key

    async def collect_garbage(self) -> int:
        return await self._inner.collect_garbage()

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _next_call(
        self, keys: Sequence[PageKey]
    ) -> tuple[Fault | None, frozenset[int]]:
        """Return what goes wrong in this call, and for which of its pages."""
        fails_now = self._point is None or self._point.trips()
        if self.fault is None or not fails_now:
            return None, frozenset()
        failing = frozenset(
            index
            for index, key in enumerate(keys)
            if self._keys is None or key in self._keys
        )
        if self.fault is Fault.RAISES and failing:
            raise OSError(errno.EIO, "injected")
        return self.fault, failing


def _reading(fault: Fault | None, status: Status) -> Status:
    """Return what reading a page comes to, by what it would come to."""
    if fault is Fault.UNAVAILABLE:
        return Status.UNAVAILABLE
    if fault is None or status is not Status.HIT:
        return status
    return _UNREAD.get(fault, status)


def _scribble(buffers: PageBuffers, *, half: bool) -> None:
    """Overwrite a target, or the latter half of it: nobody may use what is in it."""
    kept = sum(map(len, buffers)) // 2 if half else 0
    for buffer in buffers:
        start = min(kept, len(buffer))
        buffer[start:] = b"\xa5" * (len(buffer) - start)
        kept -= start
