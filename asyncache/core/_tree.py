"""The radix tree of resident prefixes: which pages hold which tokens.

A node covers a run of whole pages. Its state is per pool: ABSENT (no pages), LOADING
(a load fills them) or RESIDENT. What a pool has of a node are its *last* positions: all
of them in a full-attention pool, any number in a window pool, and in a state pool one,
the slot with the state after the node's last token. Rules that every method keeps:

* A node's full-attention pools are never ABSENT; below LOADING there is only LOADING.
* ``locks`` counts the pins on a node and below it, so a locked node's ancestors are
  locked and what is not locked can be evicted, leaf by leaf.
* A node is *clean* if it and all below it are unlocked and stored: then eviction can
  take it without a loss. ``unclean`` counts the unlocked children that are not clean,
  so that this is known at each change of a lock. ``stored`` changes under a lock only.
* The lower part of a split keeps the node's identity: pins, which anchor at the end of
  a node, and transactions, which own ranges of positions, do not notice.

Positions and boundaries are in pages from the root; keys are packed tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from asyncache.core._errors import broken, require
from asyncache.core._hashes import PageHash, hash_pages
from asyncache.core._layout import Coverage, KVLayout, WindowPool
from asyncache.core._node import Node
from asyncache.core._tokens import TOKEN_BYTES


class Window(NamedTuple):
    """How far the layers of a window pool look back."""

    pool: int
    pages: int
    """Whole pages that a boundary needs."""
    tokens: int


class Walk(NamedTuple):
    """How far the tree covers a key."""

    path: list[Node]
    """Nodes that share at least a page with the key, from the root down."""
    covered: int
    """Pages covered; may end inside the last node."""


class Tree:
    """All resident prefixes of one cache."""

    def __init__(self, layout: KVLayout) -> None:
        self.stride = TOKEN_BYTES * layout.page_tokens
        self.page_tokens = layout.page_tokens
        self.num_pools = len(layout.pools)
        self.full: list[int] = []
        self.windows: list[tuple[int, int]] = []
        """(pool, pages) of which a prefix needs the last: a state pool is one of 1."""
        self.trailing: list[Window] = []
        self.states: list[int] = []
        """Those of them that keep a slot at some boundaries, and no page a position."""
        self.paged: list[int] = []
        for index, pool in enumerate(layout.pools):
            if pool.coverage is Coverage.ALL_PAGES:
                self.full.append(index)
            else:
                self.windows.append((index, layout.window_pages(pool)))
            if isinstance(pool, WindowPool):
                pages = layout.window_pages(pool)
                self.trailing.append(Window(index, pages, pool.window_tokens))
            is_state = pool.coverage is Coverage.ENDPOINT
            (self.states if is_state else self.paged).append(index)
        self.backbone = self.full[0]
        self.roots: dict[PageHash, Node] = {}
        self.num_nodes = 0
        self.locked_pages = 0
        """RESIDENT pages of the backbone that some pin keeps."""
        self.clean_pages = 0
        """Those of nodes that are clean: no pin keeps them, and nothing is lost."""
        self.version = 0
        """Counts locks, unlocks, and nodes that come and go."""
        self._serial = 0

    # Looking up changes nothing.

    def walk(self, base: Node | None, key: bytes | bytearray) -> Walk:
        """Return the nodes below ``base`` that a key runs through. Changes nothing.

        The key begins at the root, and is taken to run through ``base``, which may be
        a root; None is a namespace that holds nothing.
        """
        path: list[Node] = []
        if base is None:
            return Walk(path, 0)
        node, position, stride = base, base.end * self.stride, self.stride
        num_bytes = len(key) - len(key) % stride
        while position < num_bytes:
            child = node.children.get(bytes(key[position : position + stride]))
            if child is None:
                break
            path.append(child)
            edge = child.edge
            if not key.startswith(edge, position):
                position += stride * self._common_pages(key, position, edge)
                break
            position += len(edge)
            node = child
        return Walk(path, position // stride)

    def _common_pages(self, key: bytes | bytearray, position: int, edge: bytes) -> int:
        """Return how many whole pages two runs share, by bisection over memcmp."""
        stride = self.stride
        low, high = 1, min(len(edge), len(key) - position) // stride
        while low < high:
            middle = (low + high + 1) // 2
            piece = edge[low * stride : middle * stride]
            if key.startswith(piece, position + low * stride):
                low = middle
            else:
                high = middle - 1
        return low

    def pages_on(self, node: Node, pool: int) -> array[int]:
        """Return the page ids from the root down to a node; -1 where ABSENT."""
        runs: list[array[int]] = []
        while node.parent is not None:
            run = node.pages[pool] or array("i")
            runs.append(run)
            runs.append(array("i", [-1]) * (node.end - node.start - len(run)))
            node = node.parent
        pages = array("i")
        for run in reversed(runs):
            pages += run
        return pages

    @staticmethod
    def above(node: Node, start: int = 0) -> Iterator[Node]:
        """Yield a node and its ancestors that reach beyond ``start``, deepest first."""
        while node.parent is not None and node.end > start:
            yield node
            node = node.parent

    @staticmethod
    def below(node: Node) -> Iterator[Node]:
        """Yield a node and all nodes below it, parents first."""
        stack = [node]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the roots, parents first."""
        for root in self.roots.values():
            for node in self.below(root):
                if node.parent is not None:
                    yield node

    def hashes(self, node: Node) -> list[PageHash]:
        """Return the hash of each page of a node, computed when first asked for."""
        missing = []
        while node.hashes is None:
            missing.append(node)
            assert node.parent is not None
            node = node.parent
        for late in reversed(missing):
            assert late.parent is not None
            parent = self.last_hash(late.parent)
            late.hashes = hash_pages(
                late.edge, page_tokens=self.page_tokens, parent=parent
            )
            node = late
        assert node.hashes is not None
        return node.hashes

    def last_hash(self, node: Node) -> PageHash:
        """Return the hash that the first page below a node has as its parent."""
        return self.hashes(node)[-1]

    # Changing the tree.

    def root(self, parent_hash: PageHash) -> Node:
        """Return the root of a namespace, made if need be."""
        root = self.roots.get(parent_hash)
        if root is None:
            root = Node(None, b"", 0, 0, self.num_pools)
            root.hashes = [parent_hash]
            root.stored = True
            self.roots[parent_hash] = root
        return root

    def end_at(self, base: Node, walk: Walk, position: int) -> Node:
        """Return the walk's node that ends at a position, splitting one if need be."""
        if position == base.end:
            return base
        for node in walk.path:
            if node.end >= position:
                break
        else:
            broken("a boundary lies on its walk", position, walk.covered)
        return node if node.end == position else self.split(node, position)

    def split(self, node: Node, position: int) -> Node:
        """Cut a node before a position; return the new upper part.

        The lower part stays the same object, so that what anchors at its end holds.
        """
        parent, count = node.parent, position - node.start
        assert parent is not None
        cut = count * self.stride
        upper = Node(parent, node.edge[:cut], node.start, position, self.num_pools)
        self._enroll(upper)
        for pool, run in enumerate(node.pages):
            # What is there are the last positions: often the lower part has them all.
            if run is not None and (above := position - node.start_of(pool)) > 0:
                upper.pages[pool], node.pages[pool] = run[:above], run[above:]
                upper.loads[pool] = node.loads[pool]
        if node.hashes is not None:
            upper.hashes, node.hashes = node.hashes[:count], node.hashes[count:]
        upper.used, upper.created = node.used, node.created
        upper.priority, upper.hits = node.priority, node.hits
        upper.locks, upper.written = node.locks, node.written
        upper.stored, upper.offload = node.stored, node.offload
        upper.attempts, upper.clean = node.attempts, node.clean
        upper.unclean = int(not (node.locks or node.clean))
        parent.children[node.edge[: self.stride]] = upper
        node.parent, node.edge, node.start = upper, node.edge[cut:], position
        upper.children[node.edge[: self.stride]] = node
        return upper

    def attach(self, parent: Node, edge: bytes) -> Node:
        """Put a new leaf below a node, with no pages yet."""
        start = parent.end
        node = Node(
            parent, edge, start, start + len(edge) // self.stride, self.num_pools
        )
        self._enroll(node)
        node.created = node.serial
        require(not parent.clean, "what a node is put below is pinned", parent)
        parent.unclean += 1
        key = edge[: self.stride]
        require(
            key not in parent.children, "a first page names one child", parent, node
        )
        parent.children[key] = node
        return node

    def detach(self, node: Node) -> None:
        """Take a node out of the tree, with all below it."""
        self.version += 1
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge[: self.stride]]
        if not node.locks:
            self._forget_idle(node)
            self._clean_upwards(parent)
        for gone in self.below(node):
            gone.attached = False
            self.num_nodes -= 1
        self._drop_if_empty(node.root)

    def _drop_if_empty(self, root: Node) -> None:
        """Forget a namespace that holds nothing, unless a reset was first."""
        name = self.last_hash(root)
        if not root.children and not root.locks and self.roots.get(name) is root:
            del self.roots[name]

    def clear(self) -> list[Node]:
        """Let every node leave the tree, and return them."""
        nodes = list(self.nodes())
        for node in nodes:
            node.attached = False
        self.roots.clear()
        self.num_nodes = self.clean_pages = 0
        return nodes

    def _become_idle(self, node: Node) -> None:
        num_pages = node.end - node.start
        if node.loads[self.backbone] is None:
            self.locked_pages -= num_pages
        if node.attached and node.parent is not None:
            node.clean = node.stored and not node.unclean
            self.clean_pages += num_pages * node.clean
            node.parent.unclean += not node.clean

    def _become_locked(self, node: Node) -> None:
        if node.loads[self.backbone] is None:
            self.locked_pages += node.end - node.start
        if node.attached and node.parent is not None:
            self._forget_idle(node)

    def _forget_idle(self, node: Node) -> None:
        """Take an unlocked node out of the account of what is clean."""
        assert node.parent is not None
        self.clean_pages -= (node.end - node.start) * node.clean
        node.parent.unclean -= not node.clean
        node.clean = False

    def _clean_upwards(self, node: Node) -> None:
        """Note what has become clean: all that was not so below it is gone."""
        while node.parent is not None and node.stored:
            if node.locks or node.clean or node.unclean:
                return
            node.clean = True
            self.clean_pages += node.end - node.start
            node.parent.unclean -= 1
            node = node.parent

    def _enroll(self, node: Node) -> None:
        self.version += 1
        self._serial += 1
        node.serial = self._serial
        self.num_nodes += 1

    # Pins.

    def lock(self, node: Node, *, below: Node | None = None) -> None:
        """Keep a node and its ancestors from eviction until :meth:`unlock`.

        With ``below``, an ancestor whose lock this one takes over: only what lies
        between them is not locked yet.
        """
        self.version += 1
        step: Node | None = node
        while step is not below and step is not None:
            if not step.locks:
                self._become_locked(step)
            step.locks += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock` of this node."""
        self.version += 1
        step: Node | None = node
        while step is not None:
            require(step.locks > 0, "an unlocked node was locked", step)
            step.locks -= 1
            if not step.locks:
                self._become_idle(step)
            step = step.parent
        self._drop_if_empty(node.root)
