"""The contract of a group: ranks that reduce one vector a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array


class Group(ABC):
    """The ranks of one model replica.

    Every rank makes the same calls in the same order, with vectors of the same length;
    its k-th call is its part in round k, whatever became of its earlier calls.
    """

    rank: int
    """Which rank this is, in [0, num_ranks)."""
    num_ranks: int

    @abstractmethod
    async def all_min(self, vector: array[int]) -> None:
        """Replace each item of ``vector``, int32, by its minimum over all ranks.

        The vector stays the caller's: it is copied before the call first waits, and
        written once, in the turn in which the call returns. A call that is cancelled
        leaves it as it was, and its part counts: the others go on, the minimum of that
        round is lost to this rank.

        Raises:
            RankError: If a rank is gone, silent, or sent another length. The group is
                over then: each later call raises RankError at once. Close it.
            ClosedError: If this rank has left.
            OrderError: If this rank is still in another call, which goes on.
            ValueError: If the items are not int32.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Leave the group; a call that waits ends with ClosedError.

        Each round in which all ranks took part still has its minimum for the others;
        their later calls raise RankError. Closing twice is harmless.
        """
