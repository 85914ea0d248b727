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
from asyncache.engine._reports import Reports, StepReport
from asyncache.engine._request import Request
from asyncache.engine._runtime import Runtime
from asyncache.engine._tokens import TokenSource, pack
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
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int):
            raise TypeError(f"threshold must be an int, not {self.threshold!r}")
        if self.threshold < 1:
            raise ValueError(f"threshold must be at least 1, not {self.threshold}")


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
        self._is_closed = False

    def __repr__(self) -> str:
        """Show pages by state."""
        if self._runtime is None:
            return f"<KVCache, {'closed' if self._is_closed else 'not open'}>"
        return f"<KVCache {dict(self._runtime.replica.statistics().pools)}>"

    # Opening and closing.

    async def open(self) -> None:
        """Open the cache, and its store.

        Raises:
            OrderError: If it was opened before: make another one.
            StoreError: If the store cannot be used at all.
        """
        if self._runtime is not None or self._is_closed:
            raise OrderError("a cache is opened once")
        if self._linker is not None:
            await self._linker.open()
        bounds = self._limits.bounds(write_threshold=self._writes.threshold)
        replica = Replica(self._layout, self._device.num_pages, bounds, self._policy)
        runtime = Runtime(
            self._layout,
            replica,
            self._linker,
            limits=self._limits,
            observer=self._observer,
        )
        self._runtime = runtime
        if runtime.transfers is not None:
            ready = anyio.Event()
            home = runtime.transfers.run(ready.set)
            # A task group is left in the task that entered it, and its cancellation
            # would be the caller's: so it gets a task of its own, which aclose() ends.
            self._home = asyncio.create_task(home, name="asyncache")  # noqa: TID251
            await ready.wait()
            runtime.call(replica.attach)

    async def aclose(self) -> None:
        """End all requests, stop all transfers, close the store.

        Takes at most ``Limits.close_s``, and whatever the store's own closing takes.
        What was not offloaded by then is not: :meth:`drain` first. Closing twice is
        harmless.

        Raises:
            OrderError: If a transfer did not stop in time: something may still touch
                pages of the device, whose memory must be kept.
        """
        if self._is_closed:
            return
        self._is_closed = True
        runtime = self._runtime
        if runtime is None:
            return
        runtime.end_all()
        runtime.is_closed = True
        # Not to be cut short by the cancellation that brought us here: the device's
        # memory is the caller's again once this returns.
        with anyio.CancelScope(shield=True):
            stopped = await self._stop_transfers(runtime)
            if self._linker is not None and stopped:
                await self._linker.aclose()
            await self._group.aclose()
        if not stopped:
            num = runtime.transfers.num_running if runtime.transfers else 0
            raise OrderError(
                f"{num} transfers did not stop within {self._limits.close_s} s"
            )

    async def _stop_transfers(self, runtime: Runtime) -> bool:
        if self._home is None or runtime.transfers is None:
            return True
        runtime.transfers.stop_all()
        await asyncio.wait([self._home], timeout=self._limits.close_s)
        return self._home.done()

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
        if isinstance(reserve_tokens, bool) or not isinstance(reserve_tokens, int):
            raise TypeError(f"reserve_tokens must be an int, not {reserve_tokens!r}")
        if reserve_tokens < 0:
            raise ValueError(f"reserve_tokens must be at least 0, not {reserve_tokens}")
        packed = pack(tokens)
        return Request(
            runtime, packed, namespace=namespace, num_reserve_tokens=reserve_tokens
        )

    @contextmanager
    def forward(self, requests: Sequence[Request]) -> Iterator[None]:
        """Bracket a run of the model over some requests.

        Until the block is left, nobody else gets a page that the model may touch,
        whatever becomes of the requests. Leave it only when the model has stopped: a
        thread that runs the model and is not waited for is outside of every bracket.

        Raises:
            ClosedError, AbortedError: If a request has ended.
        """
        runtime = self._open_runtime()
        states = [request._open_state() for request in requests]  # noqa: SLF001 - ours
        number = runtime.call(runtime.replica.forward, states)
        runtime.driver.open_bracket(number)
        try:
            yield
        finally:
            runtime.driver.finish_bracket(number)
            runtime.driver.settle()

    def gates(self, requests: Sequence[Request]) -> Gates:
        """Return the gates of several requests' hits as one."""
        runtime = self._open_runtime()
        loads = {load: None for request in requests for load in request._loads()}  # noqa: SLF001 - ours
        return runtime.gates(list(loads))

    def match_nowait(self, tokens: TokenSource, *, namespace: Namespace = None) -> int:
        """Return how many leading tokens are resident now; changes nothing."""
        runtime = self._open_runtime()
        return runtime.replica.match(pack(tokens), namespace=namespace)

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
        if runtime.reports is None:
            runtime.reports = Reports()
        await asyncio.sleep(0)
        runtime.driver.settle()
        runtime.check_usable()
        return runtime.reports.take()

    async def drain(self, *, deadline_s: float | None = None) -> int:
        """Wait until no load and no offload is open or due.

        Args:
            deadline_s: Seconds to wait at most; ``Limits.drain_s`` if None.

        Returns:
            Loads and offloads that are still open or due; 0 unless the deadline came.
        """
        runtime = self._open_runtime()
        runtime.check_usable()
        after_s = check_deadline("deadline_s", deadline_s, self._limits.drain_s)
        with anyio.move_on_after(after_s):
            await runtime.rest()
        return runtime.replica.num_moving

    def statistics(self) -> Statistics:
        """Return a snapshot; also of a cache that is closed."""
        runtime = self._runtime
        if runtime is None:
            raise ClosedError("the cache was never open")
        runtime.counters.late_completions = runtime.driver.num_late
        transfers = runtime.transfers
        return Statistics(
            replica=runtime.replica.statistics(),
            counters=snapshot(runtime.counters),
            transfers=0 if transfers is None else transfers.num_running,
        )

    def check_invariants(self) -> None:
        """Raise InvariantError unless every law of the state holds; for tests."""
        if self._runtime is not None:
            self._runtime.replica.check_invariants()

    def _open_runtime(self) -> Runtime:
        if self._runtime is None or self._is_closed:
            raise ClosedError("the cache is closed" if self._is_closed else "not open")
        return self._runtime
