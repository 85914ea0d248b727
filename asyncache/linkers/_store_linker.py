"""A store and a device, linked: pages go straight from one to the other.

Where the host can address the device's memory, the store reads into it and writes from
it in place. Elsewhere pages pass through bounded staging buffers: while one is copied
to the device, the store reads into the next.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from asyncache.core import LoadPlan, LookupPlan, OffloadPlan
from asyncache.devices import Device
from asyncache.linkers._abc import Landed, Linker, Outcome
from asyncache.linkers._batches import Batch, Batches
from asyncache.linkers._flight import Flight
from asyncache.linkers._staging import Staging
from asyncache.linkers._turns import Ticket, Turn, Turns, Urgency
from asyncache.stores import Status, Store


class StoreLinker(Linker):
    """Links a store and a device.

    Args:
        store: Where pages are kept; the linker opens and closes it.
        device: Where pages are used; it stays the caller's.
        rank: Which shard of each page this rank holds. Pools that are replicated have
            none: rank 0 writes them, to a store that every rank can read.
        num_ranks: Shards of a page.
        layer_groups: Parts that a load is cut into, layer by layer, so that a forward
            may begin with the first layers while the others are on their way. Each
            part costs a read a page.
        batch_bytes: Bytes that one call to the store moves, at least a page.
        num_batches: How many of those may be on their way at once, of all transfers.
            Where there are two or more, one is left to loads. The device may need a
            staging buffer for each.
        load_bytes_per_s: How fast loads may go that somebody waits for; with no bound
            when None, like the others.
        prefetch_bytes_per_s: How fast prefetches may go.
        offload_bytes_per_s: How fast offloads may go.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        layer_groups: int = 1,
        batch_bytes: int = 32 * 2**20,
        num_batches: int = 4,
        load_bytes_per_s: float | None = None,
        prefetch_bytes_per_s: float | None = None,
        offload_bytes_per_s: float | None = None,
    ) -> None:
        self._batches = Batches(
            device.layout, rank=rank, num_ranks=num_ranks, batch_bytes=batch_bytes
        )
        self.num_layers = self._batches.num_layers
        if not 1 <= layer_groups <= self.num_layers:
            raise ValueError(
                f"layer_groups must be in [1, {self.num_layers}], not {layer_groups}"
            )
        if num_batches < 1:
            raise ValueError(f"num_batches must be at least 1, not {num_batches}")
        self._store = store
        self._device = device
        self._batch_bytes = batch_bytes
        self._layer_groups = layer_groups
        self._staging = Staging(device, num_batches, batch_bytes)
        rates = {
            Urgency.LOAD: load_bytes_per_s,
            Urgency.PREFETCH: prefetch_bytes_per_s,
            Urgency.OFFLOAD: offload_bytes_per_s,
        }
        self._turns = Turns(
            num_batches * batch_bytes,
            spared=batch_bytes if num_batches > 1 else 0,
            bytes_per_s=_checked(rates),
        )
        self._tickets: dict[int, Ticket] = {}
        """Of the loads that run, by their numbers."""

    async def open(self) -> None:
        if not self._device.host_addressable:
            await self._staging.open()
        await self._store.open()

    @property
    def missing_bytes(self) -> int:
        return self._store.missing_bytes

    async def lookup(self, plan: LookupPlan) -> list[list[bool]]:
        keys = self._batches.asked(plan)
        return self._batches.answers(plan, await self._store.contains(keys))

    async def load(self, plan: LoadPlan, landed: Landed) -> int:
        ticket = Ticket(Urgency.PREFETCH if plan.is_prefetch else Urgency.LOAD)
        self._tickets[plan.seq] = ticket
        try:
            return await self._load(plan, landed, ticket)
        finally:
            self._tickets.pop(plan.seq, None)

    def hurry(self, seq: int) -> None:
        if (ticket := self._tickets.get(seq)) is not None:
            self._turns.hurry(ticket)

    async def _load(self, plan: LoadPlan, landed: Landed, ticket: Ticket) -> int:
        batches = self._batches.to_read(plan)
        good = plan.end
        async with Flight(landed) as flight:
            for layers in self._layer_runs():
                for batch in batches:
                    if batch.start < good:
                        num_good = await self._read(batch, layers, flight, ticket)
                        if num_good < len(batch.pages):
                            good = min(good, batch.start + num_good)
                if good == plan.end:
                    flight.complete(layers[-1])
            await flight.arrive()
        return good - plan.start

    async def offload(self, plan: OffloadPlan) -> Outcome:
        parent = self._batches.parent(plan)
        if parent is not None and not any(await self._store.contains([parent])):
            return Outcome.PARENT_MISSING
        ticket = Ticket(Urgency.OFFLOAD)
        for batch in self._batches.to_write(plan):
            turn = await self._turns.begin(ticket, self._cost(batch))
            try:
                statuses = await self._write(batch)
            finally:
                turn.end()
            if Status.REJECTED in statuses:
                return Outcome.REJECTED
            if list(statuses) != [Status.HIT] * len(batch.pages):
                return Outcome.FAILED
        return Outcome.STORED

    async def aclose(self) -> None:
        try:
            await self._store.aclose()
        finally:
            await self._staging.aclose()

    def _layer_runs(self) -> list[range]:
        count, groups = self.num_layers, self._layer_groups
        edges = [count * group // groups for group in range(groups + 1)]
        return [range(*run) for run in itertools.pairwise(edges)]

    def _cost(self, batch: Batch) -> int:
        """Return the bytes that are taken while a batch is on its way."""
        if not self._device.host_addressable:
            return self._batch_bytes  # a buffer, however much of it is used
        return len(batch.pages) * batch.space.page_bytes

    async def _read(
        self, batch: Batch, layers: range, flight: Flight, ticket: Ticket
    ) -> int:
        """Fill a batch, or begin to; return how many of its leading pages are good."""
        own = range(layers.start, min(layers.stop, batch.space.num_layers))
        if not own:
            return len(batch.pages)
        which = None if len(own) == batch.space.num_layers else own
        turn = await self._turns.begin(ticket, self._cost(batch))
        if not self._device.host_addressable:
            return await self._read_staged(batch, own, which, flight, turn)
        try:
            views = self._device.page_views(batch.pool, batch.pages, which)
            statuses = await self._store.get_into(batch.keys, views, which)
        finally:
            turn.end()
        return _num_good(batch, statuses)

    async def _read_staged(
        self,
        batch: Batch,
        own: range,
        which: range | None,
        flight: Flight,
        turn: Turn,
    ) -> int:
        size = len(own) * batch.space.layer_bytes
        buffer = self._staging.take()

        def give() -> None:
            self._staging.give(buffer)
            turn.end()

        copy = None
        try:
            views = _cut_buffer(buffer, len(batch.pages), size)
            statuses = await self._store.get_into(batch.keys, views, which)
            count = _num_good(batch, statuses)
            if count:
                pages, source = batch.pages[:count], buffer[: count * size]
                copy = self._device.start_write(batch.pool, pages, source, which)
        finally:
            if copy is None:
                give()
        if copy is not None:
            flight.add(copy, give)
        return count

    async def _write(self, batch: Batch) -> list[Status]:
        device, pages = self._device, batch.pages
        if device.host_addressable:
            views = device.page_views(batch.pool, pages)
            return await self._store.put(batch.keys, views)
        size = batch.space.page_bytes
        buffer = self._staging.take()
        try:
            await device.read_pages(batch.pool, pages, buffer[: len(pages) * size])
            views = _cut_buffer(buffer, len(pages), size)
            return await self._store.put(batch.keys, views)
        finally:
            self._staging.give(buffer)


def _checked(rates: Mapping[Urgency, float | None]) -> dict[Urgency, float]:
    found = {}
    for urgency, rate in rates.items():
        if rate is not None:
            if not 0 < rate < math.inf:
                name = f"{urgency.name.lower()}_bytes_per_s"
                raise ValueError(f"{name} must be positive and finite, not {rate}")
            found[urgency] = rate
    return found


def _num_good(batch: Batch, statuses: Sequence[Status]) -> int:
    for index, (_, status) in enumerate(zip(batch.pages, statuses, strict=False)):
        if status is not Status.HIT:
            return index
    return min(len(batch.pages), len(statuses))


def _cut_buffer(buffer: memoryview, count: int, size: int) -> list[list[memoryview]]:
    return [[buffer[page * size : (page + 1) * size]] for page in range(count)]
