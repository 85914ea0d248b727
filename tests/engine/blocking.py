"""What tests of the blocking face set up: the scene, without a loop in this thread."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from asyncache.devices import CpuDevice, Device
from asyncache.engine import BlockingCache, BlockingRequest, Limits
from asyncache.linkers import Linker
from asyncache.stores import Store
from asyncache.testing import Gate
from tests.engine.scene import LAYOUT, LIMITS, POISON, Log, Scene, turns

PATIENCE_S = 20.0


@dataclass
class BlockingScene(Scene):
    """A blocking cache, where its pages are, and what it told."""

    cache: BlockingCache

    def serve(self, tokens: Sequence[int], **restore: float) -> int:
        """Serve a prompt from its restore to its commit; return the hit's length."""
        with self.cache.request(tokens) as request:
            hit = request.restore(**restore).wait()
            self.finish(request, tokens, hit.num_tokens)
            return hit.num_tokens

    def until(self, holds: Callable[[], bool]) -> None:
        """Step until something holds."""
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end, "never"
            self.cache.step(timeout_s=0.05)

    def rest(self) -> None:
        """Wait until nothing moves, and check that nothing was left behind."""
        self.until(lambda: not self.cache._runtime.driver._open_brackets)
        assert self.cache.drain(deadline_s=PATIENCE_S) == 0
        self.until(lambda: not self.cache.statistics().transfers)
        self.cache.step()
        self.check_clean()

    # What lives on the cache's loop is touched there.

    def arrived(self, gate: Gate, count: int = 1) -> None:
        """Wait until so many calls have arrived at a gate of a fake."""
        self._on_loop(gate.wait_arrived(count))

    def open(self, gate: Gate) -> None:
        """Open a gate of a fake."""

        async def open_it() -> None:
            gate.open()

        self._on_loop(open_it())

    def _on_loop(self, work) -> None:
        loop = self.cache._queues._thread._loop
        asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE_S)


@contextmanager
def blocking_scene(
    store: Store | None = None,
    *,
    num_pages: int = 8,
    device: Device | None = None,
    linker: Callable[[Device], Linker] | None = None,
    limits: Limits = LIMITS,
    check: bool = True,
    **arguments,
) -> Iterator[BlockingScene]:
    """Open a cache over poisoned pages; at its end nothing may be left behind."""
    device = device or CpuDevice(LAYOUT, num_pages)
    for pool in LAYOUT.pools:
        device.tensor(pool.name).fill_(POISON)
    log = arguments.pop("observer", None) or Log()
    with BlockingCache(
        LAYOUT,
        device=device,
        store=store,
        linker=None if linker is None else linker(device),
        limits=limits,
        observer=log,
        **arguments,
    ) as cache:
        view = BlockingScene(cache, device, log)
        yield view
        if check:
            view.rest()
    assert cache._thread is None
    view.cache.check_invariants()
    assert view.cache.statistics().transfers == 0


async def interrupt(changed: threading.Condition) -> None:
    """Send the main thread a signal while it waits; return once it has come."""
    while not changed._waiters:
        await turns(1)
    [waiter] = changed._waiters
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    while waiter in changed._waiters:
        await turns(1)


def loading(view: BlockingScene, gate: Gate, request: BlockingRequest):
    """Restore; return the hit once its load is held at a gate."""
    hit = request.restore()
    view.arrived(gate)
    return hit


@contextmanager
def left_by(
    error: type[BaseException], scope: BlockingRequest
) -> Iterator[BlockingRequest]:
    """Leave a request's scope by an error, at the end of the block."""
    with suppress(error), scope as request:
        yield request
        raise error
