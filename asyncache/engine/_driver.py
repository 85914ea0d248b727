"""The driver: owns the replica, makes its calls, casts and applies its verdicts.

Synchronous, and lives in the thread of the step loop. Plans go out to the transfers
through :class:`Plans`; votes come in through :meth:`Driver.vote`, which is all that a
transfer, a clock or a client may ever do to the state.

A lone rank has nothing to wait for: :meth:`Driver.settle` applies votes until none is
left. It runs at the end of each call, once by ``call_soon`` after votes from elsewhere,
and never nested, so no effect ever finds the core half-way through a change. With a
group, votes wait for the barrier: :meth:`Driver.cast`, a minimum over all ranks,
:meth:`Driver.conclude`.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol, TypeVar

from asyncache.core import (
    AskStore,
    Ballot,
    Ended,
    Fact,
    Hurry,
    InvariantError,
    OfferOffload,
    OrderError,
    PagesCached,
    PagesDropped,
    RankError,
    Replica,
    RequestState as Request,
    Restored,
    Settled,
    Shortened,
    StartLoad,
    StartOffload,
    Stop,
    Votes,
)

P = ParamSpec("P")
R = TypeVar("R")
Told = Restored | Settled | Shortened | Ended
Started = AskStore | StartLoad | Hurry | StartOffload | OfferOffload | Stop
Failure = InvariantError | RankError
News = Fact | PagesCached | PagesDropped


class Plans(Protocol):
    """Where plans go: the transfers, on whatever loop they live."""

    def start(self, plan: Started) -> None:
        """Begin, or stop, a transfer; may vote at once, but makes no call."""


class Driver:
    """One rank's replica, and the only one who touches it.

    Args:
        replica: Owned from now on.
        plans: Gets each plan as it is made.
        tell_request: Gets what happens to requests.
        tell_observer: Gets facts; runs last, and may call back.
        on_settled: Called when nothing is left to apply.
        on_failed: Called once, with what ended it all.
        wake: Arranges that :meth:`settle` is called soon in the driver's thread.
        is_alone: Whether there are no other ranks to agree with.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        plans: Plans,
        tell_request: Callable[[Told], None],
        tell_observer: Callable[[News], None],
        on_settled: Callable[[], None],
        on_failed: Callable[[Failure], None],
        wake: Callable[[], None],
        is_alone: bool = True,
    ) -> None:
        self.replica = replica
        self._plans = plans
        self._tell_request = tell_request
        self._tell_observer = tell_observer
        self._on_settled = on_settled
        self._on_failed = on_failed
        self._wake = wake
        self._is_alone = is_alone
        self._votes = Votes()
        self._is_fresh = False
        self._is_settling = False
        self._verdict: tuple[Ballot, array[int]] | None = None
        self._goes_on = True
        self.is_in_core = False
        """Whether the core is half-way through a change: only the garbage collector,
        or a policy that calls back, can find it so."""
        self._facts: deque[News] = deque()
        self._open_brackets: dict[int, None] = {}
        self._last_bracket = 0
        self.failure: Failure | None = None
        self.num_late = 0

    @property
    def is_busy(self) -> bool:
        """Whether a change or its effects are under way: votes have to wait."""
        return self.is_in_core or self._is_settling

    def call(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make a call on the replica, and carry out what follows.

        Raises:
            InvariantError: If the replica broke a law: it is over.
            OrderError: If the replica is at work, and somehow called this.
        """
        if self.is_in_core:
            raise OrderError("a call from within the cache")
        self.is_in_core = True
        try:
            result = method(*args, **kwargs)
        except InvariantError as error:
            self.fail(error)
            raise
        finally:
            self.is_in_core = False
        if not self._is_alone:
            # No verdict may follow that would.
            self._forget_ended()
        self.settle()
        return result

    def forward(self, requests: Sequence[Request]) -> int:
        """Open a bracket on the replica, and take note that a forward has begun."""
        number = self.replica.calls.forward(requests)
        self._open_brackets[number] = None
        self._last_bracket = number
        return number

    def fail(self, error: Failure) -> None:
        """Let nothing change any more; only the first failure counts."""
        if self.failure is None:
            self.failure = error
            self._on_failed(error)

    # Votes: what this rank learns by itself.

    def sink(self, seq: int, claim: int) -> None:
        """Vouch for no more than ``claim`` of a transaction."""
        if self._may_vote(seq):
            self._votes.sink(seq, claim)

    def quiet(self, seq: int) -> None:
        """Promise not to touch a transaction's pages again."""
        if self._may_vote(seq):
            self._votes.quiet(seq)

    def answer(self, seq: int, boundaries: list[int]) -> None:
        """Say which boundaries a lookup found restorable."""
        if self._may_vote(seq):
            self._votes.answer(seq, boundaries)
        else:
            # Its deadline, or its request's end, was first: nobody asks any more.
            self.num_late += 1

    def _may_vote(self, seq: int) -> bool:
        if not self.replica.look.is_open(seq):
            return False
        self._changed()
        return True

    def _changed(self) -> None:
        if not self._is_fresh:
            self._is_fresh = True
            if not self._is_settling:
                self._wake()

    # Brackets finish in order: the ballot has room for one number.

    def finish_bracket(self, number: int) -> None:
        """Take note that a forward touches its pages no more."""
        del self._open_brackets[number]
        oldest = next(iter(self._open_brackets), self._last_bracket + 1)
        self._votes.finished = oldest - 1
        self._changed()

    # The one door through which verdicts are applied.

    def settle(self) -> None:
        """Apply a lone rank's votes and carry out effects until nothing is left."""
        if self._is_settling or self.is_in_core or self.failure is not None:
            return
        self._is_settling = True
        try:
            self._settle()
        except (InvariantError, RankError) as error:
            # The embedder's task is not to blame: the next call of anyone raises this.
            self.fail(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a bug of ours
            bug = InvariantError(f"a verdict or its effects raised {error!r}")
            bug.__cause__ = error
            self.fail(bug)
        finally:
            self._is_settling = False
        self._on_settled()

    def _settle(self) -> None:
        while self.failure is None:
            self._carry_out()
            if self._is_fresh and self._is_alone:
                self._is_fresh = False
                ballot = self.replica.ballot()
                self._apply(ballot, self._votes.fill(ballot))
            elif self._verdict is not None:
                verdict, self._verdict = self._verdict, None
                self._goes_on = self._apply(*verdict)
            elif self._facts:
                # Observers last, and one at a time, for they may have more to say.
                self._tell_observer(self._facts.popleft())
            else:
                return

    def _apply(self, ballot: Ballot, verdict: array[int]) -> bool:
        self.is_in_core = True
        try:
            goes_on = self.replica.apply(ballot, verdict)
            self._forget_ended()
        finally:
            self.is_in_core = False
        return goes_on

    def _forget_ended(self) -> None:
        for seq in self._votes.said():
            if not self.replica.look.is_open(seq):
                self._votes.forget(seq)

    def _carry_out(self) -> None:
        for effect in self.replica.take_effects():
            if isinstance(effect, Fact | PagesCached | PagesDropped):
                self._facts.append(effect)
            elif isinstance(effect, Restored | Settled | Shortened | Ended):
                self._tell_request(effect)
            else:
                self._plans.start(effect)

    # Several ranks: between a ballot and its verdict lies a minimum over all of them.

    def cast(self, *, goes_on: bool) -> tuple[Ballot, array[int]]:
        """Return this rank's ballot and vote; see ``Votes.going`` for ``goes_on``."""
        self._is_fresh = False
        self._votes.going = goes_on
        ballot = self.replica.ballot()
        return ballot, self._votes.fill(ballot)

    def conclude(self, ballot: Ballot, verdict: array[int]) -> bool:
        """Apply what all ranks agreed on; return whether all of them go on."""
        self._verdict = (ballot, verdict)
        self.settle()
        return self._goes_on

    @property
    def has_news(self) -> bool:
        """Whether this rank has learnt something since it last cast."""
        return self._is_fresh
