"""A linker that remembers for whom it works, so that a mishap has a victim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import anyio

from asyncache.core import LoadPlan, LookupPlan, OffloadPlan
from asyncache.devices import Device
from asyncache.linkers import Landed, Outcome, StoreLinker
from asyncache.stores import Store
from asyncache.testing.simulation._device import no_time

_AT_WORK: ContextVar[int | None] = ContextVar("_AT_WORK", default=None)


def at_work() -> int | None:
    """Return for which transaction the present task moves pages, if it does."""
    return _AT_WORK.get()


class SimulatedLinker(StoreLinker):
    """A :class:`StoreLinker`; :func:`at_work` tells whose transfer is running.

    Args:
        linger_s: Returns how long a load takes to end once all has landed, in seconds.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        *,
        linger_s: Callable[[], float] = no_time,
        layer_groups: int = 1,
        batch_bytes: int = 4096,
        num_batches: int = 4,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        super().__init__(
            store,
            device,
            rank=rank,
            num_ranks=num_ranks,
            layer_groups=layer_groups,
            batch_bytes=batch_bytes,
            num_batches=num_batches,
        )
        self._linger_s = linger_s

    async def lookup(self, plan: LookupPlan) -> list[list[bool]]:
        with _working(plan.seq):
            return await super().lookup(plan)

    async def load(self, plan: LoadPlan, landed: Landed) -> int:
        with _working(plan.seq):
            num_good = await super().load(plan, landed)
            await anyio.sleep(self._linger_s())
            return num_good

    async def offload(self, plan: OffloadPlan) -> Outcome:
        with _working(plan.seq):
            return await super().offload(plan)


@contextmanager
def _working(seq: int) -> Iterator[None]:
    token = _AT_WORK.set(seq)
    try:
        yield
    finally:
        _AT_WORK.reset(token)
