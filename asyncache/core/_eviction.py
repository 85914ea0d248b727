"""Evictable leaves in the order of a policy.

Only unlocked leaves are ever evicted, so that what remains is always a set of whole
prefixes. Entries are lazy: a leaf is offered again whenever its key changes or it
becomes evictable, and an entry whose key is out of date is entered anew when its turn
comes, so that no leaf is ever lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from asyncache.core._node import Node
from asyncache.core._policies import Key, Policy
from asyncache.core._tree import Tree


def is_evictable(node: Node) -> bool:
    """Whether a node is a leaf of the tree that nothing needs."""
    return (
        node.attached
        and node.parent is not None
        and not node.children
        and not node.locks
        and not any(node.loads)
    )


def _is_unsaved(node: Node) -> bool:
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

    def clear(self) -> None:
        """Forget all leaves: none is left in the tree."""
        self._heap.clear()

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

    def known(self) -> set[Node]:
        """Return every node that it would look at."""
        return {node for _, _, node in self._heap}

    def _rebuild(self) -> None:
        self._heap = [
            (self._policy(node), node.serial, node)
            for node in self._tree.nodes()
            if self._accepts(node)
        ]
        heapq.heapify(self._heap)


class Unsaved:
    """Leaves that eviction would lose, coldest first.

    One that cannot be saved for now is set aside behind the node that must be saved
    before it, and costs nothing until that one has changed or it is used again.
    """

    def __init__(self, tree: Tree, policy: Policy) -> None:
        self._leaves = Leaves(tree, policy, _is_unsaved)
        self.aside: dict[Node, dict[Node, None]] = {}
        """Leaves that wait, by the node that they wait for."""

    def offer(self, node: Node) -> None:
        """Note that a node may have become an unsaved leaf, or its key changed."""
        self.forget(node)
        self._leaves.offer(node)

    def pop(self) -> Node | None:
        """Take out the coldest leaf and return it; None if none can be saved."""
        return self._leaves.pop()

    def set_aside(self, leaf: Node, behind: Node) -> None:
        """Look at a leaf no more until another node is recalled."""
        self.forget(leaf)
        leaf.behind = behind
        self.aside.setdefault(behind, {})[leaf] = None

    def recall(self, behind: Node) -> None:
        """Offer what was set aside behind a node again."""
        for leaf in list(self.aside.get(behind, ())):
            self.offer(leaf)

    def known(self) -> set[Node]:
        """Return every node that it would look at, or has set aside."""
        return self._leaves.known().union(*self.aside.values())

    def forget(self, leaf: Node) -> None:
        """Take a leaf from where it was set aside, if it was."""
        if leaf.behind is not None:
            leaves = self.aside[leaf.behind]
            del leaves[leaf]
            if not leaves:
                del self.aside[leaf.behind]
            leaf.behind = None

    def clear(self) -> None:
        """Forget all leaves: none is left in the tree."""
        self._leaves.clear()
        self.aside.clear()
