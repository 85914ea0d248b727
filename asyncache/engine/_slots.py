"""The pools as a request sees them: tables of pages, and state slots."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from asyncache.core import Coverage, KVLayout, RequestState, SlotCopy
from asyncache.devices import Device


class Slots:
    """Names what a request holds by pool, and copies states where the core says."""

    def __init__(self, layout: KVLayout, device: Device) -> None:
        self._device = device
        self._names = [pool.name for pool in layout.pools]
        is_state = [pool.coverage is Coverage.ENDPOINT for pool in layout.pools]
        self._paged = [at for at, is_one in enumerate(is_state) if not is_one]
        self._states = [at for at, is_one in enumerate(is_state) if is_one]
        # States are few, and of no size a page.
        self.page_bytes = sum(
            layout.space(layout.pools[at]).page_bytes for at in self._paged
        )

    def tables(self, request: RequestState) -> Mapping[str, array[int]]:
        """Return a request's page tables."""
        tables = {self._names[at]: request.tables[at] for at in self._paged}
        return MappingProxyType(tables)

    def own(self, request: RequestState) -> Mapping[str, int]:
        """Return a request's own state slots; none before its reservation."""
        own = zip(self._states, request.slots.own, strict=False)
        return MappingProxyType({self._names[at]: slot for at, slot in own})

    def are_into(self, request: RequestState, copies: Sequence[SlotCopy]) -> bool:
        """Whether one of these copies is into a slot of a request's own."""
        own = set(zip(self._states, request.slots.own, strict=False))
        return any((pool, target) in own for pool, _, target in copies)

    def copy(self, copies: Sequence[SlotCopy], stream: int | None) -> None:
        """Copy states between slots, in the order of a forward's stream.

        Raises:
            DeviceError: If a copy could not be begun.
        """
        for pool, source, target in copies:
            name = self._names[pool]
            self._device.copy_pages(name, [source], [target], stream=stream)
