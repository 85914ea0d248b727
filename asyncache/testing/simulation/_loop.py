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
import heapq
import math
import threading
import warnings
from asyncio import events
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from contextvars import Context
from random import Random
from types import FrameType
from typing import Any, NoReturn, TypeVar, TypeVarTuple
from weakref import WeakSet

import anyio

from asyncache.testing.simulation._errors import BusyError, StuckError
from asyncache.testing.simulation._numbers import collector_off, numbered_scopes

MAX_TURNS = 20_000
"""Turns without time passing: far more than any chain of wake-ups needs."""
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SimulatedTask(asyncio.Task[T]):
    """A task with a number, by which it is hashed and ordered."""

    number: int = 0

    def __hash__(self) -> int:
        return self.number


class SimulatedFuture(asyncio.Future[T]):
    """A future with a number, by which it is hashed."""

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
        max_s: Virtual seconds that it may take; a heartbeat beside a task that waits
            for nothing would go on for ever.
        max_turns: Turns that may pass without time passing.

    Attributes:
        errors: What came to the exception handler, unless another was set.
        num_handles: Handles and tasks that were made so far.
    """

    def __init__(
        self,
        dice: Random | None = None,
        *,
        after: Callable[[], object] | None = None,
        max_s: float = math.inf,
        max_turns: int = MAX_TURNS,
    ) -> None:
        super().__init__()
        self._max_s = max_s
        self._max_turns = max_turns
        self._foreign = ""
        self._tasks: WeakSet[SimulatedTask[Any]] = WeakSet()
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
            try:
                handle._run()  # noqa: SLF001 - a handle is its loop's
                if self.after is not None:
                    self.after()
            except BaseException:
                self._due = ready[index + 1 :] + self._due
                raise

    def _wake(self) -> None:
        """Make ready what is due; if nothing is, let time pass until something is."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._due:
            self._pass_time()
        self._num_turns += 1
        if self._num_turns > self._max_turns:
            raise BusyError(
                f"{self._max_turns} turns and no time has passed: {self._who}"
            )
        while self._timers and self._timers[0][0] <= self._now:
            self._due.append(heapq.heappop(self._timers)[2])

    def _pass_time(self) -> None:
        if not self._timers:
            why = f" ({self._foreign})" if self._foreign else ""
            raise StuckError(f"nothing can ever happen any more{why}: {self._who}")
        due = self._timers[0][0]
        if due > self._max_s:
            raise StuckError(f"not over after {self._max_s} seconds: {self._who}")
        if due > self._now:
            self._now, self._num_turns = due, 0

    @property
    def _who(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        return ", ".join(f"{task.get_name()} in {_where(task)}" for task in tasks)

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._now

    def spend(self, seconds: float) -> None:
        """Let time pass at once, as it does where code computes on the loop."""
        self._now += seconds

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        self._check_open()
        handle = _Handle(callback, args, self, context)
        handle.number = self.next_number()
        self._due.append(handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            # Whoever calls may swallow the error, and leave a task that waits for ever.
            self._foreign = f"another thread called {callback!r}, and none may"
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
        if math.isnan(when):
            raise ValueError("a timer needs a time, not NaN")
        timer = _Timer(when, callback, args, self, context)
        timer.number = self.next_number()
        if when < math.inf:
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

    def create_future(self) -> asyncio.Future[Any]:
        future: SimulatedFuture[Any] = SimulatedFuture(loop=self)
        future.number = self.next_number()
        return future

    def lost_errors(self) -> list[BaseException]:
        """Return what tasks raised that nobody asked; a collector may never tell."""
        lost = [
            task.exception()
            for task in sorted(self._tasks, key=hash)
            if task.done() and not task.cancelled() and task._log_traceback  # noqa: SLF001 - no other way
        ]
        return [error for error in lost if error is not None]

    def forgive(self) -> None:
        """Let turns be counted anew: what comes now is the end."""
        self.after, self._num_turns, self._max_s = None, 0, math.inf

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def _make_task(
        self,
        _: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, T],
        **kwargs: Any,  # noqa: ANN401 - what a later Python adds
    ) -> SimulatedTask[T]:
        number = self.next_number()
        task = SimulatedTask(coro, loop=self, **{"name": f"task {number}", **kwargs})
        task.number = number
        self._tasks.add(task)
        return task

    def _check_open(self) -> None:
        if self.is_closed():
            raise RuntimeError("the loop is closed")

    def next_number(self) -> int:
        """Return a number that nothing of this loop has."""
        self.num_handles += 1
        return self.num_handles


def run(
    main: Callable[[], Coroutine[Any, Any, T]],
    *,
    dice: Random | None,
    after: Callable[[], object] | None = None,
    max_s: float = math.inf,
    max_turns: int = MAX_TURNS,
) -> T:
    """Run a coroutine in virtual time; return what it returns.

    The same dice and the same program make the same run, in any process, as long as the
    program does not go by addresses either: :func:`asyncio.as_completed` of coroutines
    does, of tasks it does not. Let it take the time from its loop; nothing else is
    virtual. The garbage collector is off meanwhile: when it runs depends on what ran
    before.

    Args:
        main: The program.
        dice: Orders what happens at the same moment, as for :class:`SimulatedLoop`.
        after: Called after each handle.
        max_s: As for :class:`SimulatedLoop`.
        max_turns: As for :class:`SimulatedLoop`.

    Raises:
        StuckError, BusyError: If the program hangs, or polls.
        ExceptionGroup: If a task raised what nobody asked it for, or something came to
            the loop's exception handler.
        RuntimeError: If a loop is running here.
    """
    if events._get_running_loop() is not None:  # noqa: SLF001 - asks and never raises
        raise RuntimeError("run() cannot be called from a running event loop")
    loop = SimulatedLoop(dice, after=after, max_s=max_s, max_turns=max_turns)
    with collector_off(), ExitStack() as patches:

        async def program() -> T:
            # Its class can only be found in a loop, and has to stay until that is gone.
            patches.enter_context(numbered_scopes(type(anyio.CancelScope())))
            return await main()

        runner = asyncio.Runner(loop_factory=lambda: loop)
        try:
            result = runner.run(program())
        except BaseException as error:
            _tear_down(runner, loop, error)
            raise
        lost = loop.lost_errors()
        _tear_down(runner, loop, None)
    if errors := [*lost, *map(_unhandled, loop.errors)]:
        raise BaseExceptionGroup("nobody handled", errors)
    return result


def _tear_down(
    runner: asyncio.Runner, loop: SimulatedLoop, error: BaseException | None
) -> None:
    """Cancel what is left; it is no part of the program, and hides no error of it."""
    loop.forgive()
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
