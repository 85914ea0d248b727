"""How a KVCache comes and goes, and its store with it: on every rank, or on none."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import anyio

from asyncache.core import ClosedError, OrderError, StoreError
from asyncache.engine._base_cache import BaseCache
from asyncache.engine._handshake import shake_hands
from asyncache.engine._patience import wait_out
from asyncache.engine._queues import OneLoop
from asyncache.engine._ranked import RankedRuntime
from asyncache.engine._request import Request
from asyncache.engine._runtime import Runtime
from asyncache.engine._transfers import Transfers, live
from asyncache.linkers import Linker
from asyncache.stores import Store


class CacheLife(BaseCache[Request]):
    """Opening, closing, attaching and detaching.

    Linker and transfers live in a task of the cache's own, its *home*, so that no
    failure in there and no cancellation out here ever crosses.
    """

    _home: asyncio.Task[None] | None = None

    # Opening and closing.

    async def open(self) -> None:
        """Open the cache, and its store. Cancelled, it closes them again.

        With a group every rank opens its own at the same time, and all or none are
        open afterwards; but where all could, and one is cancelled as it hears of that,
        the others hear of its end when they agree on something next.

        Raises:
            OrderError: If it was opened before: make another one.
            ClosedError: If it was closed before, or meanwhile.
            StoreError: If the store cannot be used at all.
            RankError: If the ranks differ in layout, limits, modes or version, one is
                gone, or could not open its store.
        """
        self._begin_open()
        try:
            runtime = await self._new_runtime()
            if self._linker is not None and runtime.transfers is not None:
                await self._open_store(runtime, self._linker, runtime.transfers)
            self._check_not_closed()
        except BaseException:
            self._is_closed = True
            await self._leave(self._limits.close_s)
            raise
        self._runtime = runtime

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise ClosedError("the cache was closed while it was opened")

    async def _open_store(
        self, runtime: Runtime[Request], linker: Linker, transfers: Transfers
    ) -> None:
        cancelled = await self._move_in_agreed(runtime, linker, transfers)
        if cancelled is not None:
            # The other ranks have opened theirs, and hear of it when they step.
            await self._move_out_again(transfers)
            raise cancelled

    async def _new_runtime(self) -> Runtime[Request]:
        if self._is_alone:
            return self._new_lone_runtime(OneLoop())
        names = [pool.name for pool in self._layout.pools]
        agreed = await shake_hands(
            self._group,
            self._settings(),
            [self._device.num_pages[name] for name in names],
            timeout_s=self._limits.barrier_s,
        )
        return RankedRuntime(
            self._layout,
            self._new_replica(dict(zip(names, agreed.num_pages, strict=True))),
            self._linker,
            device=self._device,
            limits=self._limits,
            observer=self._observer,
            queues=OneLoop(),
            group=self._group,
            name=agreed.name,
            is_pipelined=self._barrier == "pipelined",
            aborts_by_call=self._aborts == "call",
        )

    async def _move_in_agreed(
        self, runtime: Runtime[Request], linker: Linker, transfers: Transfers
    ) -> asyncio.CancelledError | None:
        """Begin to use a linker, on every rank or on none.

        Returns:
            What cancelled this too late: every rank has begun by now.
        """
        error: BaseException | None = None
        try:
            await self._move_in(linker, transfers)
            _check_running(transfers)
        except BaseException as failed:
            # Else the other ranks must hear of it first.
            if not isinstance(runtime, RankedRuntime):
                raise
            error = failed
        cancelled = None
        if isinstance(runtime, RankedRuntime):
            cancelled = await self._agree_to_begin(runtime, transfers, error)
        runtime.driver.call(runtime.replica.calls.attach)
        return cancelled

    async def _agree_to_begin(
        self,
        runtime: RankedRuntime[Request],
        transfers: Transfers,
        error: BaseException | None,
    ) -> asyncio.CancelledError | None:
        """Raise unless every rank has a linker that works; have none then."""
        try:
            is_fine, cancelled = await runtime.barrier.agree(is_fine=error is None)
            if error is None and not is_fine:
                no_store = StoreError("another rank could not open its store")
                error = cancelled or no_store
            _raise_if(error)
        except BaseException:
            await self._move_out_again(transfers)
            raise
        return cancelled

    async def _move_out_again(self, transfers: Transfers) -> None:
        """Stop what :meth:`_move_in` has started, if it did."""
        if self._home is not None:
            transfers.stop_all()
            await self._outlast(self._home)

    async def _move_in(self, linker: Linker, transfers: Transfers) -> None:
        """Start the task in which the linker and all transfers live."""
        opened = anyio.Event()
        # A task group is left in the task that entered it, and its cancellation would
        # be the caller's: so it gets a task of its own, which aclose() ends.
        home = asyncio.create_task(  # noqa: TID251 - its owner is this cache
            live(linker, transfers, opened.set), name="asyncache"
        )
        self._home = home
        # One that is cancelled before its first step never says so itself.
        home.add_done_callback(lambda _: opened.set())
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
        until = asyncio.get_running_loop().time() + self._limits.close_s
        try:
            if home is not None:
                await self._move_out(home)
        finally:
            await self._leave(until - asyncio.get_running_loop().time())

    async def _leave(self, timeout_s: float) -> None:
        """Leave the group, so that the other ranks hear of it; cancelled or not."""
        is_ours = self._is_opened or not self._is_group_used()
        if is_ours and not self._is_alone:
            cancelled = await wait_out(self._leaving(), timeout_s)
            if cancelled is not None:
                raise cancelled

    def _leaving(self) -> asyncio.Task[None]:
        if isinstance(self._runtime, RankedRuntime):
            return self._runtime.barrier.close()
        return asyncio.create_task(  # noqa: TID251 - its owner is who waits for it
            self._group.aclose(), name="asyncache leave"
        )

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
        memory is the caller's when this returns.
        """
        return await wait_out(home, self._limits.close_s)

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

        Cancelled, or if the store cannot be opened, nothing is attached. With a group,
        every rank attaches its own between the same two steps, and if one of them
        cannot, none does; where all could, a rank that is cancelled has one too.

        Raises:
            OrderError: If one is attached already, or :meth:`detach` took this one away
                while it was opened.
            StoreError: If the store cannot be used at all, or another rank's cannot.
        """
        late, runtime = self._link_late(store, linker), self._open_runtime()
        if isinstance(runtime, RankedRuntime):
            runtime.barrier.check_gap()
        # So that nobody else attaches, and a close in the meantime finds what to stop.
        transfers = runtime.new_transfers(late)
        self._linker, runtime.transfers = late, transfers
        try:
            cancelled = await self._move_in_agreed(runtime, late, transfers)
        except BaseException:
            self._forget(runtime, transfers)
            if self._home is not None and self._home.done():
                self._home = None
            raise
        if cancelled is not None:
            raise cancelled

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
        if runtime.replica.look.has_store:
            # Once: called again, to wait on, it is no call of every rank.
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


def _check_running(transfers: Transfers) -> None:
    if not transfers.is_running:
        raise OrderError("the store was detached while it was attached")


def _raise_if(error: BaseException | None) -> None:
    if error is not None:
        raise error
