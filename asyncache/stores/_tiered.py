"""A store made of stores, fastest first: memory in front of files, say.

A page is put into all tiers, not into the next one when a tier evicts it: so there is
never a moment when it is in neither. And no read brings back what was removed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import anyio

from asyncache.core import ClosedError, OrderError, PageKey
from asyncache.stores._abc import PageBuffers, Status, Store, check_batch

# What a read says where tiers differ: the last of these. CORRUPT can be told only once,
# for the copy is gone; UNAVAILABLE will be told again; MISS is true only if all say so.
_RANKING = (Status.MISS, Status.UNAVAILABLE, Status.CORRUPT, Status.HIT)
# What a tier says that would take a page back: not one that is UNAVAILABLE.
_LACKING = frozenset({Status.MISS, Status.CORRUPT})


class TieredStore(Store):
    """Pages in several stores, read from the first that has them.

    As in ``TieredStore([MemoryStore(8 << 30), FileStore(path)])``. The last tier
    counts, for it is what survives a restart: what it says of a put is the answer. The
    others take a page first, and keep it as long as they can.

    A page that a faster tier lacks, or found corrupt, is put into it from the memory
    that a slower one has just filled, before the read returns: in memory that is one
    more copy, and whether it is taken does not matter. A page of which only some layers
    are read stays where it is. Copies outlive what other processes remove from a tier
    that they share.

    Args:
        stores: The tiers, fastest first; this store opens and closes them.

    Raises:
        ValueError: If there are none.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise ValueError("need at least one store, got none")
        self._tiers = tuple(stores)
        self._reads: set[_Read] = set()
        self._removals: list[frozenset[PageKey]] = []
        self._is_open = False
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<TieredStore {list(self._tiers)!r}>"

    async def open(self) -> None:
        """Open all tiers, or none: if one cannot, all are closed, for good."""
        self._check_not_closed()
        if self._is_open:
            return
        try:
            for tier in self._tiers:
                await tier.open()
        except BaseException:
            # Nobody else will close them, and cancelled they would leave threads.
            with anyio.CancelScope(shield=True):
                await self.aclose()
            raise
        self._is_open = True

    @property
    def missing_bytes(self) -> int:
        return sum(tier.missing_bytes for tier in self._tiers)

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        self._check_usable()
        found = [False] * len(keys)
        for tier in self._tiers:
            left = [index for index, is_there in enumerate(found) if not is_there]
            if not left or self._is_closed:
                break
            answers = await tier.contains([keys[index] for index in left])
            for index, is_there in zip(left, answers, strict=True):
                found[index] = is_there
        return found

    async def get_into(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None = None,
    ) -> list[Status]:
        self._check_usable()
        check_batch(keys, targets, layers)
        read = _Read(keys, targets, layers, frozenset().union(*self._removals))
        self._reads.add(read)
        try:
            for tier in self._tiers:
                if self._is_closed:
                    read.give_up()
                if read.left:
                    await read.ask(tier)
            for tier, lacking in read.lacking:
                if not self._is_closed:
                    await read.promote(tier, lacking)
        finally:
            self._reads.discard(read)
            read.over.set()
        return read.statuses

    async def put(
        self, keys: Sequence[PageKey], sources: Sequence[PageBuffers]
    ) -> list[Status]:
        self._check_usable()
        check_batch(keys, sources)
        statuses = unreached = [Status.UNAVAILABLE] * len(keys)
        # Also if a fast tier has the page: the last may have refused it before.
        for tier in self._tiers:
            statuses = unreached if self._is_closed else await tier.put(keys, sources)
        return statuses

    async def remove(self, keys: Sequence[PageKey]) -> None:
        self._check_usable()
        removal = frozenset(keys)
        # A read that overlaps may have found a page, to promote it when we are done:
        # it must not any more, and one that has begun to must end before we do.
        self._removals.append(removal)
        try:
            landing = [read for read in self._reads if read.promoting & removal]
            for read in self._reads:
                read.barred |= removal  # those to come begin with it
            for read in landing:
                await read.over.wait()
            for tier in reversed(self._tiers):
                if not self._is_closed:
                    await tier.remove(keys)
        finally:
            self._removals.remove(removal)

    async def keys(self) -> AsyncIterator[PageKey]:
        """Yield the keys of the pages of all tiers, each once.

        All of them are kept until the last one: some 200 bytes a page.
        """
        self._check_usable()
        told: set[PageKey] = set()
        for tier in self._tiers:
            async for key in tier.keys():
                if key not in told:
                    told.add(key)
                    yield key
                    self._check_usable()

    async def collect_garbage(self) -> int:
        self._check_usable()
        num_bytes = 0
        for tier in self._tiers:
            num_bytes += await tier.collect_garbage()
        return num_bytes

    async def aclose(self) -> None:
        self._is_closed = True
        async with AsyncExitStack() as stack:  # each is closed, whatever others raise
            for tier in self._tiers:
                stack.push_async_callback(tier.aclose)

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise ClosedError("the store is closed")

    def _check_usable(self) -> None:
        self._check_not_closed()
        if not self._is_open:
            raise OrderError(f"{self!r} is not open: await its open() first")


@dataclass(eq=False)
class _Read:
    """A batch on its way down the tiers, and its pages' way back up."""

    keys: Sequence[PageKey]
    targets: Sequence[PageBuffers]
    layers: range | None
    barred: frozenset[PageKey]  # pages that it must not bring back
    promoting: frozenset[PageKey] = frozenset()
    over: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.statuses = [Status.MISS] * len(self.keys)
        self.left = list(range(len(self.keys)))
        self.lacking: list[tuple[Store, list[int]]] = []

    async def ask(self, tier: Store) -> None:
        """Read what is still missing from a tier."""
        keys = [self.keys[index] for index in self.left]
        targets = [self.targets[index] for index in self.left]
        answers = await tier.get_into(keys, targets, self.layers)
        told = dict(zip(self.left, answers, strict=True))
        self.lacking.append((tier, [i for i in told if told[i] in _LACKING]))
        self.left = [i for i in told if told[i] is not Status.HIT]
        for i, answer in told.items():
            self.statuses[i] = max(self.statuses[i], answer, key=_RANKING.index)

    def give_up(self) -> None:
        """Say of what is still missing that it was not reached."""
        while self.left:
            self.statuses[self.left.pop()] = Status.UNAVAILABLE

    async def promote(self, tier: Store, lacking: Sequence[int]) -> None:
        """Put those pages into a tier that it lacks and that a slower one had."""
        found = [index for index in lacking if self._may_promote(index)]
        if found:
            keys = [self.keys[index] for index in found]
            self.promoting = frozenset(keys)
            await tier.put(keys, [self.targets[index] for index in found])

    def _may_promote(self, index: int) -> bool:
        key = self.keys[index]
        return (
            self.statuses[index] is Status.HIT
            and key not in self.barred
            and (self.layers is None or len(self.layers) == key.space.num_layers)
        )
