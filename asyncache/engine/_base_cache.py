"""What a cache is to a serving loop, whether that awaits or blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Literal, TypeVar, assert_never

from asyncache.core import (
    MAX_TOKEN,
    Bounds,
    ClosedError,
    KVLayout,
    Namespace,
    OrderError,
    Policy,
    Replica,
    lru,
)
from asyncache.devices import Device
from asyncache.engine._base_request import BaseRequest, Prompt
from asyncache.engine._gates import Gates, LoadBatch
from asyncache.engine._limits import Limits
from asyncache.engine._observe import Observer, Statistics, snapshot
from asyncache.engine._queues import Queues
from asyncache.engine._runtime import Runtime
from asyncache.engine._tokens import TokenSource, check_count, pack
from asyncache.engine._writes import ReadOnly, WriteBack, Writes, WriteThrough
from asyncache.linkers import Linker, StoreLinker
from asyncache.ranks import Group, SoloGroup
from asyncache.stores import Store

R = TypeVar("R", bound=BaseRequest[Any])


class BaseCache(ABC, Generic[R]):
    """The calls that are the same however a loop waits.

    Those that only change or look at the state are here; those that wait, such as
    ``step()`` and ``drain()``, are each face's own.
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
        writes: Writes | None = None,
        launch: Literal["eager", "batch"] = "eager",
        observer: Observer | None = None,
    ) -> None:
        if device.layout != layout:
            raise ValueError(f"the device was made for {device.layout}, not {layout}")
        if launch not in {"eager", "batch"}:
            raise ValueError(f'launch must be "eager" or "batch", not {launch!r}')
        self._group = group or SoloGroup()
        if self._group.num_ranks != 1:
            raise ValueError(f"this release runs 1 rank, not {self._group.num_ranks}")
        self._layout = layout
        self._device = device
        self._linker = self._link(store, linker)
        self._limits = limits or Limits()
        self._policy = policy
        self._writes = writes or WriteThrough()
        self._launch = launch
        self._observer = observer
        self._runtime: Runtime[R] | None = None
        self._is_opened = False
        self._is_closed = False

    def __repr__(self) -> str:
        """Show pages by state."""
        name = type(self).__name__
        if self._runtime is None:
            return f"<{name}, {'closed' if self._is_closed else 'not open'}>"
        return f"<{name} {dict(self._runtime.replica.look.statistics().pools)}>"

    # Opening and closing.

    def _begin_open(self) -> None:
        """Take note that the cache is being opened, once."""
        if self._is_opened or self._is_closed:
            raise OrderError("a cache is opened once")
        self._is_opened = True

    def _new_runtime(self, queues: Queues) -> Runtime[R]:
        return Runtime(
            self._layout,
            Replica(self._layout, self._device.num_pages, self._bounds(), self._policy),
            self._linker,
            limits=self._limits,
            observer=self._observer,
            queues=queues,
        )

    def _bounds(self) -> Bounds:
        threshold, low_water = 0, 0
        match self._writes:
            case WriteThrough(threshold):
                pass
            case WriteBack(low_water):
                threshold = 1
            case ReadOnly():
                pass
            case _:
                assert_never(self._writes)
        return self._limits.bounds(
            write_threshold=threshold,
            low_water=low_water,
            launches=self._launch == "batch",
        )

    def _link(self, store: Store | None, linker: Linker | None) -> Linker | None:
        if store is not None and linker is not None:
            raise ValueError("give a store or a linker, not both")
        return StoreLinker(store, self._device) if store is not None else linker

    def _link_late(self, store: Store | None, linker: Linker | None) -> Linker:
        """Return what is to be attached to an open cache that has no store."""
        self._open_runtime().check_usable()
        if self._linker is not None:
            raise OrderError("a store is attached: detach() it first")
        late = self._link(store, linker)
        if late is None:
            raise ValueError("give a store or a linker")
        return late

    def _not_gone(self) -> OrderError:
        """Return what closing raises when its time is up."""
        transfers = None if self._runtime is None else self._runtime.transfers
        num = 0 if transfers is None else transfers.num_running
        what = f"{num} transfers did not stop" if num else "the store did not close"
        return OrderError(f"{what} within {self._limits.close_s} s")

    @abstractmethod
    def _new_request(
        self,
        runtime: Runtime[R],
        prompt: Prompt,
    ) -> R:
        """Return a request of this face's kind."""

    # Requests.

    def request(
        self,
        tokens: TokenSource,
        *,
        namespace: Namespace = None,
        reserve_tokens: int = 0,
        priority: int = 0,
    ) -> R:
        """Return the scope of a new request, to be used in a ``with`` block.

        Args:
            tokens: The prompt, ids in [0, 2**31), shape [num_tokens], at least one: a
                sequence of ints, a buffer of integers, or a CPU tensor.
            namespace: What must not share pages with others, such as a tenant or an
                adapter. None, "" and b"" are three namespaces.
            reserve_tokens: Tokens beyond the prompt whose pages are reserved with it.
            priority: What the ``priority`` policy keeps its pages by.

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
        level = check_count("priority", priority, least=-MAX_TOKEN)
        prompt = Prompt(packed, namespace, num_reserve_tokens, level)
        return self._new_request(runtime, prompt)

    @contextmanager
    def forward(self, requests: Sequence[R]) -> Iterator[None]:
        """Bracket a run of the model over some requests.

        Until the block is left, nobody else gets a page that the model may touch,
        whatever becomes of the requests. Leave it only when the model has stopped: a
        thread that runs the model and is not waited for is outside of every bracket.
        Read page tables inside it: entering is a call like any other, with which a hit
        that has not settled may sink, and take pages along.

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

    def gates(self, requests: Sequence[R]) -> Gates:
        """Return the gates of several requests' hits as one, as they stand now.

        Raises:
            ValueError: If a request is of another cache.
        """
        runtime = self._open_runtime()
        runtime.check_usable()
        self._check_ours(requests)
        loads = {load: None for request in requests for load in request._loads()}  # noqa: SLF001 - ours
        return runtime.gates(list(loads))

    def _check_ours(self, requests: Sequence[R]) -> None:
        for request in requests:
            if request._runtime is not self._runtime:  # noqa: SLF001 - ours
                raise ValueError(f"{request!r} is of another cache")

    def match_nowait(self, tokens: TokenSource, *, namespace: Namespace = None) -> int:
        """Return how many leading tokens are resident now; changes nothing."""
        runtime = self._open_runtime()
        runtime.check_usable()
        return runtime.replica.look.match(pack(tokens), namespace=namespace)

    # What the loop tells it.

    def launch(self) -> LoadBatch:
        """Start the loads that wait for it, with ``launch="batch"``: all in one batch.

        A loop calls this when it closes its batch, and waits for the gates in the
        forward.

        Raises:
            OrderError: If loads start by themselves.
        """
        runtime = self._open_runtime()
        if self._launch != "batch":
            raise OrderError('loads start by themselves: make the cache launch="batch"')
        loads = runtime.call(runtime.replica.calls.launch)
        progress = [runtime.board.progress(load.seq) for load in loads]
        return LoadBatch(len(loads), runtime.gates(progress))

    def reset(self, *, revision: str | None = None) -> None:
        """Forget every prefix, as when the weights have changed.

        Pages that nothing pins are free at once, the others when their last pin goes.
        Loads are dropped. Open requests go on with what they have, and share nothing
        until they start over.

        Args:
            revision: Of the new weights: pages that were stored before are not found
                any more. If None, what is stored stays good.

        Raises:
            TypeError, ValueError: If the revision is no text.
        """
        runtime = self._open_runtime()
        runtime.call(runtime.replica.calls.reset, revision)

    # Looking.

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

    def _open_runtime(self) -> Runtime[R]:
        if self._runtime is None or self._is_closed:
            raise ClosedError("the cache is closed" if self._is_closed else "not open")
        return self._runtime
