"""Blocking jobs on threads of our own.

The rule: a call returns or raises only when none of its jobs runs any more, whatever
happens to its task, because a job reads and writes memory that its caller lent.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

import anyio
import anyio.lowlevel

from asyncache.core import ClosedError
from asyncache.threads._outlast import outlast
from asyncache.threads._pauses import Pauses

_Part = TypeVar("_Part")


class Stop(threading.Event):
    """Set when a job should end at its next page: nobody waits for its answer.

    Args:
        pauses: The job's, if others come first.
    """

    def __init__(self, pauses: Pauses | None = None) -> None:
        super().__init__()
        self._pauses = pauses
        self._guard = threading.Lock()
        self._interrupts: list[Callable[[], None]] = []

    def set(self) -> None:
        super().set()
        with self._guard:
            for interrupt in self._interrupts:
                interrupt()

    def pause(self) -> None:
        """Let jobs pass that come first. To be called between two pages."""
        if self._pauses is not None and not self.is_set():
            self._pauses.pause()

    @contextmanager
    def interrupting(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Have a call made, at once and on any thread, when a job in here should end.

        For jobs that block in what a call from outside can end, such as a socket that
        is shut down. It may be called twice, and never once the block is left.
        """
        with self._guard:
            self._interrupts.append(interrupt)
        try:
            if self.is_set():  # perhaps before anybody was told to interrupt
                interrupt()
            yield
        finally:
            with self._guard:
                self._interrupts.remove(interrupt)


class Workers:
    """A bounded number of threads that run the jobs of batches.

    No thread is started before the first job. Jobs beyond the number of threads wait
    in order; their number is bounded by the callers, who each wait for their own.

    Args:
        num_threads: Threads that run jobs at the same time.
        name: What the threads are called.
        owner: What is closed when they are, for the error of a later call.
        after: Whose jobs come first: between two pages these wait until there are none
            of those, but have a fifth of the time however many there are.
    """

    def __init__(
        self, num_threads: int, name: str, *, owner: str, after: Workers | None = None
    ) -> None:
        self._owner = owner
        self._pauses = None if after is None else Pauses(after.idle)
        self.executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._running: set[Stop] = set()
        self.idle: threading.Event = threading.Event()
        """Set while no job runs or waits."""
        self.idle.set()
        self._closed = False

    def check_open(self) -> None:
        """Raise ClosedError once the workers are closed."""
        if self._closed:
            raise ClosedError(f"the {self._owner} is closed")

    async def run(
        self,
        job: Callable[[_Part, Stop], None],
        parts: Sequence[_Part],
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Run ``job(part, stop)`` for each part; return when none of them runs.

        Cancelled, it drops the jobs that have not begun, sets ``stop`` for the others,
        waits for them, and raises then. After ``timeout_s`` it does the same, but
        returns.

        Raises:
            ClosedError: If the workers are closed.
        """
        self.check_open()
        stop, futures = self._begin(), list[Future[None]]()

        def drop() -> None:
            stop.set()
            for future in futures:
                future.cancel()

        loop = asyncio.get_running_loop()
        timer = None if timeout_s is None else loop.call_later(timeout_s, drop)
        try:
            for part in parts:
                futures.append(self.executor.submit(job, part, stop))
            await outlast(when_over(futures), on_cancel=drop)
        finally:
            if timer is not None:
                timer.cancel()
            self._end(stop)
            if not all(future.done() for future in futures):
                # The coroutine was thrown away, by close() or by a dead loop: nothing
                # can be awaited any more, and only blocking keeps the rule.
                stop.set()
                concurrent.futures.wait(futures)
        for future in futures:
            if not future.cancelled():
                future.result()

    def _begin(self) -> Stop:
        stop = Stop(self._pauses)
        self._running.add(stop)
        self.idle.clear()
        return stop

    def _end(self, stop: Stop) -> None:
        self._running.discard(stop)
        if not self._running:
            self.idle.set()

    async def aclose(self, last: Callable[[], None] | None = None) -> None:
        """Stop all jobs and return when no thread is left.

        Args:
            last: Done when no job runs any more, even if this is cancelled.
        """
        self._closed = True
        for stop in self._running:
            stop.set()
        # Joining blocks for as long as a job's system call takes: not on the loop.
        loop, gone = asyncio.get_running_loop(), anyio.Event()

        def shut_down() -> None:
            try:
                self.executor.shutdown(cancel_futures=True)
                if last is not None:
                    last()
            finally:
                with suppress(RuntimeError):  # the loop was closed meanwhile
                    loop.call_soon_threadsafe(gone.set)

        closer = threading.Thread(target=shut_down, name="asyncache-closer")
        closer.start()
        await gone.wait()
        while closer.is_alive():  # its last instructions
            await anyio.lowlevel.checkpoint()


def when_over(futures: Sequence[Future[None]]) -> anyio.Event:
    """Return an event of the running loop, set when no future is left to wait for."""
    loop, over, lock = asyncio.get_running_loop(), anyio.Event(), threading.Lock()
    num_left = len(futures)

    def count_down(_: Future[None]) -> None:
        nonlocal num_left
        with lock:
            num_left -= 1
            is_last = num_left == 0
        if is_last:
            with suppress(RuntimeError):  # the loop was closed under a waiting task
                loop.call_soon_threadsafe(over.set)

    for future in futures:
        future.add_done_callback(count_down)
    if not futures:
        over.set()
    return over
