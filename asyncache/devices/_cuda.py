"""Pages in the memory of a CUDA GPU, and the copies between them and the host.

Copies into pages and out of them have a stream and a lane each, so that an offload
never stands in front of a load. What can go wrong, and what comes of it:

=======================  ============================================================
what                     comes of it
=======================  ============================================================
a copy is refused        what was begun of it is waited for; then it fails, alone
the GPU fails later on   every copy fails, now and from then on; nothing runs any more
a copy never ends        it is never over: its pages stay where they are
a wake-up gets lost      the watch finds the copy over, a little later
a copy outlives its loop its end is told to nobody, and its memory is kept
a fork                   the child is refused everything, and harms nothing
=======================  ============================================================
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

import anyio
import torch

from asyncache.core import DeviceError, KVLayout
from asyncache.devices._arguments import check_order, check_page_counts
from asyncache.devices._copy import Copy, Word
from asyncache.devices._cuda_adopt import check_on_gpu
from asyncache.devices._cuda_api import SUCCESS, Context, check, cuda
from asyncache.devices._cuda_copies import Copies
from asyncache.devices._cuda_copy import CudaCopy
from asyncache.devices._cuda_lane import Events, Lane, Waiter, Watch
from asyncache.devices._cuda_pinned import PinnedMemory
from asyncache.devices._cuda_words import Words
from asyncache.devices._pieces import Pieces
from asyncache.devices._pool import PageOrder, Pool, allocate_pool
from asyncache.devices._pooled import (
    Buffer,
    Direction,
    PooledDevice,
    Tensors,
    adopt_pools,
)
from asyncache.threads import outlast, when_over

if TYPE_CHECKING:
    from collections.abc import Sequence

_OWN_STREAM = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
# What does not end at once when it has nothing to do is kept from ending for good.
_JOIN_S = 1.0
_kept: set[object] = set()
"""Devices whose memory a copy or a forward still touches."""


class CudaDevice(PooledDevice):
    """Pools of pages in the memory of a GPU.

    Made and used in one process. Copies run on two streams of its own. Threads wait for
    the GPU, without the GIL: one for each of them, one for forwards, one that watches.
    Copies that an engine makes go through pinned memory; copies from other host memory
    work, but may stop the event loop.

    Args:
        layout: Pools to allocate, filled with zeros, by torch.
        num_pages: Pages of each pool, or of every pool when it is one number; slots of
            a state pool.
        order: How pages lie in memory. What fits the store best is PAGE_FIRST: a page
            is one piece then, and small pieces are slow to copy.
        ordinal: Which GPU, as torch counts.
        waits: What ``gates.wait_stream()`` has streams wait for: "fences", events of
            copies that have begun; "words", which can be waited for before that.
        close_s: Seconds that :meth:`aclose` waits for copies.

    Raises:
        ValueError: If a pool would have no page, or the names are not the layout's.
        DeviceError: If there is no driver, no such GPU, not enough memory, or no torch
            that allocates there.
    """

    host_addressable = False

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int | Mapping[str, int],
        *,
        order: PageOrder = PageOrder.PAGE_FIRST,
        ordinal: int = 0,
        waits: Literal["fences", "words"] = "fences",
        close_s: float = 10.0,
    ) -> None:
        check_order(order)
        counts = check_page_counts(layout, num_pages)

        def allocate(_: Context) -> dict[str, Pool]:
            if not torch.cuda.is_available():
                raise DeviceError(
                    f"torch {torch.__version__} cannot allocate on a GPU here: install "
                    "one that can, or adopt() memory of another owner"
                )
            where = torch.device("cuda", ordinal)
            pools = {
                pool.name: allocate_pool(
                    layout.space(pool), counts[pool.name], order, where
                )
                for pool in layout.pools
            }
            # torch's stream writes the zeros: a copy on ours must not come before them.
            torch.cuda.current_stream(where).synchronize()
            return pools

        self._open(layout, allocate, ordinal, waits, close_s)

    @classmethod
    def adopt(
        cls,
        layout: KVLayout,
        tensors: Tensors,
        *,
        order: PageOrder = PageOrder.PAGE_FIRST,
        ordinal: int = 0,
        waits: Literal["fences", "words"] = "fences",
        close_s: float = 10.0,
    ) -> Self:
        """Return a device over tensors that the caller goes on using.

        The device keeps the tensors alive until :meth:`aclose`; until then their
        storage must not be resized.

        Args:
            layout: What the tensors hold.
            tensors: As for :meth:`CpuDevice.adopt`, in the memory of the GPU.
            order: Which axis comes first where a pool is one tensor.
            ordinal: As for :class:`CudaDevice`.
            waits: As for :class:`CudaDevice`.
            close_s: As for :class:`CudaDevice`.

        Raises:
            ValueError: If the names are not the layout's.
            TypeError: If something is not a tensor.
            DeviceError: If there is no driver, or no such GPU; if a tensor does not fit
                the layout, is not dense memory of that GPU, requires grad, or shares
                bytes with another.
        """

        def adopt(context: Context) -> dict[str, Pool]:
            check_memory = partial(check_on_gpu, context)
            return adopt_pools(layout, tensors, order, check_memory)

        device = cls.__new__(cls)
        device._open(layout, adopt, ordinal, waits, close_s)  # noqa: SLF001 - our own
        return device

    def _open(
        self,
        layout: KVLayout,
        make_pools: Callable[[Context], dict[str, Pool]],
        ordinal: int,
        waits: str,
        close_s: float,
    ) -> None:
        if waits not in ("fences", "words"):
            raise ValueError(f'waits must be "fences" or "words", not {waits!r}')
        if not 0 <= close_s < math.inf:
            raise ValueError(f"close_s must be at least 0 and finite, not {close_s}")
        self._context = context = Context(ordinal)
        self._close_s = close_s
        self._freeing: Future[None] | None = None
        self._streams: dict[Direction, int] = {}
        self._words: Words | None = None
        self._events = Events()
        self._pinned = PinnedMemory(context)
        self._open_lanes(context)
        try:
            with context:
                self._take(layout, make_pools(context))
                self._open_streams()
                self._copies = Copies()
                if waits == "words":
                    into = Direction.INTO_PAGES
                    self._words = Words(context, self._lanes[into], self._streams[into])
            # Before anything is begun: what has begun needs somebody to wait for it.
            for waiter in self._waiters:
                waiter.start()
        except BaseException:
            self._free()
            raise

    def _open_lanes(self, context: Context) -> None:
        watch = Watch(context)
        load, offload, self._forwards = (
            Lane(context, self._events, watch, f"asyncache-{name}")
            for name in ("load", "offload", "forward")
        )
        self._lanes = {Direction.INTO_PAGES: load, Direction.OUT_OF_PAGES: offload}
        self._all_lanes = [load, offload, self._forwards]
        watch.over(self._all_lanes)
        self._waiters: list[Waiter] = [*self._all_lanes, watch]

    def _open_streams(self) -> None:
        # A load is waited for, an offload is not.
        lowest, highest = _priorities()
        for direction, priority in (
            (Direction.INTO_PAGES, highest),
            (Direction.OUT_OF_PAGES, lowest),
        ):
            self._streams[direction] = check(
                cuda.cuStreamCreateWithPriority(_OWN_STREAM, priority),
                "no stream could be made",
            )

    def __repr__(self) -> str:
        """Show the pools, and how the GPU is."""
        if self._is_closed:
            state = "closed"
        elif self.failure is not None:
            state = "lost"
        else:
            state = f"{self._num_pending} pending"
        ordinal = self._context.ordinal
        return f"<CudaDevice {ordinal} pages {dict(self.num_pages)}, {state}>"

    @property
    def failure(self) -> DeviceError | None:
        """Why nothing runs on this GPU any more; None while it works."""
        return self._context.failure

    def page_views(
        self,
        pool: str,
        pages: Sequence[int],  # noqa: ARG002 - the contract's
        layers: range | None = None,  # noqa: ARG002 - the contract's
    ) -> list[list[memoryview]]:
        raise DeviceError(f"pool {pool!r} is not addressable by the host")

    async def allocate_staging(self, num_bytes: int) -> memoryview:
        self._check_usable()
        return await self._pinned.allocate(num_bytes)

    async def free_staging(self, memory: memoryview) -> None:
        if self._context.is_of_this_process:
            await self._pinned.free(memory)

    def when_done(self, stream: int | None, call: Callable[[], object]) -> None:
        if self._runs:
            with suppress(DeviceError), self._context:
                self._forwards.mark(self._stream(stream), lambda _: call())
                return
        call()

    def new_word(self) -> Word | None:
        if self._words is None or self._is_closed or not self._runs:
            return None
        return self._words.take()

    @property
    def _runs(self) -> bool:
        """Whether anything runs on the GPU that somebody waits for here."""
        is_there = self._freeing is None and self._context.is_of_this_process
        return is_there and self.failure is None

    # Copies.

    def _start(self, pieces: Pieces, buffer: Buffer, direction: Direction) -> Copy:
        self._context.check_usable()
        stream, lane = self._streams[direction], self._lanes[direction]
        is_load = direction is Direction.INTO_PAGES
        copy = CudaCopy(self._context, buffer)
        with self._context:
            code = self._copies.give(
                pieces.pool if is_load else pieces.other,
                pieces.other if is_load else pieces.pool,
                pieces.num_bytes,
                stream,
                are_final=is_load,
            )
            if code != SUCCESS:
                what = f"a copy of {len(pieces)} pieces was refused"
                copy.refused = self._context.judge_refusal(code, stream, what)
            copy.marked(lane.mark(stream, copy.passed))
        return copy

    def _move(self, pieces: Pieces, stream: int | None) -> None:
        self._context.check_usable()
        with self._context:
            handle = self._stream(stream)
            code = self._copies.give(
                pieces.pool, pieces.other, pieces.num_bytes, handle, are_final=False
            )
            if code != SUCCESS:
                what = "pages could not be copied onto others"
                raise self._context.judge_refusal(code, handle, what)

    def _stream(self, stream: int | None) -> int:
        if stream is not None:
            return stream
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return 0
        return int(torch.cuda.current_stream(self._context.ordinal).cuda_stream)

    def _check_usable(self) -> None:
        self._pool(next(iter(self.num_pages)))
        self._context.check_usable()

    # Closing.

    @property
    def _num_pending(self) -> int:
        return sum(lane.num_pending for lane in self._all_lanes)

    async def aclose(self) -> None:
        """Give the memory back once no copy and no forward runs, cancelled or not.

        Raises:
            DeviceError: If one still runs after ``close_s``: whatever it touches is
                kept until the process ends, or until this is called again.
        """
        self._is_closed = True
        if not self._context.is_of_this_process:
            return
        cancelled: BaseException | None = None
        _kept.add(self)
        try:
            await self._become_idle()
        except asyncio.CancelledError as error:
            cancelled = error
        if self._num_pending:
            raise DeviceError(
                f"{self._num_pending} copies or forwards still run on GPU "
                f"{self._context.ordinal} after {self._close_s} s: memory is kept"
            ) from cancelled
        _kept.discard(self)
        if self._freeing is None:
            # On a thread: to give memory back may wait for the GPU.
            self._freeing = self._pinned.close(self._free)
        await outlast(when_over([self._freeing]))
        self._freeing.result()
        if cancelled is not None:
            raise cancelled

    async def _become_idle(self) -> None:
        loop, idle = asyncio.get_running_loop(), anyio.Event()

        def look() -> None:
            if not self._num_pending:
                idle.set()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(look)

        deadline = loop.call_later(self._close_s, idle.set)
        try:
            with ExitStack() as stack:
                for lane in self._all_lanes:
                    stack.enter_context(lane.telling_idle(tell))
                await outlast(idle)
        finally:
            deadline.cancel()

    def _free(self) -> None:
        """Give back all but pinned memory; on the thread that pins, as a rule."""
        for waiter in self._waiters:
            waiter.stop()
        for waiter in self._waiters:
            waiter.join(_JOIN_S)
        self._pools = {}
        try:
            # Where the GPU is lost, there is nothing to give back.
            with suppress(DeviceError), self._context:
                for stream in self._streams.values():
                    cuda.cuStreamDestroy(stream)
                if self._words is not None:
                    self._words.close()
                self._events.close()
        finally:
            self._context.release()


def _priorities() -> tuple[int, int]:
    """Return the lowest priority and the highest: which numbers are never higher."""
    code, lowest, highest = cuda.cuCtxGetStreamPriorityRange()
    return (lowest, highest) if code == SUCCESS else (0, 0)
