"""BlockingCache: the object that a step loop without an event loop holds."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import warnings
from types import TracebackType
from typing import Self

from asyncache.core import ClosedError, Namespace, OrderError
from asyncache.engine._base_cache import BaseCache
from asyncache.engine._blocking_request import BlockingRequest
from asyncache.engine._limits import check_deadline
from asyncache.engine._loop_thread import LoopThread
from asyncache.engine._prompt import Prompt
from asyncache.engine._reports import StepReport
from asyncache.engine._runtime import Runtime
from asyncache.engine._tokens import TokenSource
from asyncache.engine._transfers import Transfers, live
from asyncache.engine._two_threads import TwoThreads
from asyncache.linkers import Linker
from asyncache.stores import Store


class BlockingCache(BaseCache[BlockingRequest]):
    """A :class:`KVCache` for step loops that live in a thread and never await.

    The same calls; those that are awaited there block here. All come from the thread
    that opened the cache. Transfers run on an event loop in another thread, which lives
    from :meth:`open` to :meth:`close` if there is a store.

    What transfers bring about is applied in the calls that wait (``restore``, ``wait``,
    ``wait_blocking``, :meth:`drain`) and in :meth:`step`, and nowhere else: between
    those nothing changes under the loop. So a loop that does not wait has to step.

    Args:
        layout: The pools of the model.
        device: Where their pages are; stays the caller's and outlives the cache.
        store: Where pages go and come from; opened and closed by the cache. None: only
            what is resident is reused.
        linker: In place of a store, something that moves pages in its own way.
        group: None, or a :class:`SoloGroup`: this face runs one rank.
        limits: Every bound.
        policy: Which unused prefix is evicted first, a sort key over tree leaves.
        writes: When pages are offloaded.
        launch: "eager" or "batch", as for :class:`KVCache`.
        barrier: Nothing to one rank, and so is ``aborts``.
        observer: Gets every event, in the thread of the loop. It may call the cache,
            but nothing that waits.

    Raises:
        ValueError: If the device was made for another layout, both a store and a
            linker are given, or a mode is unknown.
    """

    _queues: TwoThreads | None = None
    _thread: LoopThread | None = None

    # Opening and closing.

    def open(self) -> None:
        """Open the cache, and its store; this thread is its owner from now on.

        Raises:
            OrderError: If it was opened before: make another one.
            StoreError: If the store cannot be used at all.
        """
        if not self._is_alone:
            raise OrderError(
                f"a BlockingCache runs one rank, and none of {self._group}"
            )
        self._begin_open()
        # From here on close() can wait for what open() did not.
        self._queues = queues = TwoThreads()
        runtime = self._new_lone_runtime(queues)
        queues.serve(runtime.driver)
        if self._linker is not None and runtime.transfers is not None:
            try:
                self._move_in(queues, self._linker, runtime.transfers)
            except BaseException:
                self._is_closed = True
                raise
            runtime.call(runtime.replica.calls.attach)
        self._runtime = runtime

    def _move_in(
        self, queues: TwoThreads, linker: Linker, transfers: Transfers
    ) -> None:
        """Start the thread in which the linker and all transfers live."""
        self._thread = thread = queues.new_thread(
            lambda: live(linker, transfers, queues.notify), transfers.stop_all
        )
        try:
            thread.start()
            queues.wait(lambda: transfers.is_running or thread.is_over, math.inf)
        except BaseException:
            thread.cancel()
            self._outlast(queues, thread)
            raise
        if not transfers.is_running:
            self._check_gone(thread)
            raise ClosedError("the cache was closed while it was opened")

    def close(self) -> None:
        """End all requests, stop all transfers, close the store, join the thread.

        Takes at most ``Limits.close_s``. What was not offloaded by then is not:
        :meth:`drain` first. Closing twice is harmless, and waits as the first time.

        Raises:
            OrderError: If a transfer did not stop in time: something may still touch
                pages of the device, whose memory must be kept; close again to wait on.
                Or if the store was not closed in time. Or if called elsewhere.
        """
        queues, runtime, thread = self._queues, self._runtime, self._thread
        if queues is not None:
            queues.check_may_wait()
        if runtime is not None and (thread is not None or not self._is_closed):
            # Once more if it was interrupted the first time: it may not have been told.
            runtime.close()
        self._is_closed = True
        if queues is not None and thread is not None:
            interrupted = self._outlast(queues, thread)
            queues.turn()
            if interrupted is not None:
                raise interrupted
            self._check_gone(thread)

    def _outlast(
        self, queues: TwoThreads, thread: LoopThread
    ) -> KeyboardInterrupt | SystemExit | None:
        """Wait for the thread, at most ``Limits.close_s``; return an interruption.

        Not to be cut short by a signal: the device's memory is the caller's when this
        returns.
        """
        until, interrupted = time.monotonic() + self._limits.close_s, None
        while True:
            try:
                if not thread.is_over:
                    queues.wait(lambda: thread.is_over, until)
            except (KeyboardInterrupt, SystemExit) as error:
                interrupted = error
            else:
                return interrupted

    def _check_gone(self, thread: LoopThread) -> None:
        if not thread.is_over:
            raise self._not_gone()
        thread.join()
        self._thread = None
        if thread.error is not None and not isinstance(
            thread.error, asyncio.CancelledError
        ):
            raise thread.error

    # A store that comes and goes.

    def attach(
        self, store: Store | None = None, *, linker: Linker | None = None
    ) -> None:
        """Do as :meth:`KVCache.attach`; blocks until the store is open."""
        late = self._link_late(store, linker)
        runtime, queues = self._usable()
        queues.check_may_wait()
        self._linker, runtime.transfers = late, runtime.new_transfers(late)
        try:
            self._move_in(queues, late, runtime.transfers)
            runtime.call(runtime.replica.calls.attach)
        except BaseException:
            self._linker = runtime.transfers = None
            raise

    def detach(self) -> None:
        """Do as :meth:`KVCache.detach`; blocks until the store is closed."""
        runtime, queues = self._usable()
        queues.check_may_wait()
        thread, transfers = self._thread, runtime.transfers
        if thread is None or transfers is None:
            return
        runtime.call(runtime.replica.calls.detach)
        queues.out(transfers.stop_all)
        interrupted = self._outlast(queues, thread)
        queues.turn()
        if interrupted is not None:
            raise interrupted
        try:
            self._check_gone(thread)
        finally:
            if thread.is_over:
                self._linker = runtime.transfers = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._thread is not None and not self._thread.is_over:
            # First, for a warning may be an error.
            self._thread.stop()
            warnings.warn(
                f"{self!r} still has its thread: close it",
                ResourceWarning,
                stacklevel=2,
            )

    # Waiting.

    def step(self, *, timeout_s: float = 0.0) -> StepReport[BlockingRequest]:
        """Apply what has come in, and return what happened since the last step.

        Args:
            timeout_s: Seconds to wait at most where nothing has come in; it returns as
                soon as something does.

        Raises:
            ClosedError: If the cache is closed.
        """
        runtime, queues = self._usable()
        until = time.monotonic() + check_deadline("timeout_s", timeout_s, 0.0)
        num_in = queues.num_in
        queues.wait(
            lambda: queues.num_in > num_in or not runtime.reports.is_empty, until
        )
        runtime.check_usable()
        return runtime.reports.take()

    def drain(self, *, deadline_s: float | None = None) -> int:
        """Wait until, for a moment, no load and no offload is open or due.

        Args:
            deadline_s: Seconds to wait at most; ``Limits.drain_s`` if None.

        Returns:
            Loads and offloads that are still open or due; 0 unless the deadline came.

        Raises:
            ClosedError: If the cache is closed.
        """
        runtime, queues = self._usable()
        after_s = check_deadline("deadline_s", deadline_s, self._limits.drain_s)
        queues.check_may_wait()
        queues.turn()
        if not runtime.num_moving:
            return 0
        resting = threading.Event()
        with runtime.resting(resting):
            queues.wait(resting.is_set, time.monotonic() + after_s)
        return 0 if resting.is_set() else runtime.num_moving

    def prefetch(
        self,
        tokens: TokenSource,
        *,
        namespace: Namespace = None,
        deadline_s: float | None = None,
    ) -> int:
        """Do as :meth:`KVCache.prefetch`; blocks until it is done."""
        prompt = self._prefetch_of(tokens, namespace)
        with self._new_request(self._open_runtime(), prompt) as request:
            return request.restore(deadline_s=deadline_s).wait().num_tokens

    def _usable(self) -> tuple[Runtime[BlockingRequest], TwoThreads]:
        runtime = self._open_runtime()
        runtime.check_usable()
        assert self._queues is not None
        return runtime, self._queues

    def _new_request(
        self,
        runtime: Runtime[BlockingRequest],
        prompt: Prompt,
    ) -> BlockingRequest:
        assert self._queues is not None
        return BlockingRequest(runtime, prompt, queues=self._queues)
