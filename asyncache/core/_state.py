"""The replicated state of one cache, and the few ways in which everything changes it.

The modules beside this one are the rules: each takes the state and changes it for one
kind of transaction. Nothing here awaits, reads a clock or draws a random number.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields

from asyncache.core._agenda import Agenda, Bracket, Offload, Ready, Request
from asyncache.core._effects import (
    Effect,
    Fact,
    FactKind,
)
from asyncache.core._errors import broken, require
from asyncache.core._eviction import Leaves, Unsaved
from asyncache.core._hashes import root_hash
from asyncache.core._layout import Coverage, KVLayout, check_at_least
from asyncache.core._ledger import Ledger, PageState
from asyncache.core._news import News
from asyncache.core._node import Node
from asyncache.core._policies import Policy, lru, saved_first
from asyncache.core._tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much may be open at once; the same on every rank.

    Args:
        requests: Requests open at once.
        slots: Loads, readies and offloads that ranks vote on at once.
        offloads: Readies and offloads open at once; fewer than ``slots``, so that a
            load always finds a place in the end.
        offload_attempts: Failures after which a node is not offered again until a
            commit walks it.
        mask_ints: Ints of the ballot that lookups share, where a layout has windows or
            states; at least one for each request.
        write_threshold: Uses of a node before it is offloaded; 0 for never.
        low_water: 0 to offload nodes as they are shared. Else only the coldest that
            are unused, and only while fewer pages than this are free or could be
            evicted without being lost.
        launches: Whether a load starts only with the next call to ``launch``.
        aborts_by_call: Whether requests end by calls alone: then ranks need not agree
            on anything for as long as nothing but requests is open.
    """

    requests: int = 256
    slots: int = 64
    offloads: int = 8
    offload_attempts: int = 3
    mask_ints: int = 4096
    write_threshold: int = 1
    low_water: int = 0
    launches: bool = False
    aborts_by_call: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type != "bool":
                least = int(field.name not in {"write_threshold", "low_water"})
                check_at_least(least, field.name, getattr(self, field.name))
        if self.offloads >= self.slots:
            raise ValueError(
                f"offloads must be fewer than the {self.slots} slots, not"
                f" {self.offloads}: a load must find a place in the end"
            )


def _check_num_pages(layout: KVLayout, num_pages: Mapping[str, int]) -> None:
    names = [pool.name for pool in layout.pools]
    if sorted(num_pages) != sorted(names):
        raise ValueError(f"num_pages must name the pools {names}, not {[*num_pages]}")
    for pool in layout.pools:
        # A state pool has a request's own slot beside the one that it continues from.
        least = 2 if pool.coverage is Coverage.ENDPOINT else 1
        check_at_least(least, f"num_pages of {pool.name}", num_pages[pool.name])


def _check_mask(layout: KVLayout, bounds: Bounds) -> None:
    has_windows = any(pool.coverage is not Coverage.ALL_PAGES for pool in layout.pools)
    if has_windows and bounds.mask_ints < bounds.requests:
        raise ValueError(
            f"mask_ints must be at least the {bounds.requests} requests of a layout"
            f" with windows or states, not {bounds.mask_ints}"
        )


class State:
    """Tree, ledgers, agenda and brackets of one replica."""

    def __init__(
        self,
        layout: KVLayout,
        num_pages: Mapping[str, int],
        bounds: Bounds,
        policy: Policy = lru,
    ) -> None:
        self.layout = layout
        self.bounds = bounds
        self.tree = Tree(layout)
        self.news = News(self.tree, [pool.name for pool in layout.pools])
        policy = saved_first(policy) if bounds.low_water else policy
        self.leaves = Leaves(self.tree, policy)
        # Leaves that eviction would lose, coldest first; kept with a low water.
        self.unsaved = Unsaved(self.tree, policy)
        _check_num_pages(layout, num_pages)
        _check_mask(layout, bounds)
        self.ledgers = [Ledger(num_pages[pool.name]) for pool in layout.pools]
        self.agenda = Agenda(bounds.requests, bounds.slots)
        self.store_attached = False
        # Counts resets.
        self.generation = 0
        # Counts opens, commits and verdicts: the recency of nodes.
        self.clock = 0
        # Sum of what open requests were promised and have not taken, in pages.
        self.promised = 0
        # Sum of the slots of each state pool that are kept for what lookups may load.
        self.promised_slots = 0
        # How many owners have pinned the prefix that ends with a node.
        self.pins: dict[Node, int] = {}
        # Where the positions begin that an offload of an anchor still reads.
        self.reading: dict[Node, int] = {}
        # Requests that wait for a reservation, by sequence number.
        self.waiting: dict[int, Request] = {}
        # What there was when the first of them was refused: it need not be asked again.
        self.refused: tuple[int, ...] | None = None
        # Requests with a commit that could not be published yet.
        self.parked: dict[int, Request] = {}
        # Requests that end once no commit of theirs waits for their own loads.
        self.closing: dict[int, Request] = {}
        # Nodes to be offloaded, oldest first.
        self.dirty: dict[Node, None] = {}
        # Open readies and offloads, by sequence number.
        self.offloading: dict[int, Ready | Offload] = {}
        self.num_brackets = 0
        # Brackets up to this number are finished on every rank.
        self.num_finished = 0
        self.brackets: dict[int, Bracket] = {}
        self.effects: list[Effect] = []
        self.digest = 1

    def renew(self, request: Request) -> None:
        """Let a request that holds nothing begin in the present generation."""
        request.generation = self.generation
        request.root_hash = root_hash(self.layout, request.namespace)

    # The digest: what every rank must have seen, in order.

    def fold(self, name: bytes, *numbers: int) -> None:
        """Fold a call or a verdict into the digest."""
        data = name + struct.pack(f"<{len(numbers)}q", *numbers)
        self.digest = zlib.crc32(data, self.digest)

    def fold_counts(self) -> None:
        """Fold where pages and transactions are after a call or a verdict."""
        num_nodes, num_open = self.tree.num_nodes, len(self.agenda.open)
        promised = self.promised, self.promised_slots
        facts = array("q", (self.clock, *promised, num_nodes, num_open))
        for ledger in self.ledgers:
            facts.extend(ledger.counts)
        self.digest = zlib.crc32(facts, self.digest)

    # Pages.

    def guarded(self, pool: int) -> set[int]:
        """Return the pages of a window or state pool that a pin or a forward needs.

        Of each node, they are the last of those that it has.
        """
        window = dict(self.tree.windows)[pool]
        spans = [
            (anchor, min(anchor.end - window, self.reading.get(anchor, anchor.end)))
            for anchor in self.pins
        ]
        for bracket in self.brackets.values():
            spans += [(n, at) for n, at, pools in bracket.writes if pool in pools]
        held: set[int] = set()
        for anchor, start in spans:
            for node in self.tree.above(anchor, max(0, start)):
                run = node.pages[pool]
                if run is not None and node.loads[pool] is None:
                    held.update(run[max(0, start - node.start_of(pool)) :])
        return held

    def evictable(self, pool: int) -> int:
        """Return how many pages of a pool eviction could free."""
        resident = self.ledgers[pool].count(PageState.TREE)
        if pool in self.tree.full:
            return resident - self.tree.locked_pages
        return resident - len(self.guarded(pool))

    @property
    def num_offloading(self) -> int:
        """Readies and offloads that are open."""
        return len(self.offloading)

    def slack(self, pool: int) -> int:
        """Return how many pages could be had without breaking a promise."""
        is_state = pool in self.tree.states
        promised = self.promised_slots if is_state else self.promised
        return self.ledgers[pool].num_free + self.evictable(pool) - promised

    def take(self, pool: int, num_pages: int, state: PageState) -> array[int]:
        """Take pages, evicting for them; the caller made sure that they are there."""
        ledger = self.ledgers[pool]
        while ledger.num_free < num_pages:
            if pool in self.tree.full:
                self._evict_leaf(num_pages - ledger.num_free)
            else:
                self._evict_window(pool, num_pages - ledger.num_free)
        return ledger.take(num_pages, state)

    def _evict_leaf(self, num_pages: int) -> None:
        """Drop the coldest leaf, or only so many pages of its tail."""
        node = self.leaves.pop()
        if node is None:
            broken("eviction finds what was promised", self.promised)
        if node.end - node.start > num_pages:
            self.tree.split(node, node.end - num_pages)
        parent = node.parent
        assert parent is not None
        self._forget_ready(node)
        self.tree.detach(node)
        for pool, run in enumerate(node.pages):
            if run is not None:
                self.effects += self.news.dropped(node, pool, len(run))
                self.ledgers[pool].give(run, PageState.TREE)
        self._forget_queued(node)
        self.unsaved.forget(node)
        self.offer(parent)
        saved = node.stored or not self.store_attached
        kind = FactKind.EVICTED if saved else FactKind.EVICTED_UNSAVED
        self.effects.append(Fact(kind, node.end - node.start))

    @staticmethod
    def _forget_ready(node: Node) -> None:
        """Shrink a ready whose lowest node goes."""
        ready, parent = node.offload, node.parent
        if ready is not None:
            assert isinstance(ready, Ready)
            assert parent is not None
            ready.anchor = parent if parent.offload is ready else None

    def _forget_queued(self, node: Node) -> None:
        """Queue what is left above a queued node: a split made it two, or it waited."""
        parent = node.parent
        assert parent is not None
        if node in self.dirty:
            del self.dirty[node]
            is_root = parent.parent is None
            if not (is_root or parent.stored) and parent.offload is None:
                self.dirty[parent] = None

    def _evict_window(self, pool: int, num_pages: int) -> None:
        """Drop a node's pages of a window pool, or only so many, the first ones first.

        Full attention keeps the prefix, and the last pages its boundary.
        """
        held = self.guarded(pool)
        victims = [
            (node.used, node.serial, node)
            for node in self.tree.nodes()
            if (run := node.pages[pool]) and run[0] not in held
            if node.loads[pool] is None
        ]
        require(bool(victims), "eviction finds what was promised", pool, self.promised)
        *_, node = min(victims)
        self._trim(node, pool, held, num_pages)

    def _trim(self, node: Node, pool: int, held: set[int], num_pages: int) -> None:
        """Free the first pages that a pool has of a node, up to those that are held."""
        run = node.pages[pool]
        assert run is not None
        free = run[:num_pages]
        while free and free[-1] in held:
            free.pop()
        if node.attached:
            self.effects += self.news.dropped(node, pool, len(free))
        self.ledgers[pool].give(free, PageState.TREE)
        node.pages[pool] = run[len(free) :] or None

    def release(self, pool: int, pages: array[int], was: PageState) -> None:
        """Give pages back; while a forward may still touch them, into quarantine."""
        if not pages:
            return
        if self.brackets:
            self.ledgers[pool].move(pages, was, PageState.QUARANTINE)
            newest = next(reversed(self.brackets.values()))
            newest.held.append((pool, pages))
        else:
            self.ledgers[pool].give(pages, was)

    # Pins and recency.

    def pin(self, node: Node | None) -> None:
        """Keep a prefix, and the windows at its end, from eviction."""
        if node is not None:
            self.pins[node] = self.pins.get(node, 0) + 1
            self.tree.lock(node)

    def move_pin(self, above: Node, node: Node) -> None:
        """Turn a pin into one of a longer prefix; a decode does so page by page."""
        self._drop_pin(above)
        self.pins[node] = self.pins.get(node, 0) + 1
        self.tree.lock(node, below=above)

    def unpin(self, node: Node | None) -> None:
        """Undo one :meth:`pin`."""
        if node is not None:
            self._drop_pin(node)
            self.tree.unlock(node)
            # A cut or a reset may have detached the node while it was pinned: what is
            # evictable now is the leaf that it hung from.
            orphans = []
            while not node.attached:
                if node.pages[self.tree.backbone] is not None:
                    orphans.append(node)
                assert node.parent is not None
                node = node.parent
            if orphans:
                self.free_orphans(orphans)
            self.offer(node)

    def free_orphans(self, nodes: list[Node]) -> None:
        """Give back what no pin needs of nodes that left the tree: nobody finds it."""
        for pool, ledger in enumerate(self.ledgers):
            is_full = pool in self.tree.full
            held = set() if is_full else self.guarded(pool)
            for node in nodes:
                run = node.pages[pool]
                if run is not None and not is_full:
                    self._trim(node, pool, held, len(run))
                elif run is not None and not node.locks:
                    ledger.give(run, PageState.TREE)
                    node.pages[pool] = None

    def offer(self, node: Node) -> None:
        """Note that a node may have become evictable, or its policy's key changed."""
        self.leaves.offer(node)
        if self.bounds.low_water:
            self.unsaved.offer(node)

    def _drop_pin(self, node: Node) -> None:
        self.pins[node] -= 1
        if not self.pins[node]:
            del self.pins[node]
