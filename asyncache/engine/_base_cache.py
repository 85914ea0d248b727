"""What a cache is to a serving loop, whether that awaits or blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar, Literal, TypeVar, assert_never
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from asyncache.core import (
    Bounds,
    ClosedError,
    DeviceError,
    KVLayout,
    Namespace,
    OrderError,
    Policy,
    Replica,
    lru,
)
from asyncache.devices import Device
from asyncache.engine._base_request import BaseRequest
from asyncache.engine._base_scopes import BaseScopes
from asyncache.engine._gates import Gates, LoadBatch
from asyncache.engine._limits import Limits
from asyncache.engine._observe import Observer, Statistics, snapshot
from asyncache.engine._queues import Queues
from asyncache.engine._runtime import Runtime
from asyncache.engine._tokens import TokenSource, pack
from asyncache.engine._writes import ReadOnly, WriteBack, Writes, WriteThrough
from asyncache.linkers import Linker, StoreLinker
from asyncache.ranks import Group, SoloGroup
from asyncache.stores import Store

R = TypeVar("R", bound=BaseRequest[Any])


class BaseCache(BaseScopes[R]):
    """The calls that are the same however a loop waits.

    Those that only change or look at the state are here; those that wait, such as
    ``step()`` and ``drain()``, are each face's own.
    """

    _groups: ClassVar[WeakValueDictionary[int, Group]] = WeakValueDictionary()
    """Groups that some cache uses: two would take each other's votes for their own."""
    _users: ClassVar[WeakKeyDictionary[Device, ref[BaseCache[Any]]]] = (
        WeakKeyDictionary()
    )
    """The last cache of each device: two would give out the same pages."""

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
        barrier: Literal["sync", "pipelined"] = "sync",
        aborts: Literal["vote", "call"] = "vote",
        observer: Observer | None = None,
    ) -> None:
        if device.layout != layout:
            raise ValueError(f"the device was made for {device.layout}, not {layout}")
        _check_mode("launch", launch, "eager", "batch")
        _check_mode("barrier", barrier, "sync", "pipelined")
        _check_mode("aborts", aborts, "vote", "call")
        self._group = _check_group(group)
        self._layout = layout
        self._device = device
        self._linker = self._link(store, linker)
        self._limits = limits or Limits()
        self._policy = policy
        self._writes = writes or WriteThrough()
        self._launch = launch
        self._barrier = barrier
        self._aborts = aborts
        self._observer = observer
        self._is_opened = False

    def __repr__(self) -> str:
        """Show pages by state."""
        name = type(self).__name__
        if self._runtime is None:
            return f"<{name}, {'closed' if self._is_closed else 'not open'}>"
        return f"<{name} {dict(self._runtime.replica.look.statistics().pools)}>"

    # Opening and closing.

    def _begin_open(self) -> None:
        """Take note that the cache is being opened, once, and uses its group."""
        if self._is_opened or self._is_closed:
            raise OrderError("a cache is opened once")
        user = self._users.get(self._device, lambda: None)()
        if user is not None and user._may_touch_pages:  # noqa: SLF001 - ours
            raise OrderError(f"{self._device!r} is another cache's: each has its own")
        if not self._is_alone:
            if self._is_group_used():
                raise OrderError(
                    f"{self._group!r} is another cache's: each has its own"
                )
            self._groups[id(self._group)] = self._group
        self._users[self._device] = ref(self)
        self._is_opened = True

    @property
    def _may_touch_pages(self) -> bool:
        """Whether the device is this cache's: while it is open, or transfers run on."""
        transfers = None if self._runtime is None else self._runtime.transfers
        num_running = 0 if transfers is None else transfers.num_running
        return not self._is_closed or num_running > 0

    def _is_group_used(self) -> bool:
        """Whether a cache uses the group, this one or another."""
        return self._groups.get(id(self._group)) is self._group

    def _new_lone_runtime(self, queues: Queues) -> Runtime[R]:
        """Return what a lone rank runs."""
        return Runtime(
            self._layout,
            self._new_replica(self._device.num_pages),
            self._linker,
            device=self._device,
            limits=self._limits,
            observer=self._observer,
            queues=queues,
        )

    def _new_replica(self, num_pages: Mapping[str, int]) -> Replica:
        return Replica(
            self._layout,
            num_pages,
            self._bounds(),
            self._policy,
            tells_pages=self._observer is not None,
        )

    def _settings(self) -> Mapping[str, object]:
        """Return what must be the same on every rank."""
        return {
            "layout": self._layout,
            "limits": self._limits,
            "policy": _name_of(self._policy),
            "writes": self._writes,
            "launch": self._launch,
            "barrier": self._barrier,
            "aborts": self._aborts,
            "having a store": self._linker is not None,
        }

    @property
    def _is_alone(self) -> bool:
        """Whether there are no ranks to agree with; a group of one agrees with none."""
        return isinstance(self._group, SoloGroup)

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
            aborts_by_call=self._aborts == "call",
        )

    def _link(self, store: Store | None, linker: Linker | None) -> Linker | None:
        if store is not None and linker is not None:
            raise ValueError("give a store or a linker, not both")
        if store is None:
            return linker
        rank, num_ranks = self._group.rank, self._group.num_ranks
        return StoreLinker(store, self._device, rank=rank, num_ranks=num_ranks)

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

    # Forwards.

    @contextmanager
    def forward(
        self, requests: Sequence[R], *, stream: int | None = None
    ) -> Iterator[None]:
        """Bracket a run of the model over some requests.

        Nobody else gets a page that the model may touch until the block was left and
        the stream has run what it was given in it, whatever becomes of the requests.
        Leave it only when nothing more will be given: a thread that runs the model and
        is not waited for is outside of every bracket.
        Read page tables inside it: entering is a call like any other, with which a hit
        that has not settled may sink, and take pages along.

        With states, entering copies the state of each request's hit to its own slot, if
        this is the first forward over it. With no hit, the slot holds anything: begin
        from zeros.

        Args:
            requests: Whose pages and slots the model may touch.
            stream: Handle of the stream that it runs on, such as torch's
                ``stream.cuda_stream``; the current one if None. Host memory has none.
                What one stream computes and another reads, you put in order: a prefix
                that was committed may be hit before its stream has run.

        Raises:
            ClosedError, AbortedError: If a request has ended.
            OrderError: If the layout has states, and a hit is not settled yet.
            ValueError: If a request is of another cache.
            DeviceError: If a state could not be copied, and the requests that needed
                one are aborted; or the device is lost.
        """
        runtime = self._open_runtime()
        if self._device.failure is not None:
            raise self._device.failure
        self._check_ours(requests)
        states = [request._open_state() for request in requests]  # noqa: SLF001 - ours
        number = runtime.call(runtime.driver.forward, states)
        for request in requests:
            request._num_forwards += 1  # noqa: SLF001 - ours
        try:
            self._copy_states(runtime, number, requests, stream)
            yield
        finally:
            for request in requests:
                request._num_forwards -= 1  # noqa: SLF001 - ours
            runtime.forwards.leave(number, stream)

    def _copy_states(
        self,
        runtime: Runtime[R],
        number: int,
        requests: Sequence[R],
        stream: int | None,
    ) -> None:
        copies = runtime.replica.look.copies(number)
        try:
            runtime.slots.copy(copies, stream)
        except DeviceError:
            # The core takes these states for copied, and no later forward would.
            for request in requests:
                if runtime.slots.are_into(request._open_state(), copies):  # noqa: SLF001 - ours
                    request._finish(aborted=True)  # noqa: SLF001 - ours
            raise

    def gates(self, requests: Sequence[R]) -> Gates:
        """Return the gates of several requests' hits as one, as they stand now.

        Raises:
            ValueError: If a request is of another cache.
        """
        runtime = self._open_runtime()
        runtime.check_usable()
        self._check_ours(requests)
        loads = {load: None for request in requests for load in request._loads()}  # noqa: SLF001 - ours
        return Gates(runtime.board, list(loads))

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
        return LoadBatch(len(loads), Gates(runtime.board, progress))

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
            store=runtime.health.state,
        )

    def check_invariants(self) -> None:
        """Raise InvariantError unless every law of the state holds; for tests."""
        if self._runtime is not None:
            self._runtime.replica.look.check_invariants()


def _check_mode(name: str, value: str, *modes: str) -> None:
    if value not in modes:
        one_of = " or ".join(f'"{mode}"' for mode in modes)
        raise ValueError(f"{name} must be {one_of}, not {value!r}")


def _check_group(group: object) -> Group:
    if group is None:
        return SoloGroup()
    if not isinstance(group, Group):
        kind = type(group).__name__
        raise TypeError(f"group must be this rank's Group, not {kind}: {group!r}")
    return group


def _name_of(policy: Policy) -> str:
    """Return what a policy is called in every process."""
    kind = policy if isinstance(policy, FunctionType) else type(policy)
    return f"{kind.__module__}.{kind.__qualname__}"
