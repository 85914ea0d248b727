"""Run a scenario again and again, and break it at its first, second, third step.

Like SQLite's n-th failing allocation: n grows until a run gets through, so that every
call and every await has been the one at which things went wrong. Nothing here sleeps
or looks at a clock: the same scenario is broken at the same places each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from enum import Enum, auto
from functools import partial
from typing import TypeVar, assert_never

import anyio

State = TypeVar("State")

Fresh = Callable[[], AbstractAsyncContextManager[State]]
"""Makes the state for one run, and takes it down again."""
Step = Callable[[State], Awaitable[object]]
"""An async function of the state: the scenario, or the check after it."""


class CancelStyle(Enum):
    """How a run is cancelled at a suspension."""

    LEVEL = auto()
    """By an anyio scope: every later await raises as well, shielded ones excepted."""
    EDGE = auto()
    """By ``task.cancel()``: one await raises, through any shield."""
    LATE_EDGE = auto()
    """By ``task.cancel()`` in the turn in which what was awaited has come about: the
    answer is there, and the scenario never sees it."""


class InjectedError(Exception):
    """What :func:`fail_nth` raises unless told otherwise."""


async def cancel_nth(
    scenario: Step[State],
    *,
    fresh: Fresh[State],
    check: Step[State],
    styles: Iterable[CancelStyle] = tuple(CancelStyle),
    max_runs: int = 1000,
) -> int:
    """Cancel a scenario at each of its suspensions; check what is left after each.

    A scenario suspends where its own task gives way to others; suspensions of tasks
    that it starts are theirs. It runs in the caller's task, on asyncio. It must not
    swallow ``task.cancel()``; to finish in spite of a scope's cancellation is fine.

    Args:
        scenario: Run once for each of its suspensions, and once to its end, a style.
        fresh: Makes the state of each run; the check runs before it is taken down.
        check: Raises if what a run left behind is not what must hold.
        styles: How to cancel; every way by default.
        max_runs: Bound on the runs of one style.

    Returns:
        Suspensions of the scenario, in the style that found most.

    Raises:
        AssertionError: If the scenario swallows ``task.cancel()``, or is never done
            within ``max_runs``.
    """
    most = 0
    for style in styles:
        for nth in range(1, max_runs + 1):
            async with fresh() as state:
                canceller = Canceller(scenario(state), nth, style)
                with noting(f"cancelled at suspension {nth}, {style.name}"):
                    was_cancelled = await canceller.run()
                    await check(state)
            if not was_cancelled:
                most = max(most, nth - 1)
                break
        else:
            raise AssertionError(f"still suspends after {max_runs} runs, {style.name}")
    return most


class FailPoint:
    """Counts the calls of a fake, and fails the n-th of them.

    Args:
        nth: The call that fails, the first being 1.
        error: What :meth:`hit` raises then.
    """

    def __init__(self, nth: int, error: type[Exception] = InjectedError) -> None:
        if nth < 1:
            raise ValueError(f"nth must be at least 1, not {nth}")
        self._nth = nth
        self._error = error
        self.num_calls = 0

    @property
    def has_failed(self) -> bool:
        """Whether the n-th call has come."""
        return self.num_calls >= self._nth

    def trips(self) -> bool:
        """Count a call; return whether it is the one to fail in its own way."""
        self.num_calls += 1
        return self.num_calls == self._nth

    def hit(self) -> None:
        """Count a call; raise if it is the one to fail."""
        if self.trips():
            raise self._error(f"injected failure of call {self._nth}")


async def fail_nth(
    scenario: Step[State],
    *,
    fresh: Callable[[FailPoint], AbstractAsyncContextManager[State]],
    check: Step[State],
    error: type[Exception] = InjectedError,
    max_runs: int = 1000,
) -> int:
    """Fail each call that a scenario makes to a fake; check what is left after each.

    Args:
        scenario: Run once for each call, and once without a failure. It may raise
            ``error``, or make do.
        fresh: Makes the state of each run around the point that its fakes call: one
            that may raise calls :meth:`FailPoint.hit`, one that answers with a status
            calls :meth:`FailPoint.trips`.
        check: Raises if what a run left behind is not what must hold.
        error: What the point raises.
        max_runs: Bound on the runs.

    Returns:
        Calls that the scenario made in the run without a failure.

    Raises:
        AssertionError: If every one of ``max_runs`` runs reached its failure.
    """
    for nth in range(1, max_runs + 1):
        point = FailPoint(nth, error)
        async with fresh(point) as state:
            with noting(f"call {nth} failed"):
                try:
                    await scenario(state)
                except error:
                    if not point.has_failed:
                        raise
                await check(state)
        if not point.has_failed:
            return point.num_calls
    raise AssertionError(f"still makes more calls after {max_runs} runs")


class Canceller:
    """Runs an awaitable in the current task, and cancels it at its n-th suspension."""

    def __init__(
        self,
        scenario: Awaitable[object],
        nth: int,
        style: CancelStyle,
        *,
        on_cancel: Callable[[], object] | None = None,
    ) -> None:
        self._on_cancel = on_cancel
        self._scenario = scenario
        self._nth = nth
        self._style = style
        self._scope = anyio.CancelScope()
        self._num_suspensions = 0
        self._task: asyncio.Task[object] | None = None
        self._has_cancelled = False

    async def run(self) -> bool:
        """Return whether there was an n-th suspension."""
        self._task = asyncio.current_task()
        assert self._task is not None
        num_others = self._task.cancelling()
        try:
            with self._scope:
                await self
        except asyncio.CancelledError:
            # Ours, and nobody else's as well?
            if not self._has_cancelled or self._task.cancelling() > num_others + 1:
                raise
        else:
            if self._has_cancelled:
                raise AssertionError("the scenario swallowed task.cancel()")
        finally:
            if self._has_cancelled:
                self._task.uncancel()
        return self._num_suspensions >= self._nth

    def __await__(self) -> Generator[object, object, object]:
        """Forward every suspension to the loop, and what comes back."""
        steps = self._scenario.__await__()
        resume: Callable[[], object] = partial(next, steps)
        while True:
            try:
                awaited = resume()
            except StopIteration as end:
                return end.value
            self._num_suspensions += 1
            if self._num_suspensions == self._nth:
                self._cancel(awaited)
            try:
                value = yield awaited
            except BaseException as error:  # noqa: BLE001 - thrown on, not caught
                resume = partial(steps.throw, error)
            else:
                resume = partial(steps.send, value)

    def _cancel(self, awaited: object) -> None:
        if self._on_cancel is not None:
            self._on_cancel()
        match self._style:
            case CancelStyle.LEVEL:
                self._scope.cancel()
            case CancelStyle.EDGE:
                self._cancel_natively()
            case CancelStyle.LATE_EDGE if isinstance(awaited, asyncio.Future):
                # Before the task's own callback, which would resume it.
                awaited.add_done_callback(self._cancel_natively)
            case CancelStyle.LATE_EDGE:
                self._cancel_natively()
            case _:
                assert_never(self._style)

    def _cancel_natively(self, _: object = None) -> None:
        assert self._task is not None
        self._has_cancelled = self._task.cancel()


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Say on whatever is raised where it happened."""
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise
