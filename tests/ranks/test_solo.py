"""A group of one agrees with itself, at once."""

from __future__ import annotations

from array import array

from asyncache.ranks import SoloGroup


async def test_the_minimum_over_one_rank_is_what_it_voted():
    group = SoloGroup()
    assert (group.rank, group.num_ranks) == (0, 1)
    vector = array("i", [3, -1, 2**31 - 1])
    await group.all_min(vector)
    assert list(vector) == [3, -1, 2**31 - 1]
    await group.aclose()
    await group.aclose()
