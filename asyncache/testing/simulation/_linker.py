"""A linker that remembers for whom it works, so that a mishap has a victim."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from asyncache.core import LoadPlan, LookupPlan, OffloadPlan
from asyncache.linkers import Landed, Outcome, StoreLinker

_AT_WORK: ContextVar[int | None] = ContextVar("_AT_WORK", default=None)


def at_work() -> int | None:
    """Return for which transaction the present task moves pages, if it does."""
    return _AT_WORK.get()


class SimulatedLinker(StoreLinker):
    """A :class:`StoreLinker`; :func:`at_work` tells whose transfer is running."""

    async def lookup(self, plan: LookupPlan) -> list[list[bool]]:
        with _working(plan.seq):
            return await super().lookup(plan)

    async def load(self, plan: LoadPlan, landed: Landed) -> int:
        with _working(plan.seq):
            return await super().load(plan, landed)

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
