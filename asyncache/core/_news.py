"""Telling of each page that comes and goes: residency, for whoever keeps account of it.

It costs a hash a page, and so is done only where somebody observes. What is told need
not be the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncache.core._effects import PagesCached, PagesDropped
from asyncache.core._node import Node
from asyncache.core._tree import Tree


class News:
    """What there is to tell of a tree's pages; nothing, unless somebody observes.

    Args:
        tree: Whose pages they are.
        pools: Names of the pools.
    """

    def __init__(self, tree: Tree, pools: Sequence[str]) -> None:
        self._tree = tree
        self._pools = pools
        self.is_told = False

    def cached(self, node: Node, pool: int) -> list[PagesCached]:
        """Return that all that a pool has of a node is everyone's now."""
        if not self.is_told:
            return []
        hashes, first = self._tree.hashes(node), node.start_of(pool) - node.start
        assert node.parent is not None
        parent = hashes[first - 1] if first else self._tree.last_hash(node.parent)
        return [PagesCached(self._pools[pool], tuple(hashes[first:]), parent)]

    def dropped(self, node: Node, pool: int, count: int) -> list[PagesDropped]:
        """Return that the first pages that a pool has of a node are nobody's now."""
        if not (self.is_told and count):
            return []
        first = node.start_of(pool) - node.start
        hashes = tuple(self._tree.hashes(node)[first : first + count])
        return [PagesDropped(self._pools[pool], hashes)]
