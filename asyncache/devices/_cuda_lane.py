"""From events on the GPU to calls in Python: a thread that waits for each in turn.

=========  ===============================  =======================================
a mark is  when                             then
=========  ===============================  =======================================
pending    recorded on a stream             the thread sleeps in the driver, without
                                            the GIL, until the first of them is over
over       the thread woke up, or the       its call is made, once, with what the
           watch found it over              driver said
=========  ===============================  =======================================

That a thread wakes up is a hint, and what the driver says is the truth: a wake-up that
got lost is made good by the watch, which asks for the first mark of each stream several
times a second; so is a mark that waits its turn behind another stream's. An error of
the driver wakes the thread too. What never ends is never told: whoever waits has to
have a deadline.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

from asyncache.core import DeviceError
from asyncache.devices._cuda_api import NOT_READY, Context, check, code_of, cuda

Told = Callable[[DeviceError | None], object]
"""Called from a thread of the device with why the GPU is lost, or None."""
WATCH_S = 0.1
_FLAGS = (
    cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING
    | cuda.CUevent_flags.CU_EVENT_BLOCKING_SYNC
)


class Events:
    """Events that are used again and again: to destroy one may block."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def take(self) -> int:
        """Return an event that nobody waits for.

        Raises:
            DeviceError: If the driver has none.
        """
        with self._lock:
            if self._free:
                return self._free.pop()
        return check(cuda.cuEventCreate(_FLAGS), "no event could be made")

    def give(self, event: int) -> None:
        """Take an event back."""
        with self._lock:
            if not self._is_closed:
                self._free.append(event)
                return
        cuda.cuEventDestroy(event)

    def close(self) -> None:
        """Destroy all that were given back, and what is given back later."""
        with self._lock:
            self._is_closed = True
        while self._free:
            cuda.cuEventDestroy(self._free.pop())


class Mark:
    """A place in a stream's order, and the call to make once the GPU has passed it.

    Attributes:
        event: Recorded there; None if the driver refused: the whole stream has to be
            waited for then.
    """

    __slots__ = ("_call", "event", "is_over", "stream")

    def __init__(self, event: int | None, stream: int, call: Told) -> None:
        self.event = event
        self.stream = stream
        self.is_over = False
        self._call = call

    def wait(self) -> int:
        """Block until the GPU has passed it; return what the driver says."""
        if self.event is None:
            return code_of(cuda.cuStreamSynchronize(self.stream))
        return code_of(cuda.cuEventSynchronize(self.event))

    def look(self) -> int:
        """Return what the driver says of it now."""
        if self.event is None:
            return code_of(cuda.cuStreamQuery(self.stream))
        return code_of(cuda.cuEventQuery(self.event))

    def tell(self, error: DeviceError | None) -> None:
        """Make the call; what it raises is told where threads tell it."""
        try:
            self._call(error)
        except Exception:  # noqa: BLE001 - others wait for the thread that made it
            thread = threading.current_thread()
            what = threading.ExceptHookArgs((*sys.exc_info(), thread))
            threading.excepthook(what)


class Waiter(ABC):
    """A thread of the device that waits for the GPU.

    A daemon, because a wait that never ends must not keep the process; and with a share
    of the context, because a wait whose end got lost may outlive the device.
    """

    def __init__(self, context: Context, name: str) -> None:
        self._context = context
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises:
            DeviceError: If there is no room for another.
        """
        self._context.retain()
        try:
            self._thread.start()
        except RuntimeError as error:
            self._context.release()
            raise DeviceError(f"no thread {self._thread.name}: {error}") from error

    @abstractmethod
    def stop(self) -> None:
        """Let the thread end once it has nothing to wait for."""

    def join(self, timeout_s: float) -> None:
        """Block until the thread has ended, or for so long; it may never have begun."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @abstractmethod
    def _run(self) -> None:
        """Run in the thread, where the context is current."""

    def _main(self) -> None:
        self._context.make_current()
        try:
            self._run()
        finally:
            self._context.release()


class Lane(Waiter):
    """Marks that are waited for in order.

    Args:
        context: Where the streams are.
        events: Where events come from.
        watch: Looks after it while marks are pending.
        name: Of the thread.
    """

    def __init__(
        self, context: Context, events: Events, watch: Watch, name: str
    ) -> None:
        super().__init__(context, name)
        self._events = events
        self._watch = watch
        self._queue: SimpleQueue[Mark | None] = SimpleQueue()
        self._pending: deque[Mark] = deque()
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self._on_idle: list[Callable[[], None]] = []

    @property
    def num_pending(self) -> int:
        """Marks whose calls have not been made."""
        return len(self._pending)

    def mark(self, stream: int, call: Told) -> Mark:
        """Have a call made once a stream has run all that it was given by now.

        The context is current. If the GPU is lost by now, the call is made soon.
        """
        event = None
        try:
            event = self._events.take()
            check(cuda.cuEventRecord(event, stream), "an event could not be recorded")
        except DeviceError:
            if event is not None:
                self._events.give(event)
            event = None
        mark = Mark(event, stream, call)
        with self._lock:
            self._pending.append(mark)
            self._queue.put(mark)
        self._watch.wake()
        return mark

    def look(self) -> None:
        """Make good a wake-up that got lost; the context is current."""
        with self._lock:
            pending = list(self._pending)
        waiting = set[int]()
        for mark in pending:
            if mark.stream not in waiting:
                code = mark.look()
                if code == NOT_READY:
                    waiting.add(mark.stream)
                else:
                    self._over(mark, code)

    @contextmanager
    def telling_idle(self, call: Callable[[], None]) -> Iterator[None]:
        """Make a call, from whatever thread, each time that no mark is pending."""
        with self._lock:
            self._on_idle.append(call)
            is_idle = not self._pending
        if is_idle:
            call()
        try:
            yield
        finally:
            with self._lock:
                self._on_idle.remove(call)

    def stop(self) -> None:
        """Let the thread end once it has nothing to wait for."""
        self._queue.put(None)

    def _run(self) -> None:
        while (mark := self._queue.get()) is not None:
            self._over(mark, mark.wait())
            if mark.event is not None:
                # Only now: this thread may have been the last to wait for it.
                self._events.give(mark.event)

    def _over(self, mark: Mark, code: int) -> None:
        error = self._context.judge(code)
        # One at a time, or the watch would tell of the next while this is being told.
        with self._telling:
            if mark.is_over:
                return
            mark.is_over = True
            mark.tell(error)
            with self._lock:
                # Only now: what is not pending does not keep the device from closing.
                self._pending.remove(mark)
                calls = [] if self._pending else list(self._on_idle)
        for call in calls:
            call()


class Watch(Waiter):
    """Looks at what is pending several times a second, while there is something.

    On a thread of its own: a query waits for the driver's lock, which others may hold
    for long.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context, "asyncache-cuda-watch")
        self._lanes: Sequence[Lane] = ()
        self._wake = threading.Event()
        self._stopped = threading.Event()

    def over(self, lanes: Sequence[Lane]) -> None:
        """Look after these lanes."""
        self._lanes = lanes

    def wake(self) -> None:
        """Take note that a mark is pending."""
        self._wake.set()

    def stop(self) -> None:
        """Let the thread end."""
        self._stopped.set()
        self._wake.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if not any(lane.num_pending for lane in self._lanes):
                self._wake.wait()
                self._wake.clear()
                continue
            self._stopped.wait(WATCH_S)
            for lane in self._lanes:
                lane.look()
