"""An event loop without threads, sockets or real time, whose order is a seed's.

Time stands still while anything can run, and jumps to the next timer when nothing can.
In each turn the handles that are ready are put in the order of their creation numbers,
and then shuffled by the seed; a task's handles go by the number of the task, so that
nothing depends on where an object lies in memory. Nothing that asyncio promises of the
order *within* a turn is kept, but that each handle runs once: code that is right must
not rest on more, for another loop, or one more await, would break it.

What would hang a real loop is an error here: :class:`StuckError` once nothing can ever
happen any more, :class:`BusyError` where time is not let pass.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import threading
import warnings
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from contextvars import Context
from random import Random
from types import FrameType
from typing import Any, NoReturn, TypeVar, TypeVarTuple
from weakref import ref

import anyio

from asyncache.core import AsyncacheError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_TURNS = 20_000
"""Turns without time passing: far more than any chain of wake-ups needs."""


class StuckError(AsyncacheError):
    """Nothing is ready, no timer is set, and the loop's main task has not ended."""


class BusyError(AsyncacheError):
    """Something polls: turn after turn, and no timer is ever waited for."""


class SimulatedTask(asyncio.Task[T]):
    """A task with a number, by which it is hashed and ordered."""

    number: int = 0

    def __hash__(self) -> int:
        return self.number


class _Handle(asyncio.Handle):
    __slots__ = ("number",)
    number: int


class _Timer(asyncio.TimerHandle):
    __slots__ = ("number",)
    number: int


def _order(handle: _Handle | _Timer) -> int:
    """Return by which number a handle takes its turn."""
    owner = getattr(handle._callback, "__self__", None)  # type: ignore[union-attr]  # noqa: SLF001 - a handle is its loop's
    return owner.number if isinstance(owner, SimulatedTask) else handle.number


class SimulatedLoop(asyncio.BaseEventLoop):
    """A loop in virtual time, for one thread.

    Args:
        dice: Shuffles what is ready in a turn; None keeps the order of a real loop.
        after: Called after each handle that ran; raising ends the loop's run.

    Attributes:
        errors: What came to the exception handler, unless another was set.
        num_handles: Handles and tasks that were made so far.
    """

    def __init__(
        self, dice: Random | None = None, *, after: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        self.after = after
        self.errors: list[dict[str, Any]] = []
        self.num_handles = 0
        self._dice = dice
        self._now = 0.0
        self._num_turns = 0
        self._due: list[_Handle | _Timer] = []
        self._timers: list[tuple[float, int, _Timer]] = []
        self._thread = threading.get_ident()
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]  # as generic

    def __repr__(self) -> str:
        return f"<SimulatedLoop at {self._now:.6f} s, {len(self._due)} ready>"

    # What BaseEventLoop leaves to those who have an order of their own.

    def _run_once(self) -> None:
        self._wake()
        ready, self._due = self._due, []
        if self._dice is not None and len(ready) > 1:
            ready.sort(key=_order)
            self._dice.shuffle(ready)
        for index, handle in enumerate(ready):
            if handle.cancelled():
                continue
            handle._run()  # noqa: SLF001 - a handle is its loop's
            if self.after is not None:
                try:
                    self.after()
                except BaseException:
                    self._due = ready[index + 1 :] + self._due
                    raise

    def _wake(self) -> None:
        """Make ready what is due; if nothing is, let time pass until something is."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if self._due:
            self._num_turns += 1
            if self._num_turns > MAX_TURNS:
                raise BusyError(
                    f"{MAX_TURNS} turns and no time has passed: {self._who}"
                )
        else:
            self._pass_time()
        while self._timers and self._timers[0][0] <= self._now:
            self._due.append(heapq.heappop(self._timers)[2])

    def _pass_time(self) -> None:
        if not self._timers:
            raise StuckError(f"nothing can ever happen any more: {self._who}")
        self._num_turns = 0
        self._now = max(self._now, self._timers[0][0])

    @property
    def _who(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        return ", ".join(f"{task.get_name()} in {_where(task)}" for task in tasks)

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._now

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        self._check_open()
        handle = _Handle(callback, args, self, context)
        handle.number = self._number()
        self._due.append(handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a simulated loop has one thread, and this is another")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self._check_open()
        timer = _Timer(when, callback, args, self, context)
        timer.number = self._number()
        heapq.heappush(self._timers, (when, timer.number, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is dropped when its time comes."""

    def close(self) -> None:
        super().close()
        self._due.clear()
        self._timers.clear()

    def run_in_executor(  # type: ignore[override]  # it never returns
        self,
        executor: Executor | None,  # noqa: ARG002 - the contract's
        func: Callable[..., Any],
        *args: Any,  # noqa: ANN401, ARG002 - the contract's
    ) -> NoReturn:
        raise RuntimeError(f"a simulated loop starts no thread, for {func!r} neither")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def _make_task(
        self,
        _: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, T],
        **kwargs: Any,  # noqa: ANN401 - what a later Python adds
    ) -> SimulatedTask[T]:
        number = self._number()
        task = SimulatedTask(coro, loop=self, **{"name": f"task {number}", **kwargs})
        task.number = number
        return task

    def _check_open(self) -> None:
        if self.is_closed():
            raise RuntimeError("the loop is closed")

    def _number(self) -> int:
        self.num_handles += 1
        return self.num_handles


def run(
    main: Callable[[], Coroutine[Any, Any, T]],
    *,
    dice: Random | None,
    after: Callable[[], object] | None = None,
) -> T:
    """Run a coroutine in virtual time; return what it returns.

    The same dice and the same program make the same run, in any process. The garbage
    collector is off meanwhile: when it runs depends on what ran before.

    Args:
        main: The program.
        dice: Orders what happens at the same moment, as for :class:`SimulatedLoop`.
        after: Called after each handle.

    Raises:
        StuckError, BusyError: If the program hangs, or polls.
        ExceptionGroup: If something came to the loop's exception handler.
    """
    loop = SimulatedLoop(dice, after=after)
    with _collector_off(), ExitStack() as patches:

        async def program() -> T:
            # Its class can only be found in a loop, and has to stay until that is gone.
            patches.enter_context(_numbered_scopes())
            return await main()

        runner = asyncio.Runner(loop_factory=lambda: loop)
        try:
            result = runner.run(program())
        except BaseException as error:
            _tear_down(runner, loop, error)
            raise
        _tear_down(runner, loop, None)
    if loop.errors:
        raise ExceptionGroup("nobody handled", [_unhandled(e) for e in loop.errors])
    return result


def _tear_down(
    runner: asyncio.Runner, loop: SimulatedLoop, error: BaseException | None
) -> None:
    """Cancel what is left; it is no part of the program, and hides no error of it."""
    loop.after = None
    try:
        runner.close()
    except (StuckError, BusyError) as second:
        if error is None:
            raise
        error.add_note(f"and while it was torn down: {second}")


def _unhandled(context: dict[str, Any]) -> Exception:
    error = context.get("exception")
    note = RuntimeError(str(context.get("message")))
    note.__cause__ = error
    return note


@contextmanager
def torn_down_quietly() -> Generator[None]:
    """Keep silent about what had not begun when the run that began it was torn down."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")
        yield


@contextmanager
def _collector_off() -> Generator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _numbered_scopes() -> Generator[None]:
    """Hash anyio's cancel scopes by the order in which they come to be hashed.

    It keeps them in sets, by address, and cancels what is in them in that order.
    """
    scope = type(anyio.CancelScope())
    was, counter = scope.__hash__, itertools.count(1)
    numbers: dict[int, tuple[int, ref[Any]]] = {}

    def number(self: anyio.CancelScope) -> int:
        known = numbers.get(id(self))
        if known is None:
            key = id(self)
            gone = ref(self, lambda _: numbers.pop(key, None))
            numbers[key] = known = (next(counter), gone)
        return known[0]

    scope.__hash__ = number  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        scope.__hash__ = was  # type: ignore[method-assign]


def _where(task: asyncio.Task[Any]) -> str:
    """Return the function and line in which a task is suspended, the innermost."""
    inner: Any = task.get_coro()
    frame: FrameType | None = None
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or frame
        inner = getattr(inner, "cr_await", None)
    if frame is None:
        return "nothing"
    return f"{frame.f_code.co_qualname}:{frame.f_lineno}"
