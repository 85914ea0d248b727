"""A store in virtual time, over a shelf that outlives it, which may fail in many ways.

Nothing that it does wrong breaks the contract of :class:`Store` but two things that
embedders' own stores are known to do: raise, and answer for fewer pages than asked.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio
import anyio.lowlevel

from asyncache.core import ClosedError, PageKey, StoreError
from asyncache.stores import PageBuffers, Status, Store, check_batch
from asyncache.testing.simulation._copies import Copies, Move, pair
from asyncache.testing.simulation._device import no_time
from asyncache.testing.simulation._mishaps import Mishap, Weather

Answer = TypeVar("Answer")

_STALL_S = 1.0
"""How much longer than usual an answer takes in a stall."""
_STUBBORN = 10
"""How many times longer than usual bytes move that nobody can stop."""
_SCRIBBLE = 0xA5


class Shelf:
    """What is stored, for longer than any cache or store lives.

    Args:
        max_pages: Pages that it keeps; those used longest ago give way.
        on_put: Called with each key and the bytes that are stored under it.
    """

    def __init__(
        self,
        max_pages: int = 1 << 30,
        *,
        on_put: Callable[[PageKey, bytes], object] | None = None,
    ) -> None:
        self.pages: OrderedDict[PageKey, bytes] = OrderedDict()
        self.ever: set[PageKey] = set()
        """What was put at any time, kept or not."""
        self._max_pages = max_pages
        self._on_put = on_put

    def __repr__(self) -> str:
        return f"<Shelf {len(self.pages)} of {self._max_pages} pages>"

    def put(self, key: PageKey, page: bytes) -> None:
        """Keep a page, unless it is there already."""
        if self._on_put is not None:
            self._on_put(key, page)
        self.keep(key, page)

    def keep(self, key: PageKey, page: bytes) -> None:
        """Keep a page that was put by somebody else."""
        self.pages.setdefault(key, page)
        self.ever.add(key)
        self.pages.move_to_end(key)
        while len(self.pages) > self._max_pages:
            self.pages.popitem(last=False)


class SimulatedStore(Store):
    """A store over a shelf.

    Args:
        shelf: What it keeps, shared with others if need be.
        copies: Where bytes move.
        weather: What goes wrong.
        answer_s: Returns how long the next answer takes, in seconds.
    """

    def __init__(
        self,
        shelf: Shelf,
        *,
        copies: Copies | None = None,
        weather: Weather | None = None,
        answer_s: Callable[[], float] = no_time,
    ) -> None:
        self._shelf = shelf
        self._copies = copies or Copies()
        self._weather = weather or Weather()
        self._answer_s = answer_s
        self._is_opened = self._is_closed = False

    def __repr__(self) -> str:
        return f"<SimulatedStore of {self._shelf!r}>"

    async def open(self) -> None:
        self._is_opened = True
        await self._wait()
        if self._weather.strikes(Mishap.SHUT):
            raise StoreError("the store cannot be opened")

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        self._check_open()
        await self._wait()
        hits = [not self._weather.is_out and key in self._shelf.pages for key in keys]
        hidden = [hit and self._weather.strikes(Mishap.HIDE) for hit in hits]
        return self._cut([a and not b for a, b in zip(hits, hidden, strict=True)])

    async def get_into(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None = None,
    ) -> list[Status]:
        self._check_open()
        check_batch(keys, targets, layers)
        await self._wait()
        statuses = [self._read_status(key) for key in keys]
        self._lose_tail(statuses)
        moves: list[Move] = []
        for key, target, status in zip(keys, targets, statuses, strict=True):
            moves += self._read_moves(key, target, layers, status)
        await self._move(moves)
        return self._cut(statuses)

    async def put(
        self, keys: Sequence[PageKey], sources: Sequence[PageBuffers]
    ) -> list[Status]:
        self._check_open()
        check_batch(keys, sources)
        await self._wait()
        if self._weather.is_out:
            return [Status.UNAVAILABLE] * len(keys)
        if self._weather.strikes(Mishap.FULL):
            return [Status.REJECTED] * len(keys)
        moves: list[Move] = []
        written: dict[PageKey, bytearray] = {}
        for key, source in zip(keys, sources, strict=True):
            if key not in self._shelf.pages:
                page = written[key] = bytearray(key.space.page_bytes)
                moves += pair([memoryview(page)], source)
        await self._move(moves)
        for key, page in written.items():
            self._shelf.put(key, bytes(page))
        if self._weather.strikes(Mishap.UNREPORTED):
            return [Status.UNAVAILABLE] * len(keys)
        return self._cut([Status.HIT] * len(keys))

    async def remove(self, keys: Sequence[PageKey]) -> None:
        self._check_open()
        await anyio.lowlevel.checkpoint()
        for key in keys:
            self._shelf.pages.pop(key, None)

    async def aclose(self) -> None:
        self._is_closed = True

    @property
    def is_held(self) -> bool:
        """Whether it was opened, and not closed since."""
        return self._is_opened and not self._is_closed

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the store is closed")

    async def _wait(self) -> None:
        """Take the time of an answer; nothing of the caller's is touched meanwhile."""
        stall_s = _STALL_S if self._weather.strikes(Mishap.STALL) else 0.0
        await anyio.sleep(self._answer_s() + stall_s)
        if self._weather.strikes(Mishap.RAISE):
            raise OSError(errno.EIO, "injected")

    async def _move(self, moves: Sequence[Move]) -> None:
        if moves:
            if self._weather.strikes(Mishap.STUBBORN):
                await self._copies.run(moves, _STUBBORN * self._answer_s())
            else:
                await self._copies.run(moves, self._answer_s(), recallable=True)

    def _read_status(self, key: PageKey) -> Status:
        pages = self._shelf.pages
        if self._weather.is_out:
            return Status.UNAVAILABLE
        if key not in pages:
            return Status.MISS
        pages.move_to_end(key)
        if self._weather.strikes(Mishap.LOSE):
            del pages[key]
            return Status.MISS
        if self._weather.strikes(Mishap.CORRUPT):
            del pages[key]
            return Status.CORRUPT
        return Status.HIT

    def _lose_tail(self, statuses: list[Status]) -> None:
        if self._weather.strikes(Mishap.PARTIAL):
            kept = len(statuses) // 2
            statuses[kept:] = [Status.UNAVAILABLE] * (len(statuses) - kept)

    def _read_moves(
        self,
        key: PageKey,
        target: PageBuffers,
        layers: range | None,
        status: Status,
    ) -> list[Move]:
        """Return what is written into a target: if it is no hit, something wrong."""
        space = key.space
        wanted = range(space.num_layers) if layers is None else layers
        size = len(wanted) * space.layer_bytes
        start = wanted.start * space.layer_bytes
        page = self._shelf.pages.get(key)
        if status is not Status.HIT or page is None:
            page = bytes([_SCRIBBLE]) * space.page_bytes
        return list(pair(target, [memoryview(page)[start : start + size]]))

    def _cut(self, answers: list[Answer]) -> list[Answer]:
        if answers and self._weather.strikes(Mishap.SHORT):
            del answers[len(answers) // 2 :]
        return answers
