"""Rounds of a group that tests play."""

from __future__ import annotations

import asyncio
from array import array


async def minimum(group, *items):
    """Return the minimum of a call with these items."""
    vector = array("i", items)
    await group.all_min(vector)
    return vector.tolist()


async def play(groups, *vectors):
    """Let each group make a call; return what came of each."""
    calls = [
        minimum(group, *items) for group, items in zip(groups, vectors, strict=True)
    ]
    return await asyncio.gather(*calls, return_exceptions=True)
