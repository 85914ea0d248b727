"""A group of one: what it votes is the verdict."""

from __future__ import annotations

from array import array

from asyncache.ranks._abc import Group


class SoloGroup(Group):
    """The only rank. Its minimum is the identity, so nothing is ever waited for."""

    rank = 0
    num_ranks = 1

    async def all_min(self, vector: array[int]) -> None:
        """Leave the vector as it is."""

    async def aclose(self) -> None:
        """Do nothing."""
