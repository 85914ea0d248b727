"""Which prefixes can be served by the tree, or restored with what a store has.

A full-attention pool allows every boundary up to its first missing page. A window pool
allows a boundary if the window before it is there. The answer is the set that all
pools allow; ranks intersect their sets. The longest of the intersection is legal
everywhere, while a minimum of everyone's longest may be legal nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncache.core._effects import LookupPlan
from asyncache.core._node import Node
from asyncache.core._tree import Tree, Walk

Presence = Sequence[Sequence[bool]]
"""For each of a plan's asks, whether each page is stored."""


def restorable(plan: LookupPlan, present: Presence) -> list[int]:
    """Return every boundary beyond ``plan.start`` that can be restored, ascending."""
    end = plan.end
    windows = {pool: bytearray(base) for pool, _, _, base in plan.windows}
    origins = {pool: origin for pool, _, origin, _ in plan.windows}
    for ask, found in zip(plan.asks, present, strict=True):
        if ask.pool not in windows:
            missing = next(
                (i for i, is_there in enumerate(found) if not is_there), None
            )
            if missing is not None:
                end = min(end, ask.start + missing)
            continue
        row, offset = windows[ask.pool], ask.start - origins[ask.pool]
        for index, is_there in enumerate(found):
            row[offset + index] |= is_there
    boundaries = set(range(plan.start + 1, end + 1))
    for pool, window, origin, _ in plan.windows:
        boundaries &= _with_window(windows[pool], origin, window)
    return sorted(boundaries)


def _with_window(row: bytearray, origin: int, window: int) -> set[int]:
    """Return the boundaries whose window, clipped at the root, is present."""
    # Before the origin lies what no boundary of this plan can need.
    run, legal = window if origin else 0, set()
    for index, is_there in enumerate(row):
        position = origin + index
        run = run + 1 if is_there else 0
        if run >= min(window, position + 1):
            legal.add(position + 1)
    return legal


def servable(tree: Tree, walk: Walk, limit: int, *, resident: bool = False) -> int:
    """Return the longest prefix that may be served, at most ``limit`` pages.

    Args:
        tree: Where the key was walked.
        walk: What it covers of a key.
        limit: Longest prefix wanted.
        resident: Whether pages that are still LOADING do not count.
    """
    end = min(limit, walk.covered)
    if resident:
        for node in walk.path:
            if node.loads[tree.backbone] is not None:
                end = min(end, node.start)
                break
    while True:
        shorter = end
        for pool, window in tree.windows:
            shorter = _window_boundary(
                walk.path, pool, window, shorter, resident=resident
            )
        # A shorter boundary has another window: all pools must agree on one.
        if shorter == end:
            return end
        end = shorter


def _window_boundary(
    path: list[Node], pool: int, window: int, end: int, *, resident: bool
) -> int:
    """Return the longest boundary up to ``end`` whose trailing pages are there."""
    best, run_start = 0, 0
    for node in path:
        if node.start >= end:
            break
        first = node.start_of(pool)
        if resident and node.loads[pool] is not None:
            first = node.end
        if first > node.start:
            run_start = first
        if first == node.end:
            continue
        last = min(node.end, end)
        # The window is clipped at the root, where a run always starts whole.
        if run_start == 0 or last - run_start >= window:
            best = last
    return best
