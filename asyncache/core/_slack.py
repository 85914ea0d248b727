"""What can be had without breaking a promise: of pages, and of state slots.

Pools that have a page a position are promised the same number of pages, all state pools
the same number of slots; the tightest pool of each kind decides.
"""

from __future__ import annotations

from asyncache.core._state import State


def page_slack(state: State) -> int:
    """Return the slack of the tightest pool that has a page a position."""
    return min(map(state.slack, state.tree.paged))


def slot_slack(state: State) -> int:
    """Return the slack of the tightest state pool; 0 if there is none."""
    return min(map(state.slack, state.tree.states), default=0)


def keeps_promises(state: State) -> bool:
    """Whether what was promised can still be had, of every pool."""
    return page_slack(state) >= 0 and slot_slack(state) >= 0
