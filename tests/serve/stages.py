"""Where a request can be when its client hangs up, and what holds it there."""

from __future__ import annotations

from dataclasses import dataclass

from asyncache.testing import GateStore
from tests.serve.scene import PROMPT, Room, StubbornStore, until

FRESH = PROMPT.swapcase()
"""A prompt that is not stored: three steps of prefill, then one a token."""
NUM_PREFILLS = 3


@dataclass(frozen=True)
class Stage:
    """One place in a request's life.

    ``counted_as`` is the state that the metrics call it.
    """

    counted_as: str
    prompt: str = PROMPT
    gates: type[GateStore] = GateStore
    still_written: bool = False
    """Whether something goes on writing the request's pages."""

    def arrange(self, here: Room) -> None:
        """Close what will hold the request."""

    async def reached(self, here: Room) -> None:
        """Wait until it is held."""

    def let_go(self, here: Room) -> None:
        """Open it again."""


class Lookup(Stage):
    def arrange(self, here):
        here.store.contains_gate.close()

    async def reached(self, here):
        await here.store.contains_gate.wait_arrived()

    def let_go(self, here):
        here.store.contains_gate.open()


class Load(Stage):
    def arrange(self, here):
        here.store.get_gate.close()

    async def reached(self, here):
        await here.store.get_gate.wait_arrived()
        assert here.pool.transit > 0

    def let_go(self, here):
        here.store.get_gate.open()


@dataclass(frozen=True)
class Forward(Stage):
    nth: int = 1

    def arrange(self, here):
        here.model.hold_at(self.nth)

    async def reached(self, here):
        await here.model.held.wait()
        assert here.pool.request > 0

    def let_go(self, here):
        here.model.let_go()


@dataclass(frozen=True)
class Offload(Forward):
    """Its prompt is on its way to the store while it decodes."""

    def arrange(self, here):
        super().arrange(here)
        here.store.put_gate.close()

    async def reached(self, here):
        await super().reached(here)
        await here.store.put_gate.wait_arrived()
        await until(lambda: here.cache.statistics().transfers > 0)

    def let_go(self, here):
        super().let_go(here)
        here.store.put_gate.open()


STAGES = {
    "lookup": Lookup("lookup"),
    "load": Load("loading"),
    "load that cannot be stopped": Load(
        "loading", gates=StubbornStore, still_written=True
    ),
    "first prefill": Forward("computing", FRESH, still_written=True, nth=1),
    "second prefill": Forward("computing", FRESH, still_written=True, nth=2),
    "prefill over a hit": Forward("computing", still_written=True, nth=1),
    "decode": Forward("computing", FRESH, still_written=True, nth=NUM_PREFILLS + 5),
    "offload": Offload("computing", FRESH, still_written=True, nth=NUM_PREFILLS + 2),
}
