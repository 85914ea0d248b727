"""What the ranks of one cache have in common: all that must be the same on each."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable

import anyio

from asyncache.core import RankError
from asyncache.engine import Request, ScopeId
from asyncache.ranks import Group
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._model import EPSILON_S


class Party:
    """Compares what ranks do, by what it is and the how-manieth.

    Attributes:
        fault: Why the ranks may fail; "" as long as they may not.
        is_uneven: Whether a rank has made a call that the others have not.
        actors: Whose part each scope is.
        deadlines: Until when a restore may take on the last rank, by its request and
            the how-manieth it is.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.fault = ""
        self.is_uneven = False
        self.actors: dict[ScopeId, int] = {}
        self.deadlines: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._scopes: defaultdict[int, int] = defaultdict(int)
        self._first: dict[tuple[str, int], tuple[int, object]] = {}
        self._counts: defaultdict[tuple[str, int], int] = defaultdict(int)

    def note_fault(self, fault: str) -> None:
        """Take note that from now on the ranks may fail, and why."""
        self.fault = self.fault or fault

    def note_left(self, request: Request, *, aborted: bool) -> None:
        """Take note that a scope of a request has ended on some rank."""
        scope, state = request._prompt.scope, request._state  # noqa: SLF001 - the simulator looks inside
        if state is not None:
            is_last = aborted or scope is not None
            self._scopes[state.seq] += self.num_ranks if is_last else 1

    def has_left(self, seq: int) -> bool:
        """Whether all scopes of a request have ended, or one was aborted."""
        return self._scopes[seq] >= self.num_ranks

    def check_same(self, what: str, number: int, rank: int, value: object) -> None:
        """Raise LawError unless a rank finds what the others do."""
        if self.is_uneven:
            return
        key = (what, number)
        first, wanted = self._first.setdefault(key, (rank, value))
        if value != wanted:
            raise LawError(
                f"{what} {number} is {_short(value, wanted)} on rank {rank},"
                f" {_short(wanted, value)} on rank {first}"
            )
        self._counts[key] += 1
        if self._counts[key] == self.num_ranks:
            del self._first[key], self._counts[key]


def _short(value: object, other: object) -> str:
    """Return what of a value differs from another."""
    while isinstance(value, tuple | list) and isinstance(other, tuple | list):
        pairs = zip(value, other, strict=False)
        differ = [(a, b) for a, b in pairs if a != b]
        if len(value) != len(other) or not differ:
            break
        value, other = differ[0]
    return repr(value)


class WatchedGroup(Group):
    """A group whose every minimum is compared with that of the other ranks.

    Args:
        inner: What joins them.
        party: Where it is compared.
        barrier_s: Seconds that a rank may wait for the others.
        violate: Told what is against the law: what a group raises is for an engine to
            handle.
    """

    def __init__(
        self,
        inner: Group,
        party: Party,
        barrier_s: float,
        violate: Callable[[str], object],
    ) -> None:
        self._violate = violate
        self.rank = inner.rank
        self.num_ranks = inner.num_ranks
        self.num_calls = 0
        self._inner = inner
        self._party = party
        self._barrier_s = barrier_s
        self.is_lost = False
        """Whether it goes on without knowing what the others do. One of them is gone:
        whatever it takes part in fails, and need not be what they are at."""
        self.is_open = False
        """Whether caches are open, so that all but the shortest vectors are ballots."""
        self._have_differed = False

    async def all_min(self, vector: array[int]) -> None:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        self._compare("the length of vector", number, len(vector))
        if self._have_differed:
            self._violate(f"rank {self.rank} goes on with ranks that differ")
        began = anyio.current_time()
        try:
            await self._inner.all_min(vector)
        finally:
            took_s = anyio.current_time() - began
            if took_s > self._barrier_s + EPSILON_S:
                self._violate(f"rank {self.rank} waited {took_s} s for the others")
        self._compare("minimum", number, list(vector))
        if self.is_open and len(vector) > 1:
            self._have_differed = vector[1] != -vector[2]

    def _compare(self, what: str, number: int, value: object) -> None:
        if self.is_lost:
            return
        try:
            self._party.check_same(what, number, self.rank, value)
        except LawError as error:
            self._violate(str(error))

    async def aclose(self) -> None:
        await self._inner.aclose()


def failed_for_a_reason(party: Party, error: RankError) -> None:
    """Raise LawError if ranks have failed, and nothing made them."""
    if not party.fault:
        raise LawError(f"the ranks failed for no reason: {error}") from error
