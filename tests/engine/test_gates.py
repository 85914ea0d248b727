"""Gates: a layer's pages are read only once they have landed, and nobody hangs."""

from __future__ import annotations

import threading

import anyio
import pytest

from asyncache.core import KVLayout, OrderError, WindowPool
from asyncache.devices import CpuDevice
from asyncache.engine import KVCache, Limits, StoreDown
from asyncache.linkers import Linker, Outcome
from asyncache.stores import MemoryStore
from asyncache.testing import Gate
from tests.engine.scene import (
    KV,
    LIMITS,
    PAGE,
    check_pages,
    content,
    gate_device,
    gate_store,
    memory_store,
    prompt,
    scene,
    staged,
    store_pages,
    turns,
)

TOKENS = prompt(3)
HASTY = Limits(gate_s=0.05, close_s=5.0, breaker_s=0.001, retry_s=0.001)


async def test_gates_open_layer_by_layer_as_the_parts_of_a_load_land():
    store, device = await memory_store(TOKENS), gate_device()
    async with scene(device=device, linker=staged(store, layer_groups=2)) as view:
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            gates = view.cache.gates([request])
            await device.write_gate.wait_arrived()
            assert [gates.is_open(layer) for layer in (0, 1)] == [False, False]
            assert "0 layers of 1 loads" in repr(gates)
            device.write_gate.open()
            device.write_gate.close()
            await gates.wait(0)
            assert [gates.is_open(layer) for layer in (0, 1)] == [True, False]
            assert gates.num_open == 1
            half = view.device.tensor("kv")[request.page_table["kv"][2], 0]
            assert half.contiguous().numpy().tobytes() == content(TOKENS, 2)[:32]
            device.write_gate.open()
            await gates.wait(1)
            await hit.wait()
            assert hit.gates.num_open == float("inf")
            check_pages(view.device, request, TOKENS, 3 * PAGE)


async def test_a_hit_has_its_gates_before_its_load_has_begun():
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store, limits=Limits(slots=2, offloads=1)) as view:
        others = [prompt(1, seed=seed) for seed in (1, 2)]
        for tokens in others:
            await store_pages(store, tokens)
        with (
            view.cache.request(others[0]) as one,
            view.cache.request(others[1]) as two,
            view.cache.request(TOKENS) as three,
        ):
            for request in (one, two, three):
                hit = await request.restore()
                assert not hit.gates.is_open(0), request
            await turns(5)
            # The third has no place in the ballot yet.
            assert store.get_gate.num_arrived == 2
            assert not hit.gates.is_open(0)
            three.suspend()
            assert hit.gates.is_open(0)
            store.get_gate.open()


async def test_a_thread_waits_for_a_layer_and_the_loop_must_not():
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            gates, order = hit.gates, []
            waits = threading.Event()

            def forward():
                waits.set()
                gates.wait_blocking(1)
                order.append("read")

            with pytest.raises(OrderError, match="event loop's thread"):
                gates.wait_blocking(0)
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.to_thread.run_sync, forward)
                await anyio.to_thread.run_sync(waits.wait)
                order.append("open")
                store.get_gate.open()
            assert order == ["open", "read"]
            await hit.wait()
            gates.wait_blocking(0)  # open: nothing to wait for


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_a_gate_opens_in_the_end_and_its_load_counts_as_failed(is_blocking):
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store, limits=HASTY) as view:
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            if is_blocking:
                await anyio.to_thread.run_sync(hit.gates.wait_blocking, 0)
            else:
                await hit.gates.wait(0)
            assert hit.gates.is_open(1)
            await hit.wait()
            assert hit.num_tokens == 0
            view.finish(request, TOKENS, 0)
        assert view.cache.statistics().counters.cut_pages == 3


async def test_all_who_wait_at_a_gate_that_times_out_go_on():
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store, limits=HASTY) as view:
        with view.cache.request(TOKENS) as request, view.cache.request(TOKENS) as other:
            hits = [await request.restore(), await other.restore()]
            with anyio.fail_after(5):
                async with anyio.create_task_group() as group:
                    for hit in hits:
                        group.start_soon(hit.gates.wait, 0)
                        group.start_soon(hit.gates.wait, 1)
                        group.start_soon(
                            anyio.to_thread.run_sync, hit.gates.wait_blocking, 1
                        )
                    group.start_soon(view.cache.gates([request, other]).wait, 0)


async def test_gates_open_when_the_request_ends():
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store) as view:
        with view.cache.request(TOKENS) as request:
            gates = (await request.restore()).gates
            assert not gates.is_open(0)
        assert gates.is_open(0)
        await gates.wait(0)


async def test_a_gate_that_times_out_after_its_load_has_ended_hurts_nobody():
    async with scene(await memory_store(TOKENS)) as view:
        with view.cache.request(TOKENS) as request:
            hit = await request.restore()
            [load] = view.cache._runtime.board._loads
            await hit.wait()
            view.cache._runtime._gate_timed_out(load)
            await turns(2)
            assert hit.num_tokens == 3 * PAGE
            assert not view.log.of(StoreDown)


async def test_gates_of_nothing_are_open():
    async with scene() as view:
        with view.cache.request(TOKENS) as request:
            assert view.cache.gates([request]).is_open(5)
            await view.cache.gates([]).wait(0)


async def test_reads_that_hang_open_the_breaker_though_lookups_succeed():
    store = await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    limits = Limits(gate_s=0.01, breaker_failures=2, breaker_s=30, close_s=5.0)
    async with scene(store, limits=limits) as view:
        for _ in range(2):
            with view.cache.request(TOKENS) as request:
                await (await request.restore()).gates.wait(0)
        with view.cache.request(TOKENS) as request:
            await request.restore(deadline_s=5)
        assert view.log.of(StoreDown)
        assert store.contains_gate.num_arrived == 2


class OddLinker(Linker):
    """Says that layers landed of a load that ended, and odd numbers of pages."""

    num_layers = 2

    def __init__(self, num_good):
        self.num_good = num_good
        self.late = None

    async def open(self):
        return

    async def lookup(self, plan):
        return [[True] * len(ask.hashes) for ask in plan.asks]

    async def load(self, plan, landed):
        self.late = landed
        return self.num_good

    async def offload(self, plan):
        return Outcome.STORED

    async def aclose(self):
        return


@pytest.mark.parametrize(
    ("num_good", "hit"), [(99, 3), (3, 3), (1, 1), (0, 0), (-5, 0), (None, 0), ("a", 0)]
)
async def test_a_linker_that_says_odd_things_is_taken_at_what_they_can_mean(
    num_good, hit
):
    linker = OddLinker(num_good)
    async with scene(linker=lambda device: linker, check=False) as view:
        with view.cache.request(TOKENS) as request:
            found = await (await request.restore()).wait()
            assert found.num_tokens == hit * PAGE
            linker.late(1)
        await turns(3)
        view.cache.check_invariants()
        assert view.cache.statistics().leaked_pages == 0


WINDOW = WindowPool(
    name="window",
    num_layers=2,
    num_kv_heads=1,
    head_dim=4,
    dtype="uint8",
    window_tokens=PAGE,
)
WINDOWED = KVLayout(model="scene", page_tokens=PAGE, pools=(KV, WINDOW))


class HeldPages(MemoryStore):
    """Holds the reads of some pages, and claims to have all."""

    def __init__(self):
        super().__init__(2**20)
        self.gates = {}

    async def contains(self, keys):
        return [True] * len(keys)

    async def get_into(self, keys, targets, layers=None):
        for key in self.gates.keys() & set(keys):
            await self.gates[key].pass_through()
        return await super().get_into(keys, targets, layers)


async def test_a_hit_that_sank_has_the_gates_of_what_it_stands_on_now():
    """A shorter prefix ends in a window of its own, which another may be loading."""
    store, tokens = HeldPages(), prompt(4)
    first, second, *_ = await store_pages(store, tokens, pool=KV, layout=WINDOWED)
    window, *_ = await store_pages(store, tokens, pool=WINDOW, layout=WINDOWED)
    await store.remove([second])
    store.gates = {first: Gate(), window: Gate()}
    device = CpuDevice(WINDOWED, 16)
    async with KVCache(WINDOWED, device=device, store=store, limits=LIMITS) as cache:
        with (
            cache.request(tokens) as long,
            cache.request([*tokens[:PAGE], *prompt(0, seed=2)]) as short,
        ):
            hit = await long.restore()
            await store.gates[first].wait_arrived()
            other = await short.restore()
            await store.gates[window].wait_arrived()
            assert (hit.num_tokens, other.num_tokens) == (4 * PAGE, PAGE)
            store.gates[first].open()
            while hit.num_tokens > PAGE:
                await turns(1)
            assert not long.settled
            assert not hit.gates.is_open(0)
            assert not cache.gates([long]).is_open(0)
            store.gates[window].open()
            await hit.wait()
            assert hit.gates.is_open(1)
            assert (hit.num_tokens, other.num_tokens) == (PAGE, PAGE)
