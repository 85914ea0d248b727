"""The agenda: every open transaction, and the slot through which ranks agree on it.

A transaction's slot holds two numbers of each rank. *claim* is how much the rank still
vouches for: it only sinks, and a lower minimum takes effect at once. *quiet* is 1 once
the rank will not touch the transaction's pages again: it only rises, and a minimum of
1 ends the transaction.

============  ==================  ==============================  =====================
transaction   opened by           claim                           ends as
============  ==================  ==============================  =====================
request       open                1; abort 0                      CLOSED, ABORTED
lookup        restore             restorable pages; late or       AGREED(boundary)
                                  failed 0
wait          agreed lookup       1; this request gives up 0      READY(n), SHORT(n)
load          agreed lookup       good leading pages              LANDED(n), or drained
ready         a DIRTY node        1; drop it 0                    an offload, forgotten
offload       agreed ready        1 good; 0 failed;               STORED, DIRTY,
                                  -1 its parent is missing        forgotten
============  ==================  ==============================  =====================

A wait is never quiet: the core ends it with its loads. A request has at most one lookup
or wait open, so these sit in a slot that goes with the request's own and never queue;
loads, readies and offloads share the rest, and queue unstarted when it is full.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncache.core._errors import TooManyRequestsError, require
from asyncache.core._hashes import Namespace, PageHash
from asyncache.core._node import Node
from asyncache.core._tokens import TOKEN_BYTES

UNPLACED = -1


class Transaction:
    """Something that ranks must agree on before it ends."""

    __slots__ = ("claim", "place", "seq")

    def __init__(self, claim: int) -> None:
        self.seq = 0
        self.place = UNPLACED
        self.claim = claim

    @property
    def started(self) -> bool:
        """Whether ranks vote on it; before, nothing was done for it."""
        return self.place != UNPLACED

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.seq} claim={self.claim}>"


@dataclass(slots=True)
class Slots:
    """A request's part in the state pools."""

    own: array[int] = field(default_factory=lambda: array("i"))
    """One a state pool, from its reservation on: the model overwrites them."""
    promised: int = 0
    """Of each state pool, kept for what its lookup may load."""
    checkpoints: dict[int, dict[int, int]] = field(default_factory=dict)
    """By boundary, a slot a state pool: not published yet."""
    is_behind: bool = False
    """Whether the state at its hit has yet to be copied to its own."""


class Request(Transaction):
    """One prompt, its pages, and what they stand on.

    ::

        positions   0 .. shared ........ hit ......... len(table) ...... reserved
                    in the tree, pinned  | own pages   | promised, not yet taken
                    by ``anchor``        |             |

    ``shared`` is ``anchor.end``: it starts at the hit and grows with each publish. Own
    pages are flagged position by position, for a duplicate stays the request's own
    even where the tree holds another page for the same tokens. ``passed`` counts, a
    window pool, the leading positions whose pages are needed no more; ``computed`` the
    tokens that had pages when the last forward began.
    """

    __slots__ = (
        "anchor",
        "barred",
        "committed",
        "computed",
        "extent",
        "generation",
        "hit",
        "is_prefetch",
        "lookup",
        "namespace",
        "needs",
        "num_reserve",
        "own",
        "passed",
        "priority",
        "promise",
        "remainder",
        "root_hash",
        "slots",
        "spare",
        "tables",
        "tail",
        "tokens",
        "wait",
        "want",
    )

    def __init__(
        self,
        tokens: bytes,
        namespace: Namespace,
        num_pools: int,
        num_reserve: int,
        priority: int,
        *,
        is_prefetch: bool,
    ) -> None:
        super().__init__(claim=1)
        self.is_prefetch = is_prefetch
        self.tokens = bytearray(tokens)
        self.namespace = namespace
        self.generation = -1
        self.root_hash = PageHash(b"")
        """Of its namespace, in the generation in which it began to hold pages."""
        self.priority = priority
        self.num_reserve = num_reserve
        """Pages that a reservation covers: the prompt and ``reserve_tokens``."""
        self.tables = [array("i") for _ in range(num_pools)]
        self.own = [bytearray() for _ in range(num_pools)]
        self.spare = [array("i") for _ in range(num_pools)]
        self.anchor: Node | None = None
        self.hit = self.extent = self.computed = self.committed = 0
        self.want = 0
        """Pages that commits asked to publish; more than ``shared`` while parked."""
        self.promise = 0
        """Pages reserved, those taken included; 0 without a reservation."""
        self.remainder = 0
        """Pages promised and not yet taken."""
        self.passed = [0] * num_pools
        self.slots = Slots()
        self.barred = False
        """A load of this attempt failed: it is not tried again."""
        self.needs: dict[Load, None] = {}
        self.lookup: Lookup | None = None
        self.wait: Wait | None = None
        self.tail: tuple[int, list[PageHash]] = (0, [])
        """Where the prompt left the tree when it was looked up, and the hashes of its
        pages from there on."""

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def shared(self) -> int:
        """Leading pages that are in the tree and pinned."""
        return 0 if self.anchor is None else self.anchor.end


class Lookup(Transaction):
    """A question to the store: how far beyond ``start`` can this prompt be restored?"""

    __slots__ = ("ask_store", "asked", "covered", "end", "request", "start")

    def __init__(self, request: Request, end: int, *, ask_store: bool) -> None:
        super().__init__(claim=end)
        self.request = request
        self.ask_store = ask_store
        self.start = 0
        self.covered = 0
        """Pages that the tree held when it was asked; the store was asked beyond."""
        self.end = end
        self.asked = False
        """Whether it was put to the store; before, it waits for a reservation."""


class Wait(Transaction):
    """One request's interest in the loads that its hit stands on."""

    __slots__ = ("request",)

    def __init__(self, request: Request) -> None:
        super().__init__(claim=1)
        self.request = request


class Piece(NamedTuple):
    """Pages of one pool at consecutive positions."""

    pool: int
    start: int
    pages: array[int]

    @property
    def end(self) -> int:
        """Position after the last page."""
        return self.start + len(self.pages)


class Load(Transaction):
    """Pages on their way from the store; anything may write them until it is quiet."""

    __slots__ = (
        "anchor",
        "end",
        "held",
        "interest",
        "is_launched",
        "is_prefetch",
        "pieces",
        "start",
    )

    def __init__(self, start: int, end: int, *, is_launched: bool = True) -> None:
        super().__init__(claim=end - start)
        self.is_launched = is_launched
        """Whether it may start; else it waits for the next launch."""
        self.is_prefetch = True
        """Whether nobody ever had interest in it but prefetches."""
        self.start = start
        self.end = end
        self.pieces: list[Piece] = []
        self.anchor: Node | None = None
        """Node at whose end the load ends; None once all of it was cut."""
        self.interest: dict[Request, None] = {}
        self.held: list[tuple[int, array[int]]] = []
        """(pool, pages) that were cut and stay in quarantine until it is quiet."""


class Ready(Transaction):
    """Nodes that wait until every rank has reason and room to offload them.

    They cover positions [``start``, ``anchor.end``); nothing pins them yet. ``anchor``
    is None once they were all evicted.
    """

    __slots__ = ("anchor", "start")

    def __init__(self, node: Node) -> None:
        super().__init__(claim=1)
        self.anchor: Node | None = node
        self.start = node.start


class Offload(Transaction):
    """Pages on their way to the store; pinned until no copy or write reads them."""

    __slots__ = ("anchor", "is_void", "start")

    def __init__(self, node: Node, start: int) -> None:
        super().__init__(claim=1)
        self.anchor = node
        self.start = start
        self.is_void = False
        """Whether a reset or a detach came since: it ends without a trace."""


class SlotCopy(NamedTuple):
    """A state to copy from one slot of a pool to another, inside a forward."""

    pool: int
    source: int
    target: int


@dataclass(slots=True)
class Bracket:
    """One forward: what it may still read and write stays where it is."""

    number: int
    pins: list[Node]
    requests: dict[Request, None]
    held: list[tuple[int, array[int]]] = field(default_factory=list)
    """(pool, pages) released while this was the newest bracket."""
    writes: list[tuple[Node, int, list[int]]] = field(default_factory=list)
    """(node, start, pools) of what its requests published: it may still write that."""
    copies: list[SlotCopy] = field(default_factory=list)
    """What brings its requests' slots to where their hits end, as it begins."""
    is_awaited: bool = False
    """Whether it pins what nobody else may need any more."""


class Agenda:
    """Open transactions in sequence order, and their places in the ballot.

    ::

        places   0 .. n ...... 2n ........ 2n + slots
                 requests |   their    | loads, readies,
                          |  restores  | offloads
    """

    def __init__(self, num_requests: int, num_slots: int) -> None:
        self.open: dict[int, Transaction] = {}
        self.placed: dict[int, Transaction] = {}
        """Those that have a place in the ballot, in the order in which they got it."""
        self.queued: dict[int, Transaction] = {}
        """Transactions that found no place; they start in this order."""
        self.num_requests = num_requests
        self.num_places = 2 * num_requests + num_slots
        # Popped from the end, so that low places fill first.
        self._free_requests = list(range(num_requests - 1, -1, -1))
        self._free_slots = list(range(self.num_places - 1, 2 * num_requests - 1, -1))
        self._seq = 0

    @property
    def num_open_requests(self) -> int:
        """Requests that are open."""
        return self.num_requests - len(self._free_requests)

    def add_request(self, request: Request) -> None:
        """Open a request.

        Raises:
            TooManyRequestsError: If all places for requests are taken.
        """
        if not self._free_requests:
            raise TooManyRequestsError(
                f"{self.num_requests} requests are open, as many as Limits.requests"
            )
        self._enter(request, self._free_requests.pop())

    def add_restore(self, transaction: Lookup | Wait) -> None:
        """Open a request's lookup or wait."""
        self._enter(transaction, self.num_requests + transaction.request.place)

    def add(self, transaction: Transaction) -> None:
        """Open a transaction; it starts once :meth:`start_queued` finds it a place."""
        self._enter(transaction, UNPLACED)
        self.queued[transaction.seq] = transaction

    def start_queued(self) -> list[Transaction]:
        """Give free places to queued transactions and return those, in order."""
        started = []
        for transaction in list(self.queued.values()):
            if not self._free_slots:
                break
            if isinstance(transaction, Load) and not transaction.is_launched:
                continue
            del self.queued[transaction.seq]
            transaction.place = self._free_slots.pop()
            self.placed[transaction.seq] = transaction
            started.append(transaction)
        return started

    def remove(self, transaction: Transaction) -> None:
        """End a transaction. Votes still under way for it no longer count."""
        require(self.open.pop(transaction.seq, None) is transaction, "it was open")
        self.queued.pop(transaction.seq, None)
        self.placed.pop(transaction.seq, None)
        if isinstance(transaction, Request):
            self._free_requests.append(transaction.place)
        elif transaction.place >= 2 * self.num_requests:
            self._free_slots.append(transaction.place)

    def is_open(self, transaction: Transaction) -> bool:
        """Whether a transaction has not ended."""
        return transaction.seq in self.open

    def _enter(self, transaction: Transaction, place: int) -> None:
        self._seq += 1
        transaction.seq, transaction.place = self._seq, place
        self.open[transaction.seq] = transaction
        if place != UNPLACED:
            self.placed[transaction.seq] = transaction
