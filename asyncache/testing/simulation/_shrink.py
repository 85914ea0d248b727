"""Make a failing case as small as it can be made, and still fail in the same way.

Chance in a run goes by the seed, and by what was asked of it before: a case with less
in it is another run, not a part of the same one. So each change is tried, and kept only
if the run that it makes fails like the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

from asyncache.testing.simulation._case import Case
from asyncache.testing.simulation._errors import BusyError, StuckError
from asyncache.testing.simulation._plain import Setting, plain
from asyncache.testing.simulation._simulate import simulate
from asyncache.testing.simulation._world import Result

MAX_RUNS = 400

_QUOTED = re.compile(r"(?<!\w)'[^']*'|\"[^\"]*\"")
_BRACKETED = re.compile(r"\([^()]*\)|\[[^][]*\]|\{[^{}]*\}|<[^<>]*>")
_NUMBER = re.compile(r"-?\d[\d.]*(?:e[-+]?\d+)?")


def way_of(error: BaseException) -> str:
    """Return how something failed, in words that any run of that failure has.

    It is the type, and the message without numbers and without what is quoted or in
    brackets, for these name whom it befell. What a loop that hangs lists is left out
    for the same reason.
    """
    text = str(error)
    if isinstance(error, BusyError | StuckError):
        text = text.partition(":")[0]
    text, before = _QUOTED.sub("", text), ""
    while text != before:
        before, text = text, _BRACKETED.sub("", text)
    words = _NUMBER.sub("", text).split()
    return " ".join([f"{type(error).__module__}.{type(error).__qualname__}:", *words])


def shrink(
    case: Case,
    *,
    max_runs: int = MAX_RUNS,
    on_run: Callable[[], object] | None = None,
) -> tuple[Case, Result]:
    """Return a smaller case that fails in the same way, by :func:`way_of`, and how.

    Taken away are whole epochs, actors by halves and one by one, and mishaps; settings
    are made plain. It ends once nothing more can be taken away, or all runs are spent;
    the same case is always made the same one.

    Args:
        case: One that fails.
        max_runs: Bound on the cases that are played, at least 1.
        on_run: Called before each.

    Raises:
        ValueError: If the case passes, or ``max_runs`` is too low.
    """
    if max_runs < 1:
        raise ValueError(f"max_runs must be at least 1, not {max_runs}")
    search = _Search(case, max_runs, on_run or (lambda: None))
    with suppress(_SpentError):
        while search.round():
            pass
    return search.case, search.result


class _SpentError(Exception):
    """All runs are spent."""


class _Search:
    """The smallest case so far, and what was tried to make it smaller."""

    def __init__(self, case: Case, max_runs: int, on_run: Callable[[], object]) -> None:
        self._runs_left = max_runs
        self._on_run = on_run
        self._tried: set[str] = set()
        self.case = case
        self.result = self._play(case)
        if self.result.failure is None:
            raise ValueError(f"seed {case.seed} passes: there is nothing to shrink")
        self._way = way_of(self.result.failure)

    def round(self) -> bool:
        """Try each change once; return whether any was kept."""
        before = self.case
        self._drop_epochs()
        self._drop_actors()
        for mishap, rate in list(self.case.rates.items()):
            if rate:
                self._try(self.case.without(mishap))
        for setting in Setting:
            self._try(plain(self.case, setting))
        return self.case is not before

    def _drop_epochs(self) -> None:
        for actors in self.case.epochs:
            gone = {actor.number for actor in actors}
            self._try(self.case.only(self._numbers.keys() - gone))

    def _drop_actors(self) -> None:
        size = max(1, len(self._numbers) // 2)
        while size:
            start = 0
            while start < len(self._numbers):
                numbers = list(self._numbers)
                kept = numbers[:start] + numbers[start + size :]
                if not self._try(self.case.only(kept)):
                    start += size
            size //= 2

    @property
    def _numbers(self) -> dict[int, None]:
        return {actor.number: None for actor in self.case.actors}

    def _try(self, case: Case) -> bool:
        """Keep a case if it fails like the first; return whether it does."""
        name = repr(case)
        if case == self.case or name in self._tried:
            return False
        self._tried.add(name)
        result = self._play(case)
        if result.failure is None or way_of(result.failure) != self._way:
            return False
        self.case, self.result = case, result
        return True

    def _play(self, case: Case) -> Result:
        if not self._runs_left:
            raise _SpentError
        self._runs_left -= 1
        self._on_run()
        return simulate(case)
