"""A store whose calls a test holds and lets on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from asyncache.core import PageKey
from asyncache.stores import PageBuffers, Status, Store
from asyncache.testing._gate import Gate


class GateStore(Store):
    """Holds each call before it reaches the inner store, until the test opens its gate.

    A call that is cancelled while it is held never reaches the inner store.

    Args:
        inner: The store that answers.
        is_open: Whether the gates are open at first.

    Attributes:
        contains_gate: Where :meth:`contains` waits.
        get_gate: Where :meth:`get_into` waits.
        put_gate: Where :meth:`put` waits.
    """

    def __init__(self, inner: Store, *, is_open: bool = False) -> None:
        self._inner = inner
        self.contains_gate = Gate(is_open=is_open)
        self.get_gate = Gate(is_open=is_open)
        self.put_gate = Gate(is_open=is_open)

    def __repr__(self) -> str:
        return (
            f"<GateStore contains={self.contains_gate!r} get={self.get_gate!r} "
            f"put={self.put_gate!r}>"
        )

    async def open(self) -> None:
        await self._inner.open()

    @property
    def missing_bytes(self) -> int:
        return self._inner.missing_bytes

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        await self.contains_gate.pass_through()
        return await self._inner.contains(keys)

    async def get_into(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None = None,
    ) -> list[Status]:
        await self.get_gate.pass_through()
        return await self._inner.get_into(keys, targets, layers)

    async def put(
        self, keys: Sequence[PageKey], sources: Sequence[PageBuffers]
    ) -> list[Status]:
        await self.put_gate.pass_through()
        return await self._inner.put(keys, sources)

    async def remove(self, keys: Sequence[PageKey]) -> None:
        await self._inner.remove(keys)

    async def keys(self) -> AsyncIterator[PageKey]:
        async for key in self._inner.keys():
            yield key

    async def collect_garbage(self) -> int:
        return await self._inner.collect_garbage()

    async def aclose(self) -> None:
        await self._inner.aclose()
