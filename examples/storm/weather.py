"""A store in bad weather: each call takes its time, and now and then a page is lost."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from asyncache import PageKey, Status, Store
from asyncache.stores import PageBuffers

Pause = Callable[[float], Awaitable[None]]
"""Waits so many seconds, or what stands for them."""

# Median seconds of a call; one in twenty takes five times as long.
CONTAINS_S, GET_S, PUT_S = 0.008, 0.020, 0.020
_SPREAD = 1.0


class WeatherStore(Store):
    """Another store, slowed down.

    Args:
        inner: The store itself.
        dice: Where all chance comes from.
        pause: How to wait.
        lost: How likely a call that reads finds one of its pages gone, though it was
            there when asked for.
    """

    def __init__(
        self, inner: Store, *, dice: Random, pause: Pause, lost: float = 0.05
    ) -> None:
        self._inner = inner
        self._dice = dice
        self._pause = pause
        self._lost = lost

    async def open(self) -> None:
        """Open the inner store."""
        await self._inner.open()

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Answer late."""
        await self._wait(CONTAINS_S)
        return await self._inner.contains(keys)

    async def get_into(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None = None,
    ) -> list[Status]:
        """Read at half of the time, so that targets are written and not yet ready."""
        if self._dice.random() < self._lost:
            await self._inner.remove([self._dice.choice(keys)])
        await self._wait(GET_S / 2)
        statuses = await self._inner.get_into(keys, targets, layers)
        await self._wait(GET_S / 2)
        return statuses

    async def put(
        self, keys: Sequence[PageKey], sources: Sequence[PageBuffers]
    ) -> list[Status]:
        """Write late, so that sources have to stay as they are."""
        await self._wait(PUT_S)
        return await self._inner.put(keys, sources)

    async def remove(self, keys: Sequence[PageKey]) -> None:
        """Forget pages at once."""
        await self._inner.remove(keys)

    async def aclose(self) -> None:
        """Close the inner store."""
        await self._inner.aclose()

    async def _wait(self, median_s: float) -> None:
        await self._pause(self._dice.lognormvariate(math.log(median_s), _SPREAD))
