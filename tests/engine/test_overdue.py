"""What never ends is told of, keeps its pages, and stops nobody else."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from asyncache.core import OrderError
from asyncache.devices import CpuDevice
from asyncache.engine import BlockingCache, KVCache, Overdue, TransferKind
from asyncache.engine._late import Late
from tests.engine.scene import (
    LAYOUT,
    LIMITS,
    PAGE,
    Log,
    compute,
    gate_store,
    prompt,
    scene,
    turns,
)

TOKENS = prompt(3)
SOON = replace(LIMITS, overdue_s=0.01)


class LateStreams(CpuDevice):
    """Has streams, which are done when the test says so."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.calls = []

    def when_done(self, stream, call):
        self.calls.append((stream, call))

    def finish(self):
        """Let all streams run what they were given."""
        calls, self.calls = self.calls, []
        for _, call in calls:
            call()


class Waiting(Log):
    """Lets a test wait for an event."""

    def __init__(self):
        super().__init__()
        self.told = anyio.Event()

    def on_event(self, event):
        super().on_event(event)
        if isinstance(event, Overdue):
            self.told.set()


class Clock:
    """Time that a test lets pass, and the one timer there may be."""

    def __init__(self):
        self.now, self.due, self.call = 0.0, None, None

    def call_later(self, after_s, call):
        assert self.call is None, "a second timer"
        self.due, self.call = self.now + after_s, call
        return self

    def cancel(self):
        self.call = None

    def pass_to(self, now):
        while self.call is not None and self.due <= now:
            self.now, call, self.call = self.due, self.call, None
            call()
        self.now = now


def test_one_timer_tells_of_each_that_is_late_once():
    clock, told = Clock(), []
    late = Late(
        10.0,
        lambda: clock.now,
        clock.call_later,
        lambda thing: told.append((clock.now, thing)),
    )
    for number in range(4):
        clock.pass_to(float(number))
        late.begin(number, f"thing {number}")
    late.end(0)
    late.end(2)
    clock.pass_to(50.0)
    assert told == [(11.0, "thing 1"), (13.0, "thing 3")]
    assert clock.call is None
    late.begin(9, "thing 9")
    late.close()
    clock.pass_to(100.0)
    assert len(told) == 2


@pytest.mark.parametrize("kind", [TransferKind.LOAD, TransferKind.OFFLOAD])
async def test_a_transfer_that_does_not_end_is_told_of_once(kind):
    store, log = await gate_store(TOKENS, is_open=True), Waiting()
    is_load = kind is TransferKind.LOAD
    gate = store.get_gate if is_load else store.put_gate
    gate.close()
    tokens = TOKENS if is_load else prompt(3, seed=1)
    async with (
        scene(store, limits=SOON, observer=log) as view,
        anyio.create_task_group() as group,
    ):
        group.start_soon(view.serve, tokens)
        await log.told.wait()
        assert log.of(Overdue) == [Overdue(kind, 3)]
        assert view.cache.statistics().counters.overdue == 1
        held = view.pool.transit if is_load else view.pool.tree
        assert held == 3
        gate.open()
    assert len(log.of(Overdue)) == 1


async def test_a_forward_keeps_its_pages_until_its_stream_has_run_it():
    device = LateStreams(LAYOUT, 8)
    store = await gate_store(is_open=True)
    async with scene(store, device=device) as view:
        with view.cache.request(TOKENS) as request:
            request.extend(len(TOKENS))
            with view.cache.forward([request], stream=7):
                compute(view.device, request, TOKENS)
            [(stream, _)] = device.calls
            assert stream == 7
            request.commit(len(TOKENS))
        await turns(5)
        # Shared, but not read; and the page beyond the prefix is nobody's yet.
        assert store.put_gate.num_arrived == 0
        assert (view.pool.tree, view.pool.quarantine) == (3, 1)
        device.finish()
        assert view.pool.quarantine == 0
        await store.put_gate.wait_arrived()


async def test_forwards_finish_in_order_whatever_their_streams_do():
    device = LateStreams(LAYOUT, 8)
    async with scene(device=device) as view:
        with view.cache.request(TOKENS) as request:
            for stream in (1, 2):
                request.extend(stream * PAGE)
                with view.cache.forward([request], stream=stream):
                    pass
        assert view.pool.quarantine == 2
        (_, first), (_, second) = device.calls
        second()
        assert view.pool.quarantine == 2
        first()
        assert view.pool.quarantine == 0


async def test_a_forward_whose_stream_stalls_is_told_of():
    device, log = LateStreams(LAYOUT, 8), Waiting()
    async with scene(device=device, limits=SOON, observer=log) as view:
        with view.cache.request(TOKENS) as request:
            request.extend(len(TOKENS))
            with view.cache.forward([request]):
                pass
        await log.told.wait()
        assert log.of(Overdue) == [Overdue(None, 0)]
        assert view.pool.quarantine == 4
        device.finish()
        assert view.pool.quarantine == 0


async def test_a_cache_closes_over_a_stream_that_stalls():
    device = LateStreams(LAYOUT, 8)
    async with KVCache(LAYOUT, device=device) as cache:
        with cache.request(TOKENS) as request:
            request.extend(len(TOKENS))
            with cache.forward([request]):
                pass
    assert cache.statistics().leaked_pages == 4
    device.finish()
    assert cache.statistics().leaked_pages == 0


@pytest.mark.parametrize("kind", [KVCache, BlockingCache])
async def test_two_caches_never_give_out_the_pages_of_one_device(kind):
    device = CpuDevice(LAYOUT, 8)
    async with KVCache(LAYOUT, device=device):
        second = kind(LAYOUT, device=device)
        with pytest.raises(OrderError, match=r"CpuDevice .* is another cache's"):
            await second.open() if kind is KVCache else second.open()
    async with KVCache(LAYOUT, device=device) as again:
        assert again.match_nowait(TOKENS) == 0


async def test_a_cache_that_was_lost_keeps_its_device_from_nobody():
    device = CpuDevice(LAYOUT, 8)
    lost = KVCache(LAYOUT, device=device)
    await lost.open()
    del lost
    async with KVCache(LAYOUT, device=device):
        pass
