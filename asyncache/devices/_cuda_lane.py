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
got lost is made good by the watch, which asks for the first mark of each lane several
times a second. An error of the driver wakes the thread too. What never ends is never
told: whoever waits has to have a deadline.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
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

    def take(self) -> int:
        """Return an event that nobody waits for.

        Raises:
            DeviceError: If the driver has none.
        """
        try:
            return self._free.pop()
        except IndexError:
            return check(cuda.cuEventCreate(_FLAGS), "no event could be made")

    def give(self, event: int) -> None:
        """Take an event back."""
        self._free.append(event)

    def destroy(self) -> None:
        """Destroy all that were given back."""
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
        """Make the call."""
        self._call(error)


class Lane:
    """Marks that are waited for in order, on a thread that the first one starts.

    Args:
        context: Where the streams are.
        events: Where events come from.
        watch: Looks after it while marks are pending.
        name: Of the thread.
    """

    def __init__(
        self, context: Context, events: Events, watch: Watch, name: str
    ) -> None:
        self._context = context
        self._events = events
        self._watch = watch
        self._name = name
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[Mark | None] = SimpleQueue()
        self._pending: deque[Mark] = deque()
        self._lock = threading.Lock()
        self._on_idle: Callable[[], None] | None = None

    @property
    def num_pending(self) -> int:
        """Marks that are not over."""
        return len(self._pending)

    def mark(self, stream: int, call: Told) -> Mark:
        """Have a call made once a stream has run all that it was given by now.

        The context is current. If the GPU is lost by now, the call is made at once.
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
            self._start()
        self._queue.put(mark)
        self._watch.wake()
        return mark

    def look(self) -> None:
        """Make good a wake-up that got lost; the context is current."""
        while (mark := self._first()) is not None:
            code = mark.look()
            if code == NOT_READY:
                return
            self._over(mark, code)

    def _first(self) -> Mark | None:
        with self._lock:
            return self._pending[0] if self._pending else None

    def when_idle(self, call: Callable[[], None]) -> None:
        """Make a call once no mark is pending, from whatever thread."""
        with self._lock:
            self._on_idle = call
            is_idle = not self._pending
        if is_idle:
            call()

    def stop(self) -> None:
        """Let the thread end once it has nothing to wait for."""
        self._queue.put(None)

    @property
    def is_stopped(self) -> bool:
        """Whether the thread has ended, or never began."""
        return self._thread is None or not self._thread.is_alive()

    def _start(self) -> None:
        if self._thread is None:
            # A daemon: a wait that never ends must not keep the process.
            self._thread = threading.Thread(
                target=self._run, name=self._name, daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        self._context.make_current()
        while (mark := self._queue.get()) is not None:
            self._over(mark, mark.wait())
            if mark.event is not None:
                # Only now: this thread may have been the last to wait for it.
                self._events.give(mark.event)

    def _over(self, mark: Mark, code: int) -> None:
        error = self._context.judge(code)
        with self._lock:
            if mark.is_over:
                return
            mark.is_over = True
            # In order as a rule; but a lost wake-up is found by the other thread.
            self._pending.remove(mark)
            idle = self._on_idle if not self._pending else None
        mark.tell(error)
        if idle is not None:
            idle()


class Watch:
    """Looks at the first mark of each lane several times a second, while there is one.

    On a thread of its own: a query waits for the driver's lock, which others may hold
    for long.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lanes: Sequence[Lane] = ()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def over(self, lanes: Sequence[Lane]) -> None:
        """Look after these lanes."""
        self._lanes = lanes

    def wake(self) -> None:
        """Take note that a mark is pending."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="asyncache-cuda-watch", daemon=True
                    )
                    self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        """Let the thread end."""
        self._stopped.set()
        self._wake.set()

    @property
    def is_stopped(self) -> bool:
        """Whether the thread has ended, or never began."""
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        self._context.make_current()
        while not self._stopped.is_set():
            if not any(lane.num_pending for lane in self._lanes):
                self._wake.wait()
                self._wake.clear()
                continue
            self._stopped.wait(WATCH_S)
            for lane in self._lanes:
                lane.look()
