"""The contract of a group: ranks that reduce one vector a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array


class Group(ABC):
    """The ranks of one model replica.

    Every rank makes the same calls in the same order, with vectors of the same length.
    """

    rank: int
    """Which rank this is, in [0, num_ranks)."""
    num_ranks: int

    @abstractmethod
    async def all_min(self, vector: array[int]) -> None:
        """Replace each item of ``vector``, int32, by its minimum over all ranks.

        Raises:
            RankError: If a rank is gone, silent, or sent another length; the group is
                over then.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Leave the group. Closing twice is harmless."""
