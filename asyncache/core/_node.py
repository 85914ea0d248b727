"""A node of the tree: a run of whole pages that share their prefix, and its state.

The state is per pool: ABSENT (no pages), LOADING (a load fills them) or RESIDENT. A
pool's pages are those of the node's last positions. What
a node is on its way to the store, and what policies sort by, is here too, so that the
rules beside this module find it in one place.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from asyncache.core._hashes import PageHash

if TYPE_CHECKING:
    from asyncache.core._agenda import Load, Offload, Ready


class Node:
    """A run of whole pages below its parent."""

    __slots__ = (
        "attached",
        "attempts",
        "behind",
        "children",
        "clean",
        "created",
        "edge",
        "end",
        "hashes",
        "hits",
        "loads",
        "locks",
        "offload",
        "pages",
        "parent",
        "priority",
        "root",
        "serial",
        "start",
        "stored",
        "unclean",
        "used",
        "written",
    )

    def __init__(
        self, parent: Node | None, edge: bytes, start: int, end: int, num_pools: int
    ) -> None:
        self.parent = parent
        self.root: Node = self if parent is None else parent.root
        self.edge = edge
        self.start = start
        self.end = end
        self.children: dict[bytes, Node] = {}
        self.attached = True
        self.pages: list[array[int] | None] = [None] * num_pools
        self.loads: list[Load | None] = [None] * num_pools
        self.hashes: list[PageHash] | None = None
        self.serial = 0
        # What policies sort by.
        self.created = 0
        self.used = 0
        self.hits = 0
        self.priority = 0
        self.locks = 0
        # Offload: where the node stands on its way to the store.
        self.stored = False
        self.offload: Ready | Offload | None = None
        self.attempts = 0
        # Write-back: whether all from here down is stored and unlocked, and how many
        # unlocked children are not so. A leaf may be set aside behind another node.
        self.clean = False
        self.unclean = 0
        self.behind: Node | None = None
        # Number of the newest forward that may still write the node's pages.
        self.written = 0

    def start_of(self, pool: int) -> int:
        """Return the position of the first page that a pool has of this node.

        That is ``end`` where it has none.
        """
        run = self.pages[pool]
        return self.end if run is None else self.end - len(run)

    def __repr__(self) -> str:
        state = "".join(
            "A" if run is None else "L" if load else "R"
            for run, load in zip(self.pages, self.loads, strict=True)
        )
        return f"<Node {self.serial} [{self.start},{self.end}) {state} x{self.locks}>"
