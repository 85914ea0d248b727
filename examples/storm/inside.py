"""When a loop is inside the cache: in its own callbacks, and in calls made on it.

For a look at a running process from outside, it puts a stopwatch around what is public,
and around each callback of the loop. Do not copy this into a server.
"""

from __future__ import annotations

import asyncio
import functools
import time
from asyncio.events import Handle
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum
from typing import Any, NamedTuple
from unittest.mock import patch

from asyncache import Hit, KVCache, Request

_CALLS: tuple[tuple[type, str], ...] = (
    (Request, "__enter__"),
    (Request, "__exit__"),
    (Request, "append"),
    (Request, "commit"),
    (Request, "extend"),
    (Request, "suspend"),
    (KVCache, "request"),
    (KVCache, "statistics"),
)
_COROUTINES: tuple[tuple[type, str], ...] = ((Request, "restore"), (Hit, "wait"))


class Owner(Enum):
    """Whose callback it is."""

    CACHE = "the cache's own tasks"
    CLIENTS = "clients, cache calls included"
    REST = "batch, bar, ticker"


class Stay(NamedTuple):
    """A stretch that the loop spent inside the cache."""

    start: float
    stop: float
    worked_s: float
    """What the loop's thread worked; other processes, and locks, do not count."""

    def within(self, start: float, stop: float) -> float:
        """Return which part of it fell into this time."""
        common = min(stop, self.stop) - max(start, self.start)
        return max(0.0, common) / max(self.stop - self.start, 1e-9)


class Inside:
    """Watches one loop, and everything called on any cache meanwhile.

    Attributes:
        runs_s: The length of each callback, by owner.
    """

    def __init__(self) -> None:
        self.runs_s: dict[Owner, list[float]] = {owner: [] for owner in Owner}
        self._stays: list[Stay] = []
        self._depth = 0
        self._start = self._worked_s = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._start, self._worked_s = time.perf_counter(), time.thread_time()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            worked_s = time.thread_time() - self._worked_s
            self._stays.append(Stay(self._start, time.perf_counter(), worked_s))

    def take(self, start: float, stop: float) -> Stay:
        """Return how long it was inside from then to then; forget what was before.

        Times are those of ``time.perf_counter()``; ask in order, and from the loop.
        """
        stays, self._stays = self._stays, []
        parts = [(stay, stay.within(start, stop)) for stay in stays]
        inside_s = sum((stay.stop - stay.start) * part for stay, part in parts)
        worked_s = sum(stay.worked_s * part for stay, part in parts)
        return Stay(start, start + inside_s, worked_s)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch meanwhile."""
        with ExitStack() as patches:
            for kind, name in _CALLS:
                call = self._around(getattr(kind, name))
                patches.enter_context(patch.object(kind, name, call))
            for kind, name in _COROUTINES:
                steps = self._around_steps(getattr(kind, name))
                patches.enter_context(patch.object(kind, name, steps))
            forward = self._around_bracket(KVCache.forward)
            patches.enter_context(patch.object(KVCache, "forward", forward))
            run = self._around_callback(Handle._run)  # noqa: SLF001 - no other way
            patches.enter_context(patch.object(Handle, "_run", run))
            yield

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any call
            with self:
                return call(*args, **kwargs)

        return timed

    def _around_steps(
        self, call: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(call)
        async def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any call
            return await _Steps(call(*args, **kwargs), self)

        return timed

    def _around_bracket(
        self, call: Callable[..., AbstractContextManager[None]]
    ) -> Callable[..., AbstractContextManager[None]]:
        @contextmanager
        def timed(*args: Any, **kwargs: Any) -> Iterator[None]:  # noqa: ANN401 - any call
            with ExitStack() as bracket:
                with self:
                    bracket.enter_context(call(*args, **kwargs))
                try:
                    yield
                finally:
                    with self:
                        bracket.close()

        return timed

    def _around_callback(
        self, run: Callable[[Handle], None]
    ) -> Callable[[Handle], None]:
        def timed(handle: Handle) -> None:
            owner, start = _owner(handle), time.perf_counter()
            if owner is Owner.CACHE:
                with self:
                    run(handle)
            else:
                run(handle)
            self.runs_s[owner].append(time.perf_counter() - start)

        return timed


class _Steps:
    """Awaits something, each step of it inside."""

    def __init__(self, awaited: Awaitable[Any], inside: Inside) -> None:
        self._awaited = awaited
        self._inside = inside

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._awaited.__await__()
        step: Callable[[], Any] = functools.partial(next, steps)
        while True:
            try:
                with self._inside:
                    future = step()
            except StopIteration as stop:
                return stop.value
            try:
                yield future
            except BaseException as error:  # noqa: BLE001 - raised where it belongs
                step = functools.partial(steps.throw, error)
            else:
                step = functools.partial(next, steps)


def _owner(handle: Handle) -> Owner:
    callback = handle._callback  # type: ignore[attr-defined]  # noqa: SLF001 - no other way
    callback = getattr(callback, "func", callback)
    who = getattr(callback, "__self__", None)
    if isinstance(who, asyncio.Task):
        name = who.get_name()
        if name.startswith("asyncache"):
            return Owner.CACHE
        return Owner.CLIENTS if name.startswith("client") else Owner.REST
    module = getattr(callback, "__module__", None) or type(who).__module__
    return Owner.CACHE if module.startswith("asyncache") else Owner.REST
