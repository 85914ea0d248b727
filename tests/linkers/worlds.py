"""What a linker may link a device to, for tests of what holds for every linker."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from asyncache import MooncakeLinker
from asyncache.core import PageKey
from asyncache.devices import Device
from asyncache.linkers import Linker, StoreLinker
from asyncache.stores import MemoryStore
from tests.linkers.mooncake_server import Master


class KeptStore(MemoryStore):
    """Keeps its pages when it is closed."""

    async def aclose(self) -> None:
        return


class StoreWorld:
    """Pages are in a store.

    Args:
        options: For each linker.
    """

    def __init__(self, **options: Any) -> None:
        self.store = KeptStore(2**20)
        self._options = options

    def link(self, device: Device, **options: Any) -> Linker:
        return StoreLinker(self.store, device, **self._options, **options)

    async def lose(self, keys: Sequence[PageKey]) -> None:
        await self.store.remove(keys)

    async def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        return await self.store.contains(keys)


class MooncakeWorld:
    """Pages are in a Mooncake Store, under names that nobody else uses.

    Args:
        client: Stays open.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self.prefix = uuid.uuid4().hex

    def link(self, device: Device, **options: Any) -> MooncakeLinker:
        return MooncakeLinker(self.client, device, prefix=self.prefix, **options)

    async def lose(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            assert self.client.remove(self.name(key), True) == 0

    async def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        return [self.client.is_exist(self.name(key)) == 1 for key in keys]

    def name(self, key: PageKey) -> str:
        return f"{self.prefix}:sealed-1:{key.name}"


class WatchedClient:
    """A client of Mooncake whose calls a test counts, holds and spoils.

    Args:
        inner: Does the work.

    Attributes:
        calls: Name and arguments of each call.
        held: Names of the calls that wait at the gate, on their thread.
        arrived: Set when one of them does.
        codes: What calls return instead of what they found, by name.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.held: set[str] = set()
        self.arrived, self.gate = threading.Event(), threading.Event()
        self.codes: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            if name in self.held:
                self.arrived.set()
                assert self.gate.wait(60)
            found = getattr(self._inner, name)(*arguments)
            return self.codes.get(name, found)

        return call

    def num_calls(self, name: str) -> int:
        return sum(name == called for called, _ in self.calls)


def own_linker(master: Master, device: Device, **options: Any) -> MooncakeLinker:
    """Return a linker with a client of its own, whose lookups end soon."""
    return MooncakeLinker(
        master.setup, device, prefix=uuid.uuid4().hex, lookup_s=0.3, **options
    )
