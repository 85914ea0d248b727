"""A device in virtual time: copies take a while, are torn meanwhile, and may fail."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from asyncache.core import DeviceError, KVLayout
from asyncache.devices import CpuDevice, Device
from asyncache.testing.simulation._copies import Copies, Move, pair
from asyncache.testing.simulation._mishaps import Mishap, Weather

if TYPE_CHECKING:
    import torch

POISON = 0xEE
"""What pages hold that nobody wrote."""
Buffers = Sequence[Sequence[memoryview]]


def no_time() -> float:
    """Return the seconds that something takes where time is of no interest."""
    return 0.0


class SimulatedDevice(Device):
    """Pools of pages in the process's memory, behind copies in virtual time.

    A copy may be refused before it begins, fail half-way with its pages torn, or kill
    the device, after which nothing is copied any more.

    Args:
        layout: Pools to allocate, poisoned.
        num_pages: Pages of each pool, or of every pool when it is one number.
        copies: Where its copies run.
        weather: What goes wrong.
        copy_s: Returns how long the next copy takes, in seconds.
        host_addressable: Whether a store may read and write its pages in place.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int | Mapping[str, int],
        *,
        copies: Copies | None = None,
        weather: Weather | None = None,
        copy_s: Callable[[], float] = no_time,
        host_addressable: bool = False,
    ) -> None:
        self._inner = CpuDevice(layout, num_pages)
        self.layout = layout
        self.num_pages = self._inner.num_pages
        self.host_addressable = host_addressable
        self._copies = copies or Copies()
        self._weather = weather or Weather()
        self._copy_s = copy_s
        self._is_dead = False
        self._pages = {
            name: [page for [page] in self._inner.page_views(name, range(count))]
            for name, count in self.num_pages.items()
        }
        self._origins = {
            name: _address(pages[0]) for name, pages in self._pages.items()
        }
        for name, count in self.num_pages.items():
            for page in range(count):
                self.poison(name, page)

    def __repr__(self) -> str:
        state = "dead" if self._is_dead else "alive"
        return f"<SimulatedDevice pages {dict(self.num_pages)}, {state}>"

    # What tests look at, and forwards do.

    def page(self, pool: str, page: int) -> memoryview:
        """Return the memory of a page, all layers, in place."""
        return self._pages[pool][page]

    def poison(self, pool: str, page: int) -> None:
        """Make a page hold nothing that anyone wrote."""
        view = self._pages[pool][page]
        view[:] = bytes([POISON]) * len(view)

    def locate(self, view: memoryview) -> tuple[str, int] | None:
        """Return the pool and page that some memory lies in; None if in neither."""
        address = 0 if view.readonly else _address(view)
        for name, pages in self._pages.items():
            index, rest = divmod(address - self._origins[name], len(pages[0]))
            if 0 <= index < len(pages) and len(view) <= len(pages[0]) - rest:
                return name, index
        return None

    # The contract.

    def tensor(self, pool: str) -> torch.Tensor:
        return self._inner.tensor(pool)

    def page_views(
        self, pool: str, pages: Sequence[int], layers: range | None = None
    ) -> list[list[memoryview]]:
        if not self.host_addressable:
            raise DeviceError(f"pool {pool!r} is not addressable by the host")
        return self._inner.page_views(pool, pages, layers)

    async def write_pages(
        self,
        pool: str,
        pages: Sequence[int],
        sources: Buffers,
        layers: range | None = None,
    ) -> None:
        targets = self._views(pool, pages, layers)
        await self._copy(_moves(targets, sources))

    async def read_pages(
        self,
        pool: str,
        pages: Sequence[int],
        targets: Buffers,
        layers: range | None = None,
    ) -> None:
        if any(target.readonly for buffers in targets for target in buffers):
            raise ValueError("targets must be writable")
        sources = self._inner.page_views(pool, pages, layers)
        await self._copy(_moves(targets, sources))

    def copy_pages(
        self,
        pool: str,
        sources: Sequence[int],
        targets: Sequence[int],
        *,
        stream: int | None = None,
    ) -> None:
        # A step of the forward that asks for it: what tears it tears the forward too.
        self._inner.copy_pages(pool, sources, targets, stream=stream)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _views(self, pool: str, pages: Sequence[int], layers: range | None) -> Buffers:
        if len(set(pages)) != len(pages):
            raise ValueError(f"pages to write must differ, got {list(pages)}")
        return self._inner.page_views(pool, pages, layers)

    async def _copy(self, moves: Sequence[Move]) -> None:
        # The last moment at which a cancelled call has touched nothing.
        await anyio.lowlevel.checkpoint()
        if self._is_dead or self._weather.strikes(Mishap.REFUSE):
            raise DeviceError("the copy was refused")
        is_torn = self._weather.strikes(Mishap.TEAR)
        if is_torn:
            moves = [(target[: len(target) // 2], source) for target, source in moves]
            moves = [(target, source[: len(target)]) for target, source in moves]
        await self._copies.run(moves, self._copy_s())
        self._is_dead = self._is_dead or self._weather.strikes(Mishap.DIE)
        if is_torn or self._is_dead:
            raise DeviceError("the device died" if self._is_dead else "the copy tore")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _moves(targets: Buffers, sources: Buffers) -> list[Move]:
    if len(targets) != len(sources):
        raise ValueError(f"{len(targets)} pages to copy {len(sources)} to")
    moves: list[Move] = []
    for to, origin in zip(targets, sources, strict=True):
        sizes = sum(map(len, to)), sum(map(len, origin))
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"a page has {sizes[0]} bytes in one place, {sizes[1]} in the other"
            )
        moves += pair(to, origin)
    return moves
