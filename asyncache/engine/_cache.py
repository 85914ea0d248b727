"""KVCache: the object that a serving loop holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio

from asyncache.core import (
    ClosedError,
    KVLayout,
    Namespace,
    OrderError,
    Policy,
    Replica,
    lru,
)
from asyncache.devices import Device
from asyncache.engine._gates import Gates
from asyncache.engine._limits import Limits, check_deadline
from asyncache.engine._observe import Observer, Statistics, snapshot
from asyncache.engine._reports import StepReport
from asyncache.engine._request import Request
from asyncache.engine._runtime import Runtime
from asyncache.engine._tokens import TokenSource, check_count, pack
from asyncache.engine._transfers import Transfers
from asyncache.linkers import Linker, StoreLinker
from asyncache.ranks import Group, SoloGroup
from asyncache.stores import Store


@dataclass(frozen=True, slots=True)
class WriteThrough:
    """Offload pages as soon as they are shared.

    Args:
        threshold: Requests that must have used a page before it is offloaded.
    """

    threshold: int = 1

    def __post_init__(self) -> None:
        check_count("threshold", self.threshold, least=1)


class KVCache:
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
        writes: When pages are offloaded.
        observer: Gets every event.

    Raises:
        ValueError: If the device was made for another layout, both a store and a
            linker are given, or the group has more ranks than one.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        device: Device,
        store: Store | None = None,
        linker: Linker | None = None,
        group: Group | None = None,
        limits: Limits | None = None,
        policy: Policy = lru,
        writes: WriteThrough | None = None,
        observer: Observer | None = None,
    ) -> None:
        if device.layout != layout:
            raise ValueError(f"the device was made for {device.layout}, not {layout}")
        if store is not None and linker is not None:
            raise ValueError("give a store or a linker, not both")
        self._group = group or SoloGroup()
        if self._group.num_ranks != 1:
            raise ValueError(f"this release runs 1 rank, not {self._group.num_ranks}")
        self._layout = layout
        self._device = device
        self._linker = StoreLinker(store, device) if store is not None else linker
        self._limits = limits or Limits()
        self._policy = policy
        self._writes = writes or WriteThrough()
        self._observer = observer
        self._runtime: Runtime | None = None
        self._home: asyncio.Task[None] | None = None
        self._is_opened = False
        self._is_closed = False

    def __repr__(self) -> str:
        """Show pages by state."""
        if self._runtime is None:
            return f"<KVCache, {'closed' if self._is_closed else 'not open'}>"
        return f"<KVCache {dict(self._runtime.replica.look.statistics().pools)}>"

    # Opening and closing.

    async def open(self) -> None:
        """Open the cache, and its store. Cancelled, it closes them again.

        Raises:
            OrderError: If it was opened before: make another one.
            ClosedError: If it was closed before, or meanwhile.
            StoreError: If the store cannot be used at all.
        """
        if self._is_opened or self._is_closed:
            raise OrderError("a cache is opened once")
        self._is_opened = True
        bounds = self._limits.bounds(write_threshold=self._writes.threshold)
        replica = Replica(self._layout, self._device.num_pages, bounds, self._policy)
        runtime = Runtime(
            self._layout,
            replica,
            self._linker,
            limits=self._limits,
            observer=self._observer,
        )
        if self._linker is not None and runtime.transfers is not None:
            await self._move_in(self._linker, runtime.transfers)
            runtime.call(replica.calls.attach)
        self._runtime = runtime

    async def _move_in(self, linker: Linker, transfers: Transfers) -> None:
        """Start the task in which the linker and all transfers live."""
        opened = anyio.Event()
        # A task group is left in the task that entered it, and its cancellation would
        # be the caller's: so it gets a task of its own, which aclose() ends.
        home = asyncio.create_task(  # noqa: TID251 - its owner is this cache
            _live(linker, transfers, opened), name="asyncache"
        )
        self._home = home
        try:
            await opened.wait()
        except BaseException:
            self._is_closed = True
            home.cancel()
            await self._outlast(home)
            raise
        if self._is_closed or home.cancelled():
            self._is_closed = True
            raise ClosedError("the cache was closed while it was opened")
        if home.done():
            self._is_closed, self._home = True, None
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
            runtime.check_home()
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
            self._home = None
            error = None if home.cancelled() else home.exception()
            if error is not None:
                raise error
            return
        transfers = None if self._runtime is None else self._runtime.transfers
        num = 0 if transfers is None else transfers.num_running
        what = f"{num} transfers did not stop" if num else "the store did not close"
        raise OrderError(f"{what} within {self._limits.close_s} s")

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

    # Requests.

    def request(
        self,
        tokens: TokenSource,
        *,
        namespace: Namespace = None,
        reserve_tokens: int = 0,
    ) -> Request:
        """Return the scope of a new request, to be used in a ``with`` block.

        Args:
            tokens: The prompt, ids in [0, 2**31), shape [num_tokens], at least one: a
                sequence of ints, a buffer of integers, or a CPU tensor.
            namespace: What must not share pages with others, such as a tenant or an
                adapter. None, "" and b"" are three namespaces.
            reserve_tokens: Tokens beyond the prompt whose pages are reserved with it.

        Raises:
            TypeError: If the tokens or the namespace are of another kind.
            ValueError: If an id or ``reserve_tokens`` is out of range.
            ClosedError: If the cache is closed.
        """
        runtime = self._open_runtime()
        runtime.check_usable()
        num_reserve_tokens = check_count("reserve_tokens", reserve_tokens)
        packed = pack(tokens)
        runtime.check_namespace(namespace)
        return Request(
            runtime, packed, namespace=namespace, num_reserve_tokens=num_reserve_tokens
        )

    @contextmanager
    def forward(self, requests: Sequence[Request]) -> Iterator[None]:
        """Bracket a run of the model over some requests.

        Until the block is left, nobody else gets a page that the model may touch,
        whatever becomes of the requests. Leave it only when the model has stopped: a
        thread that runs the model and is not waited for is outside of every bracket.

        Raises:
            ClosedError, AbortedError: If a request has ended.
            ValueError: If a request is of another cache.
        """
        runtime = self._open_runtime()
        self._check_ours(requests)
        states = [request._open_state() for request in requests]  # noqa: SLF001 - ours
        number = runtime.call(runtime.driver.forward, states)
        try:
            yield
        finally:
            runtime.driver.finish_bracket(number)
            runtime.driver.settle()

    def gates(self, requests: Sequence[Request]) -> Gates:
        """Return the gates of several requests' hits as one.

        Raises:
            ValueError: If a request is of another cache.
        """
        runtime = self._open_runtime()
        runtime.check_usable()
        self._check_ours(requests)
        loads = {load: None for request in requests for load in request._loads()}  # noqa: SLF001 - ours
        return runtime.gates(list(loads))

    def _check_ours(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request._runtime is not self._runtime:  # noqa: SLF001 - ours
                raise ValueError(f"{request!r} is of another cache")

    def match_nowait(self, tokens: TokenSource, *, namespace: Namespace = None) -> int:
        """Return how many leading tokens are resident now; changes nothing."""
        runtime = self._open_runtime()
        runtime.check_usable()
        return runtime.replica.look.match(pack(tokens), namespace=namespace)

    # The loop.

    async def step(self) -> StepReport:
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
        return await runtime.rest(deadline_s=after_s)

    def statistics(self) -> Statistics:
        """Return a snapshot; also of a cache that is closed."""
        runtime = self._runtime
        if runtime is None:
            raise ClosedError("the cache was never open")
        runtime.counters.late_completions = runtime.driver.num_late
        transfers = runtime.transfers
        return Statistics(
            replica=runtime.replica.look.statistics(),
            counters=snapshot(runtime.counters),
            transfers=0 if transfers is None else transfers.num_running,
        )

    def check_invariants(self) -> None:
        """Raise InvariantError unless every law of the state holds; for tests."""
        if self._runtime is not None:
            self._runtime.replica.look.check_invariants()

    def _open_runtime(self) -> Runtime:
        if self._runtime is None or self._is_closed:
            raise ClosedError("the cache is closed" if self._is_closed else "not open")
        return self._runtime


async def _live(linker: Linker, transfers: Transfers, opened: anyio.Event) -> None:
    try:
        try:
            await linker.open()
            await transfers.run(opened.set)
        finally:
            await linker.aclose()
    finally:
        opened.set()


async def _wait(
    home: asyncio.Task[None], timeout_s: float
) -> asyncio.CancelledError | None:
    """Wait for a task; return the cancellation that ended the wait, if one did."""
    try:
        await asyncio.wait([home], timeout=timeout_s)
    except asyncio.CancelledError as error:
        return error
    return None
