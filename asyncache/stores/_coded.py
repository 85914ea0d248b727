"""Pages kept in another store in another form: compressed, encrypted.

A store knows pages of fixed sizes only, and reads them by layers. So a coded page is a
page of the inner store, with one *slot* a layer, coded on its own: whatever layers are
asked for, the same are read there. All slots of a page have one size, out of the few
that its codec allows; where there are several, the inner store is asked for all.

    PageKey(hash, "kv-0of2-bfloat16-4x2x16x8x128")       what the caller names
    PageKey(hash', "zstd2-0of2-uint8-4x24592")           what the inner store keeps

The inner hash covers the outer key, all of it, and the codec with its version: what
differs outside differs inside, and plain pages and coded ones never meet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

from asyncache.core import ClosedError, PageHash, PageKey, PageSpace, StoreError
from asyncache.stores._abc import PageBuffers, Status, Store, check_batch
from asyncache.stores._batches import slices, split, until
from asyncache.threads import Stop, Workers

# Bounds the memory that holds coded pages, a call, to this and a page.
_PART_BYTES = 32 * 2**20
# Where the hop between threads stops to count: codecs do about 1 GB a second.
_JOB_BYTES = 2**20


class Coder(ABC):
    """Codes and decodes pages on one thread."""

    @abstractmethod
    def encode(self, key: PageKey, sources: Sequence[memoryview]) -> bytearray:
        """Return a page's slots, one after another, all of one allowed size."""

    @abstractmethod
    def decode(
        self,
        key: PageKey,
        layers: range,
        slots: Sequence[memoryview],
        targets: Sequence[memoryview],
    ) -> bool:
        """Fill the targets; return False if a slot is not, to the bit, what was made.

        ``targets`` are the slices of these layers, ``slots`` what they were coded to.
        """


class Codec(ABC):
    """A form of pages. Immutable: all threads share it.

    Attributes:
        name: Codec and version, fit to name a pool.
    """

    name: str

    @abstractmethod
    def takes(self, key: PageKey) -> bool:
        """Return whether there are pages of this key's namespace at all."""

    @abstractmethod
    def page_hash(self, key: PageKey) -> PageHash:
        """Return what the inner store knows a page by; its tag stays what it is."""

    @abstractmethod
    def slot_bytes(self, layer_bytes: int) -> Sequence[int]:
        """Return the sizes that slots may have, ascending; any slice fits the last."""

    @abstractmethod
    def coder(self) -> Coder:
        """Return what one job codes with."""


class CodedStore(Store, ABC):
    """Pages in another store, in a codec's form.

    Args:
        inner: Keeps the coded pages; this store opens and closes it.
        codec: The form.
        num_threads: Threads that decode; half as many encode, so that a backlog of
            writes never delays a read.

    Raises:
        ValueError: If ``num_threads`` is below 1.
    """

    def __init__(self, inner: Store, codec: Codec, *, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        self._inner = inner
        self._codec = codec
        self._reads = Workers(num_threads, "asyncache-decode", owner="store")
        self._writes = Workers(
            -(-num_threads // 2), "asyncache-encode", owner="store", after=self._reads
        )
        self._spaces: dict[PageSpace, list[PageSpace]] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._inner!r}>"

    async def open(self) -> None:
        self._check_usable()
        await self._inner.open()

    @property
    def missing_bytes(self) -> int:
        return self._inner.missing_bytes

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        self._check_usable()
        takes = self._codec.takes
        found = await self._find([self._places(k) if takes(k) else [] for k in keys])
        return [place is not None for place in found]

    async def get_into(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None = None,
    ) -> list[Status]:
        self._check_usable()
        check_batch(keys, targets, layers)
        ours = self._taken(keys)
        answers: list[Status] = []
        for part in _parts(ours, targets):
            some, into = [keys[i] for i in part], [targets[i] for i in part]
            answers += await self._get_part(some, into, layers)
        return _spread(answers, ours, len(keys), others=Status.MISS)

    async def put(
        self, keys: Sequence[PageKey], sources: Sequence[PageBuffers]
    ) -> list[Status]:
        self._check_usable()
        check_batch(keys, sources)
        ours = self._taken(keys)
        answers: list[Status] = []
        for part in _parts(ours, sources):
            some, of = [keys[i] for i in part], [sources[i] for i in part]
            answers += await self._put_part(some, of)
        return _spread(answers, ours, len(keys), others=Status.REJECTED)

    async def remove(self, keys: Sequence[PageKey]) -> None:
        self._check_usable()
        ours = [keys[i] for i in self._taken(keys)]
        await self._inner.remove([place for key in ours for place in self._places(key)])

    async def keys(self) -> AsyncIterator[PageKey]:
        self._check_usable()
        raise StoreError(
            f"{type(self).__name__} cannot list its pages: no key follows from what it"
            f" keeps them by; list those of {self._inner!r}"
        )
        yield  # type: ignore[unreachable]  # so that it is a generator

    async def collect_garbage(self) -> int:
        self._check_usable()
        return await self._inner.collect_garbage()

    async def aclose(self) -> None:
        self._is_closed = True
        async with AsyncExitStack() as stack:  # each is closed, whatever others raise
            stack.push_async_callback(self._inner.aclose)
            stack.push_async_callback(self._writes.aclose)
            stack.push_async_callback(self._reads.aclose)

    async def _get_part(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None,
    ) -> list[Status]:
        statuses = [Status.UNAVAILABLE] * len(keys)
        places = await self._choose([self._places(key) for key in keys])
        if self._has_ended():
            return statuses
        wanted = [layers or range(place.space.num_layers) for place in places]
        coded = [
            memoryview(bytearray(len(which) * place.space.layer_bytes))
            for which, place in zip(wanted, places, strict=True)
        ]
        answers = await self._inner.get_into(places, [[page] for page in coded], layers)
        if self._has_ended():
            return statuses

        def decode(part: range, stop: Stop) -> None:
            coder = self._codec.coder()
            for index in until(stop, part):
                statuses[index] = answers[index]
                if answers[index] is Status.HIT and not coder.decode(
                    keys[index],
                    wanted[index],
                    slices([coded[index]], places[index].space.layer_bytes),
                    slices(targets[index], keys[index].space.layer_bytes),
                ):
                    statuses[index] = Status.CORRUPT

        await self._reads.run(decode, split(targets, _JOB_BYTES))
        bad = [i for i, status in enumerate(statuses) if status is Status.CORRUPT]
        if bad and not self._has_ended():
            await self._inner.remove([places[index] for index in bad])
        return statuses

    async def _put_part(
        self, keys: Sequence[PageKey], sources: Sequence[PageBuffers]
    ) -> list[Status]:
        if self._has_ended():
            return [Status.UNAVAILABLE] * len(keys)
        places = [self._places(key) for key in keys]
        # Not left to the inner store: another size is another page to it.
        found = await self._find(places)
        statuses = [Status.HIT if place else Status.UNAVAILABLE for place in found]
        if self._has_ended():
            return statuses
        left = [index for index, place in enumerate(found) if place is None]
        coded: dict[int, bytearray] = {}

        def encode(part: range, stop: Stop) -> None:
            coder = self._codec.coder()
            for number in until(stop, part):
                index = left[number]
                key = keys[index]
                pieces = slices(sources[index], key.space.layer_bytes)
                coded[index] = coder.encode(key, pieces)

        jobs = split([sources[index] for index in left], _JOB_BYTES)
        await self._writes.run(encode, jobs)
        if coded and not self._has_ended():
            answers = await self._inner.put(
                [_of_size(places[index], len(page)) for index, page in coded.items()],
                [[memoryview(page)] for page in coded.values()],
            )
            for index, answer in zip(coded, answers, strict=True):
                statuses[index] = answer
        return statuses

    async def _choose(self, places: Sequence[list[PageKey]]) -> list[PageKey]:
        """Return for each page the place to read it from.

        That of a page that is nowhere is any of its places: the inner store says then
        whether it is missing, or nobody can tell.
        """
        if self._has_ended() or all(len(page) == 1 for page in places):
            return [page[0] for page in places]
        found = await self._find(places)
        return [place or page[0] for page, place in zip(places, found, strict=True)]

    async def _find(self, places: Sequence[list[PageKey]]) -> list[PageKey | None]:
        """Return for each page the first of its places where it is, if any."""
        asked = [place for page in places for place in page]
        answers = await self._inner.contains(asked)
        there = dict(zip(asked, answers, strict=True))
        return [next((p for p in page if there[p]), None) for page in places]

    def _places(self, key: PageKey) -> list[PageKey]:
        spaces = self._spaces.get(key.space)
        if spaces is None:
            space = key.space
            spaces = self._spaces[space] = [
                PageSpace(
                    self._codec.name, space.shard, "uint8", (space.num_layers, size)
                )
                for size in self._codec.slot_bytes(space.layer_bytes)
            ]
        page_hash = self._codec.page_hash(key)
        return [PageKey(page_hash, space) for space in spaces]

    def _taken(self, keys: Sequence[PageKey]) -> list[int]:
        return [i for i, key in enumerate(keys) if self._codec.takes(key)]

    def _has_ended(self) -> bool:
        """Return whether it is closed: to be asked again after each await."""
        return self._is_closed

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("the store is closed")


def _parts(which: Sequence[int], pages: Sequence[PageBuffers]) -> list[Sequence[int]]:
    parts = split([pages[i] for i in which], _PART_BYTES)
    return [which[part.start : part.stop] for part in parts]


def _spread(
    answers: Sequence[Status], which: Sequence[int], count: int, *, others: Status
) -> list[Status]:
    statuses = [others] * count
    for place, answer in zip(which, answers, strict=True):
        statuses[place] = answer
    return statuses


def _of_size(places: Sequence[PageKey], num_bytes: int) -> PageKey:
    """Return the place where a page of this length is kept."""
    [place] = [place for place in places if place.space.page_bytes == num_bytes]
    return place
