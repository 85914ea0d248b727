"""Who holds each page, and what the tree says it means: for checks, from scratch.

Nothing here changes anything, and nothing that decides asks here: the ledger knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, compress
from typing import NamedTuple

from asyncache.core._agenda import Bracket, Load, Request
from asyncache.core._hashes import PageHash
from asyncache.core._ledger import PageState
from asyncache.core._node import Node
from asyncache.core._state import State

Holder = Node | Request | Load | Bracket


class Holding(NamedTuple):
    """Pages of one pool that something holds."""

    pool: int
    pages: Sequence[int]
    state: PageState
    holder: Holder


class Resident(NamedTuple):
    """Pages of one pool that anyone may be given as a hit.

    They are at the positions from ``start`` on, and the last of them ends with
    ``tokens``, which are packed. ``written`` is the newest forward that may still
    write them.
    """

    root: PageHash
    tokens: bytes
    pool: int
    start: int
    pages: Sequence[int]
    written: int


def holdings(state: State) -> Iterator[Holding]:
    """Yield all that holds pages; what is not among it must be free."""
    for node in [*state.tree.nodes(), *orphans(state)]:
        for pool, run in enumerate(node.pages):
            load = node.loads[pool]
            held = PageState.TREE if load is None else PageState.TRANSIT
            yield Holding(pool, run or (), held, node if load is None else load)
    for transaction in state.agenda.open.values():
        if isinstance(transaction, Request):
            for pool, own in enumerate(transaction.own):
                mine = list(compress(transaction.tables[pool], own))
                yield Holding(pool, mine, PageState.REQUEST, transaction)
                spare = transaction.spare[pool]
                yield Holding(pool, spare, PageState.REQUEST, transaction)
            yield from _slots(state, transaction)
    owners: list[Load | Bracket] = list(state.brackets.values())
    owners += [t for t in state.agenda.open.values() if isinstance(t, Load)]
    for owner in owners:
        for pool, pages in owner.held:
            yield Holding(pool, pages, PageState.QUARANTINE, owner)


def _slots(state: State, request: Request) -> Iterator[Holding]:
    """Yield a request's state slots: its own, and its checkpoints."""
    checkpoints = [slots.items() for slots in request.slots.checkpoints.values()]
    own = zip(state.tree.states, request.slots.own, strict=False)
    for pool, slot in [*own, *chain.from_iterable(checkpoints)]:
        yield Holding(pool, [slot], PageState.REQUEST, request)


def orphans(state: State) -> list[Node]:
    """Return the nodes that a reset took out of the tree and some pin still needs."""
    found: dict[Node, None] = {}
    for anchor in state.pins:
        for node in state.tree.above(anchor):
            if not node.attached and not any(node.loads):
                found[node] = None
    return list(found)


def residents(state: State) -> Iterator[Resident]:
    """Yield what the tree offers as hits, pool by pool."""
    for root_hash, root in state.tree.roots.items():
        stack = [(child, b"") for child in root.children.values()]
        while stack:
            node, above = stack.pop()
            tokens = above + node.edge
            stack += [(child, tokens) for child in node.children.values()]
            for pool, run in enumerate(node.pages):
                if run is not None and node.loads[pool] is None:
                    yield Resident(
                        root_hash, tokens, pool, node.end - len(run), run, node.written
                    )
