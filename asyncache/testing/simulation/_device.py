"""A device in virtual time: copies take a while, are torn meanwhile, and may fail."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from asyncache.core import DeviceError, KVLayout
from asyncache.devices import Copy, CpuDevice, Device
from asyncache.testing.simulation._copies import Copies, Move, pair
from asyncache.testing.simulation._mishaps import Mishap, Weather

if TYPE_CHECKING:
    import torch

POISON = 0xEE
"""What pages hold that nobody wrote."""


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

    def start_write(
        self,
        pool: str,
        pages: Sequence[int],
        source: memoryview,
        layers: range | None = None,
    ) -> Copy:
        if len(set(pages)) != len(pages):
            raise ValueError(f"pages to write must differ, got {list(pages)}")
        views = self._views(pool, pages, source, layers)
        return self._start(list(pair(views, [source])))

    def start_read(
        self,
        pool: str,
        pages: Sequence[int],
        target: memoryview,
        layers: range | None = None,
    ) -> Copy:
        if target.readonly:
            raise ValueError("the buffer must be writable")
        views = self._views(pool, pages, target, layers)
        return self._start(list(pair([target], views)))

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

    def _views(
        self,
        pool: str,
        pages: Sequence[int],
        buffer: memoryview,
        layers: range | None,
    ) -> list[memoryview]:
        in_pages = self._inner.page_views(pool, pages, layers)
        views = [view for page in in_pages for view in page]
        num_bytes = sum(map(len, views))
        if num_bytes != len(buffer):
            raise ValueError(f"pages of {num_bytes} bytes, a buffer of {len(buffer)}")
        return views

    def _start(self, moves: list[Move]) -> Copy:
        if self._is_dead or self._weather.strikes(Mishap.REFUSE):
            raise DeviceError("the copy was refused")
        is_torn = self._weather.strikes(Mishap.TEAR)
        if is_torn:
            moves = [
                (target[: len(target) // 2], source[: len(target) // 2])
                for target, source in moves
            ]
        copy = _VirtualCopy()

        def ended() -> None:
            self._is_dead = self._is_dead or self._weather.strikes(Mishap.DIE)
            why = "the device died" if self._is_dead else "the copy tore"
            copy.finish(DeviceError(why) if is_torn or self._is_dead else None)

        self._copies.start(moves, self._copy_s(), ended)
        return copy


class _VirtualCopy(Copy):
    """A copy that takes no time but the loop's."""

    def block(self) -> None:
        raise AssertionError("a simulated copy ends only while its loop runs")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
