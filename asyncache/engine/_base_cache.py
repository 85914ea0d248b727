"""What a cache is to a serving loop, whether that awaits or blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
from asyncache.engine._base_request import BaseRequest
from asyncache.engine._gates import Gates
from asyncache.engine._limits import Limits
from asyncache.engine._observe import Observer, Statistics, snapshot
from asyncache.engine._queues import Queues
from asyncache.engine._runtime import Runtime
from asyncache.engine._tokens import TokenSource, check_count, pack
from asyncache.linkers import Linker, StoreLinker
from asyncache.ranks import Group, SoloGroup
from asyncache.stores import Store

R = TypeVar("R", bound=BaseRequest[Any])


@dataclass(frozen=True, slots=True)
class WriteThrough:
    """Offload pages as soon as they are shared.

    Args:
        threshold: Requests that must have used a page before it is offloaded.
    """

    threshold: int = 1

    def __post_init__(self) -> None:
        check_count("threshold", self.threshold, least=1)


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
        bounds = self._limits.bounds(write_threshold=self._writes.threshold)
        return Runtime(
            self._layout,
            Replica(self._layout, self._device.num_pages, bounds, self._policy),
            self._linker,
            limits=self._limits,
            observer=self._observer,
            queues=queues,
        )

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
        tokens: bytes,
        *,
        namespace: Namespace,
        num_reserve_tokens: int,
    ) -> R:
        """Return a request of this face's kind."""

    # Requests.

    def request(
        self,
        tokens: TokenSource,
        *,
        namespace: Namespace = None,
        reserve_tokens: int = 0,
    ) -> R:
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
        return self._new_request(
            runtime, packed, namespace=namespace, num_reserve_tokens=num_reserve_tokens
        )

    @contextmanager
    def forward(self, requests: Sequence[R]) -> Iterator[None]:
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

    def gates(self, requests: Sequence[R]) -> Gates:
        """Return the gates of several requests' hits as one.

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
