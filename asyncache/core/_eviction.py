"""Evictable leaves in the order of a policy.

Only unlocked leaves are ever evicted, so that what remains is always a set of whole
prefixes. Entries are lazy: a leaf is offered again whenever its key changes or it
becomes evictable, and an entry whose key is out of date is entered anew when its turn
comes, so that no leaf is ever lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from asyncache.core._policies import Key, Policy
from asyncache.core._tree import Node, Tree


def is_evictable(node: Node) -> bool:
    """Whether a node is a leaf of the tree that nothing needs."""
    return (
        node.attached
        and node.parent is not None
        and not node.children
        and not node.locks
        and not any(node.loads)
    )


def is_unsaved(node: Node) -> bool:
    """Whether a leaf is evictable, and would be lost."""
    return not node.stored and is_evictable(node)


class Leaves:
    """Leaves that a test accepts, in the order of a policy."""

    def __init__(
        self,
        tree: Tree,
        policy: Policy,
        accepts: Callable[[Node], bool] = is_evictable,
    ) -> None:
        self._tree = tree
        self._policy = policy
        self._accepts = accepts
        self._heap: list[tuple[Key, int, Node]] = []

    def offer(self, node: Node) -> None:
        """Note that a node may have become acceptable, or its key changed."""
        if self._accepts(node):
            heapq.heappush(self._heap, (self._policy(node), node.serial, node))
            if len(self._heap) > 64 + 4 * self._tree.num_nodes:
                self._rebuild()

    def pop(self) -> Node | None:
        """Take out the first leaf and return it; None if there is none."""
        while self._heap:
            key, serial, node = heapq.heappop(self._heap)
            if not self._accepts(node):
                continue
            now = self._policy(node)
            if now == key:
                return node
            heapq.heappush(self._heap, (now, serial, node))
        return None

    def _rebuild(self) -> None:
        self._heap = [
            (self._policy(node), node.serial, node)
            for node in self._tree.nodes()
            if self._accepts(node)
        ]
        heapq.heapify(self._heap)
