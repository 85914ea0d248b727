"""KVCache: the object that a serving loop holds."""

from __future__ import annotations

import asyncio

import anyio

from asyncache.core import AbortedError, Namespace
from asyncache.engine._life import CacheLife
from asyncache.engine._limits import check_deadline
from asyncache.engine._prompt import Prompt
from asyncache.engine._ranked import RankedRuntime
from asyncache.engine._reports import StepReport
from asyncache.engine._request import Request
from asyncache.engine._runtime import Runtime
from asyncache.engine._tokens import TokenSource

# How long ranks that only wait for transfers wait for news between two steps.
_PACE_S = 0.01


class KVCache(CacheLife):
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
        group: The ranks of the model, closed by the cache; one if None. With a group,
            calls come from one task, the loop, on every rank the same ones in the same
            order between two :meth:`step`; scopes may be any handler's.
        limits: Every bound.
        policy: Which unused prefix is evicted first, a sort key over tree leaves.
        writes: When pages are offloaded: :class:`WriteThrough` as they are shared,
            :class:`WriteBack` before eviction takes them, :class:`ReadOnly` never.
        launch: "eager" to start a load as soon as its restore is agreed, "batch" to
            start all that wait with :meth:`launch`.
        barrier: "sync" for a step that applies what it agrees on, "pipelined" for one
            that applies what the step before agreed on, while the model ran.
        aborts: Who ends requests of a group: "vote" for their scopes, which costs a
            reduce a step for as long as one is open; "call" for the loop, see
            :meth:`left`.
        observer: Gets every event.

    Raises:
        ValueError: If the device was made for another layout, both a store and a
            linker are given, or a mode is unknown.
    """

    # Waiting.

    async def step(self, *, timeout_s: float = 0.0) -> StepReport[Request]:
        """Apply what is agreed, and return what happened since the last step.

        With one rank everything is agreed as it happens, and nobody has to call this;
        for loops that do, it is where other tasks run. With a group it is the drain
        barrier: every rank steps, and finds the same. Cancelled, it loses nothing; then
        no call is made before it was repeated.

        Args:
            timeout_s: Seconds to wait at most where this rank has nothing new to say,
                half of ``Limits.barrier_s`` at most; a group goes by its slowest rank.

        Raises:
            ClosedError: If the cache is closed.
            OrderError: If another task steps, or is the loop.
            RankError: If the ranks differ, or one is gone or silent: the cache is over.
        """
        runtime = self._open_runtime()
        runtime.check_usable()
        patience_s = check_deadline("timeout_s", timeout_s, 0.0)
        if isinstance(runtime, RankedRuntime):
            await runtime.barrier.step(patience_s=patience_s)
        else:
            await asyncio.sleep(0)
            runtime.driver.settle()
        runtime.check_usable()
        return runtime.reports.take()

    async def drain(self, *, deadline_s: float | None = None) -> int:
        """Wait until, for a moment, no load and no offload is open or due.

        With a group it steps, on every rank, until the first one's deadline, or until
        one is cancelled: that ends it on all of them, after the same step. It does not
        wait for what only a call could bring about.

        Args:
            deadline_s: Seconds to wait at most; ``Limits.drain_s`` if None.

        Returns:
            Loads and offloads that are still open or due; 0 unless the deadline came,
            or they wait for a call.

        Raises:
            ClosedError: If the cache is closed, or closes meanwhile.
            RankError: As for :meth:`step`.
        """
        runtime = self._open_runtime()
        runtime.check_usable()
        after_s = check_deadline("deadline_s", deadline_s, self._limits.drain_s)
        if isinstance(runtime, RankedRuntime):
            return await _drain(runtime, after_s)
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
        Cancel it, and it stops like any request. With a group it steps, on every rank,
        and one that is cancelled stops it on all of them, after the same step.

        Args:
            tokens: The prompt, as for :meth:`request`.
            namespace: As for :meth:`request`.
            deadline_s: As for :meth:`Request.restore`.

        Returns:
            Leading tokens that are resident now.

        Raises:
            AbortedError: If another rank was cancelled.
            OutOfPagesError, TooManyRequestsError: As for ``with cache.request(...)``.
            ClosedError: If the cache closes meanwhile.
            RankError: As for :meth:`step`.
        """
        check_deadline("deadline_s", deadline_s, self._limits.restore_s)
        prompt = self._prefetch_of(tokens, namespace)
        if not self._is_alone:
            [request] = self.admit([prompt])
            return await _prefetch(self._ranked(), request, deadline_s)
        with self._new_request(self._open_runtime(), prompt) as request:
            hit = await request.restore(deadline_s=deadline_s)
            await hit.wait()
            return hit.num_tokens

    def _new_request(
        self,
        runtime: Runtime[Request],
        prompt: Prompt,
    ) -> Request:
        return Request(runtime, prompt)


async def _drain(runtime: RankedRuntime[Request], after_s: float) -> int:
    """Step until nothing moves, or the first rank has no time left."""
    barrier, loop = runtime.barrier, asyncio.get_running_loop()
    until, goes_on = loop.time() + after_s, True
    cancelled = await barrier.flush()
    while goes_on and runtime.num_moving and not barrier.is_at_rest:
        in_time = cancelled is None and loop.time() < until
        cut = await barrier.step_through(patience_s=_PACE_S, goes_on=in_time)
        goes_on, cancelled = barrier.goes_on, cancelled or cut
    if cancelled is not None:
        raise cancelled
    return runtime.num_moving


async def _prefetch(
    runtime: RankedRuntime[Request], request: Request, deadline_s: float | None
) -> int:
    """Step until a request has all that it can get."""
    with request:
        seq, cancelled = request.id, None
        hit = request.restore_nowait(deadline_s=deadline_s)
        while runtime.is_restoring(request):
            runtime.launch_for(request)
            cut = await runtime.barrier.step_through(patience_s=_PACE_S, goes_on=True)
            if cut is not None:
                cancelled = cut
                runtime.driver.sink(seq, 0)
        num_tokens, is_whole = hit.num_tokens, request.is_open
        # On every rank at once, for all of them have come this far.
        runtime.dismiss({seq: False})
        runtime.reports.forget(request)
        if cancelled is not None:
            raise cancelled
        if not is_whole:
            raise AbortedError("another rank was cancelled in a prefetch")
        return num_tokens
