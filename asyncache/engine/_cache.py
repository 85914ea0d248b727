"""KVCache: the object that a serving loop holds."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import anyio

from asyncache.core import ClosedError, Namespace, OrderError
from asyncache.engine._base_cache import BaseCache
from asyncache.engine._base_request import Prompt
from asyncache.engine._limits import check_deadline
from asyncache.engine._queues import OneLoop
from asyncache.engine._reports import StepReport
from asyncache.engine._request import Request
from asyncache.engine._runtime import Runtime
from asyncache.engine._tokens import TokenSource
from asyncache.engine._transfers import Transfers, live
from asyncache.linkers import Linker
from asyncache.stores import Store


class KVCache(BaseCache[Request]):
    """A tree of prefixes over the paged pools of one model, linked to a store.

    Used from one event loop, as ``async with KVCache(...) as cache`` or with
    :meth:`open` and :meth:`aclose`, which may be called in different tasks. It starts
    no thread of its own, and its failures never cancel the caller.

    Args:
        layout: The pools of the model.
        device: Where their pages are; stays the caller's and outlives the cache.
        store: Where pages go and come from; opened and closed by the cache. None: only
            what is resident is reused.
        linker: In place of a store, something that moves pages in its own way.
        group: The ranks of the model. This release runs one.
        limits: Every bound.
        policy: Which unused prefix is evicted first, a sort key over tree leaves.
        writes: When pages are offloaded: :class:`WriteThrough` as they are shared,
            :class:`WriteBack` before eviction takes them, :class:`ReadOnly` never.
        launch: "eager" to start a load as soon as its restore is agreed, "batch" to
            start all that wait with :meth:`launch`.
        observer: Gets every event.

    Raises:
        ValueError: If the device was made for another layout, both a store and a
            linker are given, or the group has more ranks than one.
    """

    _home: asyncio.Task[None] | None = None

    # Opening and closing.

    async def open(self) -> None:
        """Open the cache, and its store. Cancelled, it closes them again.

        Raises:
            OrderError: If it was opened before: make another one.
            ClosedError: If it was closed before, or meanwhile.
            StoreError: If the store cannot be used at all.
        """
        self._begin_open()
        runtime = self._new_runtime(OneLoop())
        if self._linker is not None and runtime.transfers is not None:
            try:
                await self._move_in(self._linker, runtime.transfers)
            except BaseException:
                self._is_closed = True
                raise
            runtime.call(runtime.replica.calls.attach)
        self._runtime = runtime

    async def _move_in(self, linker: Linker, transfers: Transfers) -> None:
        """Start the task in which the linker and all transfers live."""
        opened = anyio.Event()
        # A task group is left in the task that entered it, and its cancellation would
        # be the caller's: so it gets a task of its own, which aclose() ends.
        home = asyncio.create_task(  # noqa: TID251 - its owner is this cache
            live(linker, transfers, opened.set), name="asyncache"
        )
        self._home = home
        try:
            await opened.wait()
        except BaseException:
            home.cancel()
            await self._outlast(home)
            raise
        if self._is_closed or home.cancelled():
            raise ClosedError("the cache was closed while it was opened")
        if home.done():
            self._home = None
            home.result()

    async def aclose(self) -> None:
        """End all requests, stop all transfers, close the store.

        Takes at most ``Limits.close_s``, whatever else is cancelled. What was not
        offloaded by then is not: :meth:`drain` first. Closing twice is harmless, and
        waits as the first time.

        Raises:
            OrderError: If a transfer did not stop in time: something may still touch
                pages of the device, whose memory must be kept. Or if the store was not
                closed in time.
        """
        runtime, home = self._runtime, self._home
        if runtime is not None:
            runtime.queues.check_home()
        if not self._is_closed:
            self._is_closed = True
            if runtime is not None:
                runtime.close()
            elif home is not None:
                home.cancel()
        if home is not None:
            await self._move_out(home)
        await self._group.aclose()

    async def _move_out(self, home: asyncio.Task[None]) -> None:
        cancelled = await self._outlast(home)
        if self._runtime is not None:
            self._runtime.driver.settle()
        if cancelled is not None:
            raise cancelled
        self._check_gone(home)

    async def _outlast(self, home: asyncio.Task[None]) -> asyncio.CancelledError | None:
        """Wait for the transfers, at most ``Limits.close_s``; return a cancellation.

        Not to be cut short by what cancelled the caller, once or again: the device's
        memory is the caller's when this returns. A shield holds off a scope, and a
        loop holds off ``task.cancel()``, which goes through every shield.
        """
        loop = asyncio.get_running_loop()
        until, cancelled = loop.time() + self._limits.close_s, None
        with anyio.CancelScope(shield=True):
            while not home.done() and loop.time() < until:
                cancelled = await _wait(home, until - loop.time()) or cancelled
        return cancelled

    def _check_gone(self, home: asyncio.Task[None]) -> None:
        if home.done():
            self._forget_home(home)
            error = None if home.cancelled() else home.exception()
            if error is not None:
                raise error
            return
        raise self._not_gone()

    def _forget_home(self, home: asyncio.Task[None]) -> None:
        """Have no such task, unless another has moved in meanwhile."""
        if self._home is home:
            self._home = None

    # A store that comes and goes.

    async def attach(
        self, store: Store | None = None, *, linker: Linker | None = None
    ) -> None:
        """Link a store to a cache that has none: resident prefixes go there too.

        Cancelled, or if the store cannot be opened, nothing is attached.

        Raises:
            OrderError: If one is attached already, or :meth:`detach` took this one away
                while it was opened.
            StoreError: If the store cannot be used at all.
        """
        late, runtime = self._link_late(store, linker), self._open_runtime()
        # So that nobody else attaches, and a close in the meantime finds what to stop.
        transfers = runtime.new_transfers(late)
        self._linker, runtime.transfers = late, transfers
        try:
            await self._move_in(late, transfers)
            _check_running(transfers)
            runtime.call(runtime.replica.calls.attach)
        except BaseException:
            self._forget(runtime, transfers)
            if self._home is not None and self._home.done():
                self._home = None
            raise

    def _forget(self, runtime: Runtime[Request], transfers: Transfers) -> None:
        """Have no store, unless another was attached meanwhile."""
        if runtime.transfers is transfers:
            self._linker = runtime.transfers = None

    async def detach(self) -> None:
        """Take the store away, close it, and keep no trace of it; go on without.

        Loads are cut, and lookups end as misses, for their requests to compute. Takes
        at most ``Limits.close_s``, whatever else is cancelled.

        Raises:
            OrderError: As for :meth:`aclose`; call it again to wait on.
        """
        runtime, home = self._open_runtime(), self._home
        runtime.check_usable()
        if home is None or runtime.transfers is None:
            return
        transfers = runtime.transfers
        runtime.call(runtime.replica.calls.detach)
        transfers.stop_all()
        try:
            await self._move_out(home)
        finally:
            if home.done():
                self._forget_home(home)
                self._forget(runtime, transfers)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # Waiting.

    async def step(self) -> StepReport[Request]:
        """Apply what is agreed, and return what happened since the last step.

        With one rank everything is agreed as it happens, and nobody has to call this;
        for loops that do, it is where other tasks run.

        Raises:
            ClosedError: If the cache is closed.
        """
        runtime = self._open_runtime()
        runtime.check_usable()
        await asyncio.sleep(0)
        runtime.driver.settle()
        runtime.check_usable()
        return runtime.reports.take()

    async def drain(self, *, deadline_s: float | None = None) -> int:
        """Wait until, for a moment, no load and no offload is open or due.

        Args:
            deadline_s: Seconds to wait at most; ``Limits.drain_s`` if None.

        Returns:
            Loads and offloads that are still open or due; 0 unless the deadline came.

        Raises:
            ClosedError: If the cache is closed, or closes meanwhile.
        """
        runtime = self._open_runtime()
        runtime.check_usable()
        after_s = check_deadline("deadline_s", deadline_s, self._limits.drain_s)
        if not runtime.num_moving:
            return 0
        resting = anyio.Event()
        with runtime.resting(resting), anyio.move_on_after(after_s) as scope:
            await resting.wait()
        return runtime.num_moving if scope.cancelled_caught else 0

    async def prefetch(
        self,
        tokens: TokenSource,
        *,
        namespace: Namespace = None,
        deadline_s: float | None = None,
    ) -> int:
        """Bring what is stored of a prompt to the device, for whoever asks next.

        Needs room for the whole prompt while it runs, and holds nothing afterwards.
        Cancel it, and it stops like any request.

        Args:
            tokens: The prompt, as for :meth:`request`.
            namespace: As for :meth:`request`.
            deadline_s: As for :meth:`Request.restore`.

        Returns:
            Leading tokens that are resident now.
        """
        with self.request(tokens, namespace=namespace) as request:
            hit = await request.restore(deadline_s=deadline_s)
            await hit.wait()
            return hit.num_tokens

    def _new_request(
        self,
        runtime: Runtime[Request],
        prompt: Prompt,
    ) -> Request:
        return Request(runtime, prompt)


def _check_running(transfers: Transfers) -> None:
    if not transfers.is_running:
        raise OrderError("the store was detached while it was attached")


async def _wait(
    home: asyncio.Task[None], timeout_s: float
) -> asyncio.CancelledError | None:
    """Wait for a task; return the cancellation that ended the wait, if one did."""
    try:
        await asyncio.wait([home], timeout=timeout_s)
    except asyncio.CancelledError as error:
        return error
    return None
