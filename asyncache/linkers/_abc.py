"""The transport contract: how an engine reaches pages outside the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

from asyncache.core import LoadPlan, LookupPlan, OffloadPlan
from asyncache.devices import Fence


class Landed(Protocol):
    """Takes note of layers, in order; those that land together need one call."""

    def __call__(self, layer: int, fence: Fence | None = None, /) -> None:
        """Take note that a layer's slices, and those of all before, have landed.

        Args:
            layer: The last of those that landed.
            fence: Given where they have not yet: whoever waits for it finds them. The
                call without one follows.
        """


class Outcome(Enum):
    """What became of an offload."""

    STORED = auto()
    """Every page is in the store."""
    FAILED = auto()
    """Some page is not, for now; a later attempt may store it."""
    REJECTED = auto()
    """The store will not keep it: it is full, or its pages are too large for it."""
    PARENT_MISSING = auto()
    """The page before the first is not in the store: that one has to go first."""


class Linker(ABC):
    """Moves pages between a device and a store, for one rank.

    Each call is one transfer, run in a task of the engine. A call may be cancelled;
    like one that returns, it ends only when nothing touches the plan's pages any more.
    A page that is missing, late or corrupt is never an exception.
    """

    num_layers: int
    """Layers that :data:`Landed` counts: the most that any pool has."""

    @abstractmethod
    async def open(self) -> None:
        """Make ready.

        Raises:
            StoreError: If the store cannot be used at all.
        """

    @property
    def missing_bytes(self) -> int:
        """Bytes by which an open store is smaller than it was set up to be."""
        return 0

    @abstractmethod
    async def lookup(self, plan: LookupPlan) -> Sequence[Sequence[bool]]:
        """Return for each of ``plan.asks`` whether each of its pages is stored."""

    @abstractmethod
    async def load(self, plan: LoadPlan, landed: Landed) -> int:
        """Fill the plan's pages.

        Args:
            plan: Pages to fill; they are the transfer's until it ends. Where it
                ``is_prefetch``, loads that are waited for should come before it.
            landed: Called with layers in order, as soon as every page has them. Not
                called again once a page turned out bad.

        Returns:
            How many leading positions of the plan are good: all their pages hold the
            bytes that were stored, verified.
        """

    def hurry(self, seq: int) -> None:  # noqa: B027 - most have no other order
        """Take note that a load is no prefetch any more: somebody waits for it.

        Args:
            seq: The load's; it may have ended.
        """

    @abstractmethod
    async def offload(self, plan: OffloadPlan) -> Outcome:
        """Store the plan's pages; they are pinned and still until the call ends."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release what the linker holds. Closing twice is harmless."""
