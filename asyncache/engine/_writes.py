"""When pages are offloaded."""

from __future__ import annotations

from dataclasses import dataclass

from asyncache.engine._tokens import check_count


@dataclass(frozen=True, slots=True)
class WriteThrough:
    """Offload pages as soon as they are shared.

    Args:
        threshold: Requests that must have used a page before it is offloaded.
    """

    threshold: int = 1

    def __post_init__(self) -> None:
        check_count("threshold", self.threshold, least=1)


@dataclass(frozen=True, slots=True)
class WriteBack:
    """Offload only what eviction might take soon, the coldest first.

    Pages stay resident and matchable while they are saved. Nothing waits for that:
    where room is needed sooner, saved pages go first, then unsaved ones, with an event.

    Args:
        low_water: Pages that are to be free, or saved and unused, at any time.
    """

    low_water: int

    def __post_init__(self) -> None:
        check_count("low_water", self.low_water, least=1)


@dataclass(frozen=True, slots=True)
class ReadOnly:
    """Never offload: the store is someone else's to fill."""


Writes = WriteThrough | WriteBack | ReadOnly
