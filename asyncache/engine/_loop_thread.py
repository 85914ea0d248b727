"""An event loop in a thread of its own, which ends with its work or with its owner."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress

_LOOK_S = 1.0
"""Seconds between two looks at whether the owner still lives."""


class LoopThread:
    """Runs one coroutine, and calls that come from outside, in order.

    It is no daemon: a thread that is killed at the interpreter's exit may be writing
    memory. Instead it looks at its owner, and stops its work when that has ended.

    Args:
        work: Makes the coroutine; the thread ends with it.
        stop: Called in the thread to have the work end early.
        changed: Notified when the thread is over.
    """

    def __init__(
        self,
        work: Callable[[], Coroutine[object, object, None]],
        *,
        stop: Callable[[], None],
        changed: threading.Condition,
    ) -> None:
        self._work = work
        self._stop = stop
        self._changed = changed
        self._owner = threading.current_thread()
        self._calls: deque[Callable[[], object]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(
            target=self._run, name="asyncache", daemon=False
        )
        self.is_over = False
        """Whether nothing runs in the thread any more."""
        self.error: BaseException | None = None
        """What ended the work, if not its own return."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def call(self, call: Callable[[], object]) -> None:
        """Make a call on the loop; here and now if the thread is over.

        It is never lost: a loop that closes drops what it was told last, but what was
        queued is done by :meth:`flush`.
        """
        self._calls.append(call)
        if self.is_over:
            self.flush()
        elif self._loop is not None:
            with suppress(RuntimeError):  # closed: the thread will be over in a moment
                self._loop.call_soon_threadsafe(self._next)

    def flush(self) -> None:
        """Make the calls that a thread which is over has left."""
        while self._calls:
            self._next()

    def stop(self) -> None:
        """Have the work end early; from any thread."""
        self.call(self._stop)

    def cancel(self) -> None:
        """Cancel the work, which may have yet to be ready for :meth:`stop`."""
        self.call(self._cancel)

    def join(self) -> None:
        """Wait for the last instructions of a thread that is over."""
        self._thread.join()

    def _next(self) -> None:
        if self._calls:
            self._calls.popleft()()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # In the thread.

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001 - told to who joins the thread
            self.error = error
        finally:
            with self._changed:
                self.is_over = True
                self._changed.notify_all()

    async def _main(self) -> None:
        # In this order: a call that finds no loop is in the queue before it is emptied.
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        self.flush()
        self._loop.call_later(_LOOK_S, self._look)
        await self._work()

    def _look(self) -> None:
        """Stop once the owner has ended: nobody may close what only it could."""
        if not self._owner.is_alive():
            self._stop()
        elif self._loop is not None:
            self._loop.call_later(_LOOK_S, self._look)
