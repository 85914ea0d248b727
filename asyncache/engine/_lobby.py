"""Scopes of handlers on their way in and out, where calls are the loop's alone.

========  ==========================  ==================================================
scope     event                       next
========  ==========================  ==================================================
entered   the handler's ``with``      WAITING: the loop finds its prompt, on this rank
WAITING   the handler leaves          gone, as if it had never been
WAITING   the loop admits its prompt  OPEN, on every rank
sent      the handler leaves, then    OPEN, and over at once: the others have opened it
          the loop admits its prompt
OPEN      the handler leaves          a vote; with ``aborts="call"`` the loop finds it
                                      among those that left, and dismisses it
========  ==========================  ==================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

from asyncache.engine._prompt import Prompt, ScopeId, check_prompt

if TYPE_CHECKING:
    from asyncache.engine._base_request import BaseRequest

R = TypeVar("R", bound="BaseRequest[Any]")


class Lobby(Generic[R]):
    """The scopes of one rank that no replica knows yet, and those to be dismissed.

    Args:
        rank: Which rank this is.
        num_ranks: Of so many.
        cache: What these ranks' caches call themselves, and no others.
    """

    def __init__(self, rank: int, *, num_ranks: int, cache: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._cache = cache
        self._num_scopes = 0
        # Weak: a scope that its owner lost must be missed.
        self._waiting: WeakValueDictionary[int, R] = WeakValueDictionary()
        self._left: dict[int, bool] = {}

    def enter(self, request: R, prompt: Prompt) -> Prompt:
        """Let a scope wait; return its prompt with the scope's name."""
        number, self._num_scopes = self._num_scopes, self._num_scopes + 1
        self._waiting[number] = request
        return replace(prompt, scope=ScopeId(self._cache, self._rank, number))

    def check(self, prompt: Prompt) -> None:
        """Raise TypeError or ValueError unless it is a prompt of these caches."""
        check_prompt(prompt, cache=self._cache, num_ranks=self._num_ranks)

    def leave(self, prompt: Prompt) -> None:
        """Let the scope of a prompt wait no more, if it was entered."""
        if prompt.scope is not None:
            self._waiting.pop(prompt.scope.number, None)

    def requests(self) -> list[R]:
        """Return the requests that wait, in the order in which they came."""
        # Held first: one that its owner lost may go at any moment.
        waiting = list(self._waiting.items())
        return [request for _, request in sorted(waiting, key=itemgetter(0))]

    def is_ours(self, prompt: Prompt) -> bool:
        """Whether this rank has, or had, a scope for a prompt."""
        return prompt.scope is None or prompt.scope.rank == self._rank

    def take(self, prompt: Prompt) -> R | None:
        """Return whose prompt it is, who waits no more; None if nobody here waits."""
        if prompt.scope is None or prompt.scope.rank != self._rank:
            return None
        return self._waiting.pop(prompt.scope.number, None)

    def note_left(self, seq: int, *, aborted: bool) -> None:
        """Have the loop find that an open request's scope has ended."""
        self._left[seq] = aborted

    def left(self) -> Mapping[int, bool]:
        """Return whose scopes have ended: by request, whether it was aborted."""
        return dict(self._left)

    def forget_left(self, seq: int) -> None:
        """Take note that a request was dismissed, or has ended otherwise."""
        self._left.pop(seq, None)
