"""The laws of the state, checked from scratch; nothing here changes anything.

Each page is in one place, and that is the place its ledger names. A node's full pools
are never absent, and below LOADING there is only LOADING. Locks are what the pins say.
Promises are kept. What is open has a place, and what is done has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from asyncache.core._agenda import (
    Load,
    Lookup,
    Offload,
    Ready,
    Request,
    Transaction,
)
from asyncache.core._errors import broken, require
from asyncache.core._eviction import is_evictable
from asyncache.core._holdings import holdings, orphans
from asyncache.core._node import Node
from asyncache.core._offloads import is_due
from asyncache.core._reservations import loads_under
from asyncache.core._state import State


def check(state: State) -> None:
    """Raise InvariantError unless every law holds."""
    nodes = list(state.tree.nodes())
    _check_pages(state)
    for node in nodes:
        _check_node(state, node)
    _check_locks(state, nodes)
    _check_leaves(state, nodes)
    _check_store(state, nodes)
    placed = {seq: t for seq, t in state.agenda.open.items() if t.started}
    require(placed == state.agenda.placed, "what has a place is listed", placed)
    for transaction in state.agenda.open.values():
        if isinstance(transaction, Request):
            _check_request(state, transaction)
        elif isinstance(transaction, Load):
            _check_load(state, transaction)
        elif isinstance(transaction, Offload):
            _check_offload(state, transaction)
    _check_sums(state)


def _check_pages(state: State) -> None:
    held = [bytearray(ledger.num_pages) for ledger in state.ledgers]
    for pool, pages, held_as, _ in holdings(state):
        places = held[pool]
        for page in pages:
            if places[page]:
                broken("a page is in one place", pool, page, held_as)
            places[page] = held_as
    for ledger, places in zip(state.ledgers, held, strict=True):
        ledger.check(bytes(places))


def _check_node(state: State, node: Node) -> None:
    tree, parent = state.tree, node.parent
    assert parent is not None
    require(parent.children[node.edge[: tree.stride]] is node, "links agree", node)
    require(node.start == parent.end < node.end, "positions follow", node, parent)
    num_pages = node.end - node.start
    require(len(node.edge) == num_pages * tree.stride, "edges are whole pages", node)
    for pool, run in enumerate(node.pages):
        absent = run is None
        require(not (absent and pool in tree.full), "full pools are there", node)
        is_whole = run is None or len(run) == num_pages
        require(is_whole or pool not in tree.full, "a page a position", node)
        is_one = absent or len(run or ()) == 1
        require(is_one or pool not in tree.states, "one state a node", node)
        require(run is None or 0 < len(run) <= num_pages, "the last positions", node)
        load = node.loads[pool]
        require(load is None or not absent, "LOADING has pages", node)
        open_load = load is None or state.agenda.is_open(load)
        require(open_load, "LOADING has an open load", node, load)
    if parent.loads[tree.backbone] is not None:
        require(node.loads[tree.backbone] is not None, "LOADING below LOADING", node)
    require(node.hashes is None or len(node.hashes) == num_pages, "a hash a page", node)
    if node.offload is not None:
        require(state.agenda.is_open(node.offload), "an open offload", node)
        require(node not in state.dirty, "dirty or being offloaded", node)


def _check_leaves(state: State, nodes: list[Node]) -> None:
    tree, clean = state.tree, 0
    for node in reversed(nodes):
        unclean = sum(not (c.locks or c.clean) for c in node.children.values())
        require(node.unclean == unclean, "unclean children are counted", node)
        is_clean = node.stored and not (node.locks or unclean)
        require(node.clean == is_clean, "clean is what it says", node)
        clean += (node.end - node.start) * node.clean
    require(clean == tree.clean_pages, "clean pages", clean, tree.clean_pages)
    leaves, unsaved = state.leaves.known(), state.unsaved.known()
    for node in filter(is_evictable, nodes):
        require(node in leaves, "no leaf is lost", node)
        is_known = node.stored or not state.bounds.low_water or node in unsaved
        require(is_known, "no unsaved leaf is lost", node)
    for behind, aside in state.unsaved.aside.items():
        for node in (behind, *aside):
            require(node.attached, "what is set aside is in the tree", node)
    for pool in range(tree.num_pools):
        found = _evictable_pages(state, pool, nodes)
        require(found == state.evictable(pool), "eviction finds pages", pool, found)


def _check_store(state: State, nodes: list[Node]) -> None:
    """What is due is queued or, with a low water, can be found from below."""
    queued = {above for node in state.dirty for above in state.tree.above(node)}
    for node in state.dirty:
        require(node.attached, "what is queued is in the tree", node)
    for node in nodes:
        trace = node.stored and not state.store_attached
        require(not trace, "without a store nothing is stored", node)
        is_left = is_due(state, node) and node not in queued
        if state.bounds.low_water:
            is_left = is_left and node in state.unsaved.aside
        # Of more, a use that no commit followed may have made it due, unnoticed.
        require(not is_left or node.hits > 1, "what is due is not left", node)


def _evictable_pages(state: State, pool: int, nodes: list[Node]) -> int:
    """Return how many pages of a pool eviction would find, by a look at each node."""
    resident = [
        (node, run)
        for node in nodes
        if (run := node.pages[pool]) is not None and node.loads[pool] is None
    ]
    if pool in state.tree.full:
        return sum(len(run) for node, run in resident if not node.locks)
    held = state.guarded(pool)
    for node, run in resident:
        kept = [page in held for page in run]
        require(kept == sorted(kept), "what is held are the last pages", node, kept)
    return sum(page not in held for _, run in resident for page in run)


def _check_locks(state: State, nodes: list[Node]) -> None:
    locks: dict[Node, int] = {}
    for anchor, count in state.pins.items():
        step: Node | None = anchor
        while step is not None:
            locks[step] = locks.get(step, 0) + count
            step = step.parent
    locked = 0
    for node in [*nodes, *orphans(state)]:
        require(node.locks == locks.get(node, 0), "locks are pins", node)
        if node.loads[state.tree.backbone] is None:
            locked += (node.end - node.start) * bool(node.locks)
    require(locked == state.tree.locked_pages, "locked pages", state.tree.locked_pages)
    owners: dict[Node, int] = {}
    for node in _pinned(state):
        owners[node] = owners.get(node, 0) + 1
    require(owners == state.pins, "each pin has one owner", owners, state.pins)


def _pinned(state: State) -> Iterator[Node]:
    """Yield the node of each pin that something owns."""
    for transaction in state.agenda.open.values():
        if isinstance(transaction, Request | Load | Offload) and transaction.anchor:
            yield transaction.anchor
    for bracket in state.brackets.values():
        yield from bracket.pins


def _check_request(state: State, request: Request) -> None:
    tree = state.tree
    length = len(request.tables[tree.backbone])
    for pool in tree.paged:
        table, own = request.tables[pool], request.own[pool]
        require(len(table) == len(own) == length, "tables are aligned")
        spare = len(request.spare[pool])
        require(spare == len(request.spare[tree.backbone]), "spare pages are aligned")
        behind = slice(request.passed[pool])
        require({*table[behind]} <= {-1}, "a window has passed these", request)
        require(not any(own[behind]), "and they are not its own", request)
    _check_slots(state, request)
    require(request.hit <= length, "a hit has pages", request)
    require(
        request.hit <= request.shared or not request.hit, "a hit is pinned", request
    )
    if request.shared == request.hit:
        needs = loads_under(state, request.anchor, request.hit)
        require(needs == request.needs, "needs are what it stands on", request, needs)
    waits = bool(request.needs) and request.lookup is None
    require(waits == (request.wait is not None), "a wait has loads", request)
    require(not request.needs or request.hit == request.shared, "nothing published")
    parked = request.want > request.shared
    require(parked == (request.seq in state.parked), "parked is listed", request)
    for child in (request.lookup, request.wait):
        require(child is None or state.agenda.is_open(child), "open", request, child)
    if request.anchor is not None:
        for load in request.needs:
            require(request in load.interest, "interest is mutual", request, load)


def _check_slots(state: State, request: Request) -> None:
    states = state.tree.states
    if request.slots.own or request.promise:
        require(len(request.slots.own) == len(states), "a slot a state pool", request)
    waits = request.lookup is not None
    require(waits or not request.slots.promised, "slots are kept for lookups", request)
    require(request.computed <= request.extent, "it computed what it has", request)
    last = request.computed // state.tree.page_tokens
    for boundary, slots in request.slots.checkpoints.items():
        require([*slots] == states, "a checkpoint of all states", request, boundary)
        is_own = request.shared < boundary <= last and not request.needs
        require(is_own, "checkpoints are not shared yet", request, boundary)
    if request.slots.is_behind:
        anchor = request.anchor
        assert anchor is not None
        require(anchor.end == request.hit, "its state is at its end", request)
        for pool in states:
            require(anchor.pages[pool] is not None, "its state is kept", request)


def _check_load(state: State, load: Load) -> None:
    may_start = load.is_launched or not load.started
    require(may_start, "a load starts once it is launched", load)
    for request in load.interest:
        require(load in request.needs, "interest is mutual", load, request)
        is_kept = request.is_prefetch or not load.is_prefetch
        require(is_kept, "who waits makes a load urgent", load, request)
    if load.anchor is None:
        require(load.started, "a load that never started is gone at once", load)
        require(not load.interest, "nobody waits for a draining load", load)
        return
    require(bool(load.interest), "somebody waits for a running load", load)
    marked = sum(
        node.end - node.start_of(pool)
        for node in state.tree.above(load.anchor)
        for pool in range(state.tree.num_pools)
        if node.loads[pool] is load
    )
    owned = sum(len(piece.pages) for piece in load.pieces)
    require(marked == owned, "a load owns what it marked", load, marked, owned)


def _check_offload(state: State, offload: Offload) -> None:
    for node in state.tree.above(offload.anchor, offload.start):
        require(node.offload is offload, "an offload owns its nodes", offload, node)


def _check_sums(state: State) -> None:
    requests = [t for t in state.agenda.open.values() if isinstance(t, Request)]
    promised = sum(request.remainder for request in requests)
    require(promised == state.promised, "promises are summed", promised, state.promised)
    slots = sum(request.slots.promised for request in requests)
    require(slots == state.promised_slots, "slots are summed", state.promised_slots)
    for pool in range(len(state.ledgers)):
        require(state.slack(pool) >= 0, "promises can be kept", pool, state.slack(pool))
    offloading = sum(isinstance(t, Ready | Offload) for t in state.agenda.open.values())
    require(offloading == state.num_offloading, "offloads are counted", offloading)
    for seq in state.closing:
        require(seq in state.parked, "what ends later has a commit parked", seq)
    for seq, request in state.waiting.items():
        require(seq == request.seq and request.lookup is not None, "waiting to restore")


def dump(state: State) -> tuple[object, ...]:
    """Return the whole state as values; equal dumps are equal replicas."""
    tree = state.tree
    nodes = [_node(node) for node in sorted(tree.nodes(), key=lambda n: n.serial)]
    roots = [(name, root.locks) for name, root in tree.roots.items()]
    agenda = [
        (type(t).__name__, t.seq, t.place, t.claim, _detail(t))
        for t in state.agenda.open.values()
    ]
    brackets = [
        (
            (bracket.number, _serials(bracket.pins), list(bracket.held)),
            [(node.serial, at, pools) for node, at, pools in bracket.writes],
            [request.seq for request in bracket.requests],
            (list(bracket.copies), bracket.is_awaited),
        )
        for bracket in state.brackets.values()
    ]
    lists = (
        list(state.agenda.queued),
        list(state.waiting),
        list(state.parked),
        list(state.closing),
        _serials(state.dirty),
    )
    sums = (
        (state.clock, state.promised, state.promised_slots),
        (state.num_offloading, state.store_attached),
        (state.num_brackets, state.num_finished, state.digest),
        (tree.num_nodes, tree.locked_pages, tree.clean_pages),
        (state.generation, state.layout.revision),
        [(node.serial, start) for node, start in state.reading.items()],
    )
    ledgers = tuple(ledger.dump() for ledger in state.ledgers)
    return (roots, nodes, agenda, brackets, lists, sums, ledgers)


def _serials(nodes: Iterable[Node]) -> list[int]:
    return [node.serial for node in nodes]


def _serial(node: Node | None) -> int | None:
    return None if node is None else node.serial


def _node(node: Node) -> tuple[object, ...]:
    return (
        (node.serial, _serial(node.parent), node.start, node.edge),
        [None if run is None else bytes(run) for run in node.pages],
        [None if load is None else load.seq for load in node.loads],
        (node.used, node.created, node.hits, node.priority),
        (node.locks, node.written, node.stored, node.attempts),
        (node.clean, node.unclean, _serial(node.behind)),
        None if node.offload is None else node.offload.seq,
    )


def _detail(transaction: Transaction) -> object:
    match transaction:
        case Request():
            return _request(transaction)
        case Load():
            waiters = [request.seq for request in transaction.interest]
            span = (transaction.start, transaction.end, _serial(transaction.anchor))
            held = (list(transaction.pieces), list(transaction.held))
            return (waiters, span, held, transaction.is_launched)
        case Lookup(start=start, covered=covered, end=end, asked=asked):
            return (transaction.request.seq, start, covered, end, asked)
        case Ready(start=start, anchor=anchor):
            return (start, _serial(anchor))
        case Offload(start=start, anchor=anchor, is_void=is_void):
            return (start, _serial(anchor), is_void)
        case _:
            return None


def _request(request: Request) -> tuple[object, ...]:
    return (
        (bytes(request.tokens), request.root_hash, request.generation),
        (request.priority, _serial(request.anchor)),
        [bytes(table) for table in request.tables],
        [bytes(own) for own in request.own],
        [bytes(spare) for spare in request.spare],
        (request.hit, request.extent, request.committed, request.want),
        (request.num_reserve, request.promise, request.remainder, request.barred),
        [load.seq for load in request.needs],
        (request.computed, list(request.passed), request.slots.is_behind),
        (list(request.slots.own), request.slots.promised),
        [(at, dict(slots)) for at, slots in request.slots.checkpoints.items()],
    )
