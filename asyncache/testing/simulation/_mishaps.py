"""What goes wrong in a simulated world, how often, and what was seen of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from random import Random


class Mishap(Enum):
    """What can go wrong; the value says it in the words of a log."""

    # A store.
    SHUT = "store cannot be opened"
    STALL = "store stalls"
    OUTAGE = "store is out"
    RAISE = "store raises"
    HIDE = "key hidden"
    LOSE = "key lost before its read"
    CORRUPT = "page corrupt"
    PARTIAL = "answer in part"
    SHORT = "answer too short"
    FULL = "store full"
    UNREPORTED = "write lands, said to have failed"
    STUBBORN = "call outlasts its caller"
    # A device.
    REFUSE = "copy refused"
    TEAR = "copy fails half-way"
    DIE = "device dies"
    # A client.
    SCOPE = "client's scope cancelled"
    TASK = "client's task cancelled"
    LATE = "client's task cancelled as its answer comes"
    DEADLINE = "restore's deadline passes"
    # Those who run the cache.
    RESET = "reset"
    REVISION = "reset with new weights"
    DETACH = "detach"
    CLOSE = "close with all open"
    STRANGER = "transfer cancelled by a stranger"
    KILL = "cache's task killed"
    # One of several ranks.
    CUT = "step cut short"
    SLOW = "rank slow"
    SILENT = "rank silent"
    DEAD = "rank dead"
    AHEAD = "rank a call ahead"
    LEAVE = "rank leaves"


STORE = (
    Mishap.SHUT,
    Mishap.STALL,
    Mishap.OUTAGE,
    Mishap.RAISE,
    Mishap.HIDE,
    Mishap.LOSE,
    Mishap.CORRUPT,
    Mishap.PARTIAL,
    Mishap.SHORT,
    Mishap.FULL,
    Mishap.UNREPORTED,
    Mishap.STUBBORN,
)
DEVICE = (Mishap.REFUSE, Mishap.TEAR, Mishap.DIE)
CLIENT = (Mishap.SCOPE, Mishap.TASK, Mishap.LATE)
RANK = (
    Mishap.CUT,
    Mishap.SLOW,
    Mishap.SILENT,
    Mishap.DEAD,
    Mishap.AHEAD,
    Mishap.LEAVE,
)


class Weather:
    """Says when something goes wrong.

    Args:
        dice: What it goes by.
        rates: How often each mishap strikes where it could, in [0, 1]; absent is 0.
        on_strike: Told of each.
    """

    def __init__(
        self,
        dice: Random | None = None,
        rates: Mapping[Mishap, float] | None = None,
        *,
        on_strike: Callable[[Mishap], object] | None = None,
    ) -> None:
        self._dice = dice or Random(0)
        self._rates = dict(rates or {})
        self._on_strike = on_strike
        self._is_paused = False
        self.is_out = False
        """Whether the store gives no answer to anyone, until it is set again."""

    def strikes(self, mishap: Mishap) -> bool:
        """Whether this goes wrong now."""
        rate = 0.0 if self._is_paused else self._rates.get(mishap, 0.0)
        # Dice are thrown only for what can happen: what cannot has no part in a run.
        if not rate or self._dice.random() >= rate:
            return False
        self.note(mishap)
        return True

    def note(self, mishap: Mishap) -> None:
        """Take note of a mishap that somebody else brought about."""
        if self._on_strike is not None:
            self._on_strike(mishap)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let nothing go wrong meanwhile."""
        self._is_paused, was = True, self._is_paused
        self.is_out = False
        try:
            yield
        finally:
            self._is_paused = was
