"""Which leaf goes first: a policy is a sort key, and the heap keeps leaves by it.

Only unlocked leaves are ever evicted, so that what remains is always a set of whole
prefixes. Entries are lazy: a leaf is offered again whenever its key changes or it
becomes evictable, and an entry counts only while it says what is still true.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from asyncache.core._tree import Node, Tree

Policy = Callable[[Node], int]


def lru(node: Node) -> int:
    """Evict what was used least recently."""
    return node.used


def is_evictable(node: Node) -> bool:
    """Whether a node is a leaf of the tree that nothing needs."""
    return (
        node.attached
        and node.parent is not None
        and not node.children
        and not node.locks
        and not any(node.loads)
    )


class Leaves:
    """Evictable leaves in the order of a policy."""

    def __init__(self, tree: Tree, policy: Policy) -> None:
        self._tree = tree
        self._policy = policy
        self._heap: list[tuple[int, int, Node]] = []

    def offer(self, node: Node) -> None:
        """Note that a node may have become evictable, or its key changed."""
        if is_evictable(node):
            heapq.heappush(self._heap, (self._policy(node), node.serial, node))
            if len(self._heap) > 64 + 4 * self._tree.num_nodes:
                self._rebuild()

    def pop(self) -> Node | None:
        """Return the leaf that the caller is to evict; None if there is none."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if is_evictable(node) and self._policy(node) == key:
                return node
        return None

    def _rebuild(self) -> None:
        self._heap = [
            (self._policy(node), node.serial, node)
            for node in self._tree.nodes()
            if is_evictable(node)
        ]
        heapq.heapify(self._heap)
