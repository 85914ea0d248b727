"""Telling of each page that comes and goes: residency, for whoever keeps account of it.

It costs a hash a page, and so is done only where somebody observes. What is told need
not be the same on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncache.core._effects import PagesCached, PagesDropped
from asyncache.core._node import Node

if TYPE_CHECKING:
    from asyncache.core._state import State


def tell_cached(state: State, node: Node, pool: int) -> None:
    """Tell that all that a pool has of a node is everyone's now."""
    if state.tells_pages:
        hashes, first = state.tree.hashes(node), node.start_of(pool) - node.start
        assert node.parent is not None
        parent = hashes[first - 1] if first else state.tree.last_hash(node.parent)
        name = state.layout.pools[pool].name
        state.effects.append(PagesCached(name, tuple(hashes[first:]), parent))


def tell_dropped(state: State, node: Node, pool: int, count: int) -> None:
    """Tell that the first pages that a pool has of a node are nobody's any more."""
    if state.tells_pages and count:
        first = node.start_of(pool) - node.start
        hashes = tuple(state.tree.hashes(node)[first : first + count])
        state.effects.append(PagesDropped(state.layout.pools[pool].name, hashes))
