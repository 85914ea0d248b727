"""This rank's votes, and the ballot that carries them.

A ballot is the slot table of one step. Its verdict, the minimum over ranks, is read
through that same table: a vote counts only for the transaction that held the place when
it was cast, whatever has ended or begun since.

::

    int32   protocol | d | -d | finished | going | (claim, quiet) a place | mask

``d`` is the digest of all that this rank's replica was told; the minimum of (d, -d) is
(d, -d) only if all agree. ``finished`` counts forwards that this rank has finished;
``going`` is 0 once it gives up what all ranks are at, such as a drain. Places that are
empty, or of which a rank has nothing to say, vote (NOTHING, 0). Layouts with windows or
states add a mask: each open lookup gets a share of it, in sequence order, and offers
boundaries at the smallest stride that fits. States are kept at few boundaries, mostly
at regular ones: with them, the multiples of a power of two are offered.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncache.core._agenda import Lookup, Transaction
from asyncache.core._state import State

PROTOCOL = 1
VERSION = "0.1.0"
"""Of asyncache: what a core decides may change with any release."""
HEADER_INTS = 5
NOTHING = 2**31 - 1
"""The claim of an empty place: it lowers no minimum."""


class Share(NamedTuple):
    """A lookup's part of the mask: one int a boundary on offer."""

    offset: int
    boundaries: range


@dataclass(frozen=True, slots=True)
class Ballot:
    """The slot table of one step; equal on all ranks if their replicas are."""

    digest: int
    num_ints: int
    table: dict[int, Transaction]
    shares: dict[int, Share]


def cast(state: State) -> Ballot:
    """Return the ballot for the state as it is now."""
    table = state.agenda.placed.copy()
    mask = HEADER_INTS + 2 * state.agenda.num_places
    num_ints = mask
    shares: dict[int, Share] = {}
    if state.tree.windows:
        num_ints += state.bounds.mask_ints
        lookups = [t for t in table.values() if isinstance(t, Lookup) and t.asked]
        end = mask + state.bounds.mask_ints
        shares = _shares(lookups, mask, end, aligned=bool(state.tree.states))
    return Ballot(state.digest >> 1, num_ints, table, shares)


def _shares(
    lookups: list[Lookup], offset: int, end: int, *, aligned: bool
) -> dict[int, Share]:
    shares = {}
    for place, lookup in enumerate(lookups):
        # At least one: such a layout has a mask int for each request.
        room = (end - offset) // (len(lookups) - place)
        stride = max(1, -(-(lookup.end - lookup.start) // room))
        first = lookup.end
        if aligned:
            stride = 1 << (stride - 1).bit_length()
            first -= first % stride
        boundaries = range(first, lookup.start, -stride)
        shares[lookup.seq] = Share(offset, boundaries)
        offset += len(boundaries)
    return shares


@dataclass(slots=True)
class Votes:
    """What this rank has learnt and not yet seen agreed. Claims sink, quiet rises."""

    finished: int = 0
    going: bool = True
    _claims: dict[int, int] = field(default_factory=dict)
    _quiet: set[int] = field(default_factory=set)
    _boundaries: dict[int, Collection[int]] = field(default_factory=dict)

    def sink(self, seq: int, claim: int) -> None:
        """Vouch for no more than ``claim``."""
        self._claims[seq] = min(claim, self._claims.get(seq, NOTHING))

    def quiet(self, seq: int) -> None:
        """Promise not to touch the transaction's pages again."""
        self._quiet.add(seq)

    def answer(self, seq: int, boundaries: Collection[int]) -> None:
        """Say which boundaries a lookup found restorable; it has no more to say.

        An answer after a deadline's empty one finds nothing that was not given up.
        """
        known = self._boundaries.get(seq, boundaries)
        self._boundaries[seq] = frozenset(boundaries).intersection(known)
        self.sink(seq, max(boundaries, default=0))
        self.quiet(seq)

    def forget(self, seq: int) -> None:
        """Drop what was said of a transaction that has ended."""
        self._claims.pop(seq, None)
        self._quiet.discard(seq)
        self._boundaries.pop(seq, None)

    def said(self) -> set[int]:
        """Return the transactions that something was said of."""
        return self._quiet | self._claims.keys()

    def fill(self, ballot: Ballot) -> array[int]:
        """Return this rank's vector for a ballot."""
        d = ballot.digest
        vector = array("i", [PROTOCOL, d, -d, self.finished, self.going])
        vector += blank(ballot.num_ints - HEADER_INTS)
        # Where nothing was said, the blank lowers no minimum: this takes as long as
        # there is news, not as there are requests.
        for seq, claim in self._claims.items():
            if seq in ballot.table:
                vector[HEADER_INTS + 2 * ballot.table[seq].place] = claim
        for seq in self._quiet:
            if seq in ballot.table:
                vector[HEADER_INTS + 2 * ballot.table[seq].place + 1] = 1
        for seq, share in ballot.shares.items():
            known = self._boundaries.get(seq, share.boundaries)
            for index, boundary in enumerate(share.boundaries):
                vector[share.offset + index] = boundary in known
        return vector


def blank(num_ints: int) -> array[int]:
    """Return what is voted on places of which there is nothing to say."""
    nothing = array("i", [NOTHING, 0]) * ((num_ints + 1) // 2)
    return nothing[:num_ints]


def agreed_boundary(ballot: Ballot, verdict: array[int], lookup: Lookup) -> int:
    """Return the longest boundary that every rank can restore."""
    claim = verdict[HEADER_INTS + 2 * lookup.place]
    share = ballot.shares.get(lookup.seq)
    if share is None or not claim:
        return claim
    for index, boundary in enumerate(share.boundaries):
        if verdict[share.offset + index]:
            return boundary
    return 0
