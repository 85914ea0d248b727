"""What a restore finds: how much of a prompt needs no computing, once it has landed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from typing import Generic, Protocol, TypeVar

from asyncache.core import RankError
from asyncache.engine._gates import Gates, Progress


class Signal(Protocol):
    """Something that happens once: an event of the face's own kind."""

    def set(self) -> object:
        """Say that it has happened."""

    def is_set(self) -> bool:
        """Whether it has happened."""


S = TypeVar("S", bound=Signal)


class Landing(Generic[S]):
    """How far a restore has come: written by its request, read through its hit."""

    __slots__ = (
        "agreed",
        "error",
        "is_agreed",
        "is_settled",
        "loads",
        "num_device_tokens",
        "settled",
    )

    def __init__(self, signal: Callable[[], S]) -> None:
        self.agreed = signal()
        self.settled = signal()
        """Set once nobody should wait for it any longer, whether it is so or not."""
        self.is_agreed = self.is_settled = False
        """The same on every rank, after the same step."""
        self.loads: list[Progress] = []
        self.num_device_tokens = 0
        self.error: RankError | None = None
        """Why nobody should wait any longer, though it has not settled."""

    def agree(self) -> None:
        """Take note of the answer."""
        self.is_agreed = True
        self.agreed.set()

    def settle(self) -> None:
        """Take note that nothing of it will change any more."""
        self.is_agreed = self.is_settled = True
        self.error = None
        self.agreed.set()
        self.settled.set()

    def give_up(self, error: RankError) -> None:
        """Let nobody wait any longer: a clock of this rank's, which decides no more."""
        self.error = error
        self.agreed.set()
        self.settled.set()


class BaseHit(ABC, Generic[S]):
    """The leading tokens of a prompt that need no computing."""

    def __init__(
        self,
        landing: Landing[S],
        *,
        num_tokens: Callable[[Landing[S]], int],
        gates: Callable[[list[Progress]], Gates],
        check_open: Callable[[], object],
    ) -> None:
        self._landing = landing
        self._num_tokens = num_tokens
        self._gates = gates
        self._check_open = check_open

    def __repr__(self) -> str:
        """Show how long the hit is and whether it is final."""
        state = "settled" if self.settled else "provisional"
        return f"<Hit {self.num_tokens} tokens, {state}>"

    @property
    def num_tokens(self) -> int:
        """Tokens of the hit, a multiple of ``page_tokens`` below the prompt's length.

        It may sink until the hit is settled, in any call, and the pages above it go
        with it; never afterwards. But a hit that was given back, by
        :meth:`BaseRequest.suspend` or for another restore, is 0.
        """
        return self._num_tokens(self._landing)

    @property
    def device_tokens(self) -> int:
        """Tokens of it that were resident when the restore was agreed."""
        return min(self._landing.num_device_tokens, self.num_tokens)

    @property
    def settled(self) -> bool:
        """Whether all of it has landed, or its end has come."""
        return self._landing.is_settled

    @property
    def agreed(self) -> bool:
        """Whether room was found and the store has answered; before, it is 0 tokens."""
        return self._landing.is_agreed

    @property
    def gates(self) -> Gates:
        """The gates of its layers, for a forward that starts before it is settled.

        Take them for each forward: a hit that sank may stand on other loads.
        """
        return self._gates(self._landing.loads)

    @abstractmethod
    def wait(self) -> object:
        """Wait until the hit is settled, at most until the restore's deadline.

        Raises:
            ClosedError: If the request ended meanwhile.
            RankError: If a group's ranks failed, or its loop stopped stepping.
        """

    def _check(self) -> None:
        """Raise what makes the hit worthless."""
        self._check_open()
        if self._landing.error is not None and not self._landing.is_settled:
            raise copy(self._landing.error)
