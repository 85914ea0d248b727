"""MooncakeLinker where masters and nodes die, hang or come late, and calls are cut."""

from __future__ import annotations

import asyncio
import signal
import threading
import uuid
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest

from asyncache import AttentionPool, CpuDevice, KVLayout, MooncakeLinker
from asyncache.core import Asked, LoadPlan, LookupPlan, Moved, OffloadPlan, PageKey
from asyncache.engine import ReadOnly
from asyncache.linkers import Outcome
from asyncache.testing._cancel import Cancellation
from tests.engine.scene import LIMITS, PAGE, keys, prompt, scene
from tests.linkers.mooncake_server import (
    Master,
    bare_client,
    running_master,
    running_node,
)
from tests.linkers.plans import hashes, load_plan, make_device, meant, offload_plan
from tests.linkers.worlds import MooncakeWorld, WatchedClient

# Until the master gives up a node that is gone.
TTL_S = 2
# By when what should end has ended, on the busiest machine; what blocks for Mooncake's
# own time blocks for 30 s.
GRACE_S = 15.0
TICK_S = 0.01
PATTERN = 0x5A
LOOKUP = LookupPlan(1, 0, 5, (Asked(0, 0, hashes()),))
# So large that a call for all of them takes a while.
POOL = AttentionPool(num_layers=4, num_kv_heads=1, head_dim=2**14, dtype="uint8")
LARGE = KVLayout(model="large", page_tokens=4, pools=(POOL,))
NUM_LARGE = 64


def large_piece(first=0):
    tokens = list(range(NUM_LARGE * 4))
    names = [key.hash for key in keys(tokens, None, POOL, LARGE)]
    return (Moved(0, 0, array("i", range(first, first + NUM_LARGE)), names),)


def renamed(salt):
    """Return the same pages with other hashes."""
    [piece] = large_piece()
    names = [salt + name[len(salt) :] for name in piece.hashes]
    return (piece._replace(hashes=names),)


@asynccontextmanager
async def beating() -> AsyncIterator[None]:
    """Raise if the event loop stood still for long meanwhile."""
    loop, longest = asyncio.get_running_loop(), 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            before = loop.time()
            await anyio.sleep(TICK_S)
            longest = max(longest, loop.time() - before)

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        try:
            yield
        finally:
            group.cancel_scope.cancel()
    assert longest < GRACE_S / 3


async def until(is_true) -> None:
    """Wait for what must come about without any help."""
    with anyio.fail_after(60):
        while not await is_true():
            await anyio.lowlevel.checkpoint()


async def in_thread(call, *arguments):
    return await anyio.to_thread.run_sync(call, *arguments)


def own_linker(master: Master, device, **options):
    return MooncakeLinker(
        master.setup, device, prefix=uuid.uuid4().hex, lookup_s=0.3, **options
    )


# Calls that are cancelled.


async def cancel(task, scope, how):
    by_scope = how in {Cancellation.SCOPE, Cancellation.SCOPE_AND_TASK}
    scope.cancel() if by_scope else task.cancel()
    if how in {Cancellation.TASK_TWICE, Cancellation.SCOPE_AND_TASK}:
        for _ in range(2):
            await anyio.lowlevel.checkpoint()
        task.cancel()


@pytest.mark.parametrize("how", Cancellation)
@pytest.mark.parametrize("direction", ["load", "offload"])
async def test_a_transfer_that_is_cancelled_ends_only_when_mooncake_has(
    client, direction, how
):
    watched = WatchedClient(client)
    world, device = MooncakeWorld(watched), make_device("pages")
    linker = world.link(device, batch_bytes=2 * len(meant(0)))
    await linker.open()
    assert await linker.offload(offload_plan(range(5))) is Outcome.STORED
    call = "get_into" if direction == "load" else "put_from"
    name = f"batch_{call}_multi_buffers"
    before, scope, answers = watched.num_calls(name), anyio.CancelScope(), []
    watched.held = {name}

    async def move() -> None:
        with scope:
            if direction == "load":
                answers.append(await linker.load(load_plan(range(5)), answers.append))
            else:
                answers.append(await linker.offload(offload_plan(range(5))))

    task = asyncio.ensure_future(move())
    await in_thread(watched.arrived.wait, 20)
    await cancel(task, scope, how)
    for _ in range(50):
        await anyio.lowlevel.checkpoint()
    assert not task.done(), "Mooncake still has the pages"
    watched.gate.set()
    await asyncio.wait([task])
    assert task.cancelled() or scope.cancelled_caught
    assert answers == []
    assert watched.num_calls(name) == before + 1, "it ended with its batch"
    device.tensor("kv").fill_(PATTERN)
    watched.held = set()
    assert await linker.lookup(LOOKUP) == [[True] * 5]
    assert await linker.load(load_plan([8]), lambda layer: None) == 1
    assert (device.tensor("kv")[:8] == PATTERN).all()
    await linker.aclose()


async def test_closing_under_a_transfer_waits_for_its_call_and_cuts_the_rest(client):
    watched = WatchedClient(client)
    linker = MooncakeWorld(watched).link(
        make_device("pages"), batch_bytes=2 * len(meant(0))
    )
    await linker.open()
    assert await linker.offload(offload_plan(range(5))) is Outcome.STORED
    watched.held, counts = {"batch_get_into_multi_buffers"}, []

    async def read() -> None:
        counts.append(await linker.load(load_plan(range(5)), lambda layer: None))

    closed = anyio.Event()

    async def close() -> None:
        await linker.aclose()
        closed.set()

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await in_thread(watched.arrived.wait, 20)
        group.start_soon(close)
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert not closed.is_set()
        assert watched.num_calls("unregister_buffer") == 0
        watched.gate.set()
    assert counts == [2]
    assert watched.num_calls("unregister_buffer") == 3


async def test_a_close_that_is_cancelled_lets_go_only_when_mooncake_has(client):
    watched = WatchedClient(client)
    linker = MooncakeWorld(watched).link(make_device("pages"))
    await linker.open()
    watched.held = {"batch_get_into_multi_buffers"}
    async with anyio.create_task_group() as group:
        group.start_soon(linker.load, load_plan(range(5)), lambda layer: None)
        await in_thread(watched.arrived.wait, 20)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await linker.aclose()
        assert scope.cancelled_caught
        assert watched.num_calls("unregister_buffer") == 0
        watched.gate.set()

    async def is_let_go() -> bool:
        return watched.num_calls("unregister_buffer") == 3

    await until(is_let_go)
    await linker.aclose()


# Lookups that get no answer.


async def test_a_lookup_that_hangs_ends_in_time_and_the_next_do_at_once(client):
    watched = WatchedClient(client)
    world = MooncakeWorld(watched)
    linker = world.link(make_device("pages"), lookup_s=0.2)
    await linker.open()
    await linker.offload(offload_plan(range(5)))
    watched.held = {"batch_is_exist"}
    async with beating(), anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(linker.lookup, LOOKUP)
    loop = asyncio.get_running_loop()
    linker._lookup_s = 3600.0
    before = loop.time()
    for _ in range(1000):
        assert await linker.lookup(LOOKUP) == [[False] * 5]
    assert loop.time() - before < GRACE_S
    assert watched.num_calls("batch_is_exist") == 1
    # Loads and offloads do not wait for it.
    assert await linker.load(load_plan(range(5)), lambda layer: None) == 5
    assert await linker.offload(offload_plan(range(5))) is Outcome.STORED
    watched.held = set()
    watched.gate.set()

    async def answers() -> bool:
        return await linker.lookup(LOOKUP) == [[True] * 5]

    await until(answers)
    await linker.aclose()


@pytest.mark.slow
async def test_a_lookup_that_hangs_keeps_no_close_and_the_memory_until_it_ends(master):
    linker = own_linker(master, make_device("pages"))
    await linker.open()
    watched = linker._link._client = WatchedClient(linker._link.client)
    watched.held = {"batch_is_exist"}
    assert await linker.lookup(LOOKUP) == [[False] * 5]
    with anyio.fail_after(GRACE_S):
        await linker.aclose()
    assert watched.num_calls("unregister_buffer") == watched.num_calls("close") == 0
    assert len(linker._link._memory) == 3
    watched.gate.set()

    async def is_let_go() -> bool:
        return watched.num_calls("close") == 1

    await until(is_let_go)
    assert watched.num_calls("unregister_buffer") == 3
    await linker.aclose()


async def test_a_client_of_the_callers_is_not_used_once_it_may_be_closed(client):
    """Guards the process: Mooncake crashes where a client is used after its close."""
    watched = WatchedClient(client)
    linker = MooncakeWorld(watched).link(make_device("pages"), lookup_s=0.2)
    await linker.open()
    watched.held = {"batch_is_exist"}
    assert await linker.lookup(LOOKUP) == [[False] * 5]
    closed = anyio.Event()

    async def close() -> None:
        await linker.aclose()
        closed.set()

    async with anyio.create_task_group() as group:
        group.start_soon(close)
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert not closed.is_set()
        watched.gate.set()
    assert watched.num_calls("unregister_buffer") == 3


@pytest.mark.parametrize("how", Cancellation)
async def test_a_lookup_may_be_cancelled_while_it_hangs(client, how):
    watched, scope = WatchedClient(client), anyio.CancelScope()
    linker = MooncakeWorld(watched).link(make_device("pages"), lookup_s=3600)
    await linker.open()
    watched.held = {"batch_is_exist"}

    async def look() -> None:
        with scope:
            await linker.lookup(LOOKUP)

    task = asyncio.ensure_future(look())
    await in_thread(watched.arrived.wait, 20)
    await cancel(task, scope, how)
    await asyncio.wait([task])
    assert task.cancelled() or scope.cancelled_caught
    watched.gate.set()
    assert await linker.lookup(LOOKUP) == [[False] * 5]
    await linker.aclose()


# Nodes and masters that go and come.


@pytest.mark.slow
async def test_a_node_that_is_killed_ends_a_load_short_and_stops_puts_for_a_while():
    with running_master(f"--client_ttl={TTL_S}") as master, bare_client(master) as bare:
        watched = WatchedClient(bare)
        device = CpuDevice(LARGE, 2 * NUM_LARGE)
        device.tensor("kv").fill_(1)
        linker = MooncakeWorld(watched).link(
            device, batch_bytes=4 * 2**20, client_ttl_s=TTL_S
        )
        await linker.open()
        with running_node(master) as node:
            stored = OffloadPlan(1, 0, NUM_LARGE, large_piece(), None)
            filled = LoadPlan(2, 0, NUM_LARGE, large_piece(NUM_LARGE))
            assert await linker.offload(stored) is Outcome.STORED
            watched.held = {"batch_get_into_multi_buffers"}
            counts, landed = [], []

            async def read() -> None:
                counts.append(await linker.load(filled, landed.append))

            async with beating(), anyio.create_task_group() as group:
                group.start_soon(read)
                await in_thread(watched.arrived.wait, 20)
                killer = threading.Timer(0.002, node.kill)
                watched.gate.set()
                killer.start()
                await in_thread(killer.join)
            assert counts[0] in range(NUM_LARGE + 1)
            assert landed == ([3] if counts[0] == NUM_LARGE else [])
            assert await linker.load(filled, landed.append) == 0
        # The master still gives room on it.
        lost = OffloadPlan(3, 0, NUM_LARGE, renamed(b"lost"), None)
        assert await linker.offload(lost) is Outcome.FAILED
        num_puts = watched.num_calls("batch_put_from_multi_buffers")
        for _ in range(10):
            assert await linker.offload(lost) is Outcome.FAILED
        assert watched.num_calls("batch_put_from_multi_buffers") == num_puts

        async def has_no_room() -> bool:
            return await linker.offload(lost) is Outcome.REJECTED

        await until(has_no_room)
        with running_node(master):

            async def is_stored() -> bool:
                return await linker.offload(lost) is Outcome.STORED

            await until(is_stored)
            again = LoadPlan(4, 0, NUM_LARGE, lost.pieces)
            assert await linker.load(again, landed.append) == NUM_LARGE
        await linker.aclose()


@pytest.mark.slow
async def test_a_node_that_is_killed_under_an_offload_leaves_pages_whole_or_absent():
    with running_master() as master, bare_client(master) as bare:
        watched = WatchedClient(bare)
        world, device = MooncakeWorld(watched), CpuDevice(LARGE, NUM_LARGE)
        linker = world.link(device, batch_bytes=16 * 2**20)
        await linker.open()
        watched.held, outcomes = {"batch_put_from_multi_buffers"}, []
        plan = OffloadPlan(1, 0, NUM_LARGE, large_piece(), None)

        async def write() -> None:
            outcomes.append(await linker.offload(plan))

        with running_node(master) as node:
            async with beating(), anyio.create_task_group() as group:
                group.start_soon(write)
                await in_thread(watched.arrived.wait, 20)
                killer = threading.Timer(0.002, node.kill)
                watched.gate.set()
                killer.start()
                await in_thread(killer.join)
        assert outcomes in ([Outcome.FAILED], [Outcome.STORED])
        asked = (Asked(0, 0, plan.pieces[0].hashes),)
        [found] = await linker.lookup(LookupPlan(2, 0, NUM_LARGE, asked))
        space = LARGE.space(POOL)
        for name, is_there in zip(plan.pieces[0].hashes, found, strict=True):
            size = bare.get_size(world.name(PageKey(name, space)))
            assert size == (linker._outgoing.num_bytes(space) if is_there else -704)
        assert all(found) == (outcomes == [Outcome.STORED])
        await linker.aclose()


@pytest.mark.slow
async def test_a_store_that_is_full_rejects():
    with (
        running_master() as master,
        running_node(master, 16 * 2**20),
        bare_client(master) as client,
    ):
        device = CpuDevice(LARGE, NUM_LARGE)
        linker = MooncakeWorld(client).link(device, batch_bytes=2**20)
        await linker.open()
        outcomes = set()
        for salt in range(8):
            renamed = tuple(
                piece._replace(
                    hashes=[bytes([salt]) + name[1:] for name in piece.hashes]
                )
                for piece in large_piece()
            )
            plan = OffloadPlan(1, 0, NUM_LARGE, renamed, None)
            outcomes.add(await linker.offload(plan))
        assert Outcome.REJECTED in outcomes
        assert outcomes <= {Outcome.REJECTED, Outcome.STORED}
        await linker.aclose()


@pytest.mark.slow
async def test_a_cache_serves_on_while_masters_and_nodes_die_and_hits_return():
    prompts = [prompt(3, seed=seed) for seed in range(4)]
    with running_master(f"--client_ttl={TTL_S}") as master:

        def link(device):
            return own_linker(master, device, client_ttl_s=0.1)

        limits = replace(LIMITS, breaker_s=0.5)
        # Room for two of four prompts: what is found again comes from the store.
        async with scene(linker=link, num_pages=8, check=False, limits=limits) as view:

            async def serve_all() -> int:
                return sum([await view.serve(tokens) for tokens in prompts])

            async def hits() -> bool:
                await view.cache.drain(deadline_s=GRACE_S)
                return await serve_all() >= 4 * 2 * PAGE

            async with beating():
                with running_node(master) as node:
                    await until(hits)
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(serve_all)
                        await anyio.lowlevel.checkpoint()
                        node.kill()
                    await serve_all()
                with running_node(master):
                    await until(hits)
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(serve_all)
                        await anyio.lowlevel.checkpoint()
                        master.kill()
                    await serve_all()
                    await in_thread(master.start)
                    await until(hits)
            await view.rest()


@pytest.mark.slow
async def test_a_master_that_comes_late_is_used_and_keeps_nobody_waiting():
    with running_master() as master:
        master.kill()

        def link(device):
            return own_linker(master, device)

        async with scene(linker=link, num_pages=4) as view:
            assert await view.serve(prompt(3)) == 0
            await in_thread(master.start)
            with running_node(master):

                async def hits() -> bool:
                    await view.cache.drain(deadline_s=GRACE_S)
                    return (
                        sum(
                            [
                                await view.serve(prompt(3, seed=seed))
                                for seed in range(2)
                            ]
                        )
                        == 2 * 3 * PAGE
                    )

                await until(hits)


@pytest.mark.slow
async def test_a_master_that_is_stopped_stops_no_loop_and_lookups_end_in_time():
    with (
        running_master() as master,
        running_node(master),
        bare_client(master) as client,
    ):
        watched = WatchedClient(client)
        device = make_device("pages")
        linker = MooncakeWorld(watched).link(device, lookup_s=0.2)
        await linker.open()
        assert await linker.offload(offload_plan(range(5))) is Outcome.STORED
        scope, answers = anyio.CancelScope(), []

        async def read() -> None:
            with scope:
                answers.append(await linker.load(load_plan(range(5)), answers.append))

        async with beating(), anyio.create_task_group() as group:
            with master.paused():
                watched.held = {"batch_get_into_multi_buffers"}
                group.start_soon(read)
                await in_thread(watched.arrived.wait, 20)
                watched.gate.set()
                scope.cancel()
                with anyio.fail_after(GRACE_S):
                    for _ in range(100):
                        assert await linker.lookup(LOOKUP) == [[False] * 5]
                late = own_linker(master, make_device("pages"))
                with anyio.fail_after(GRACE_S):
                    await late.open()
                    assert await late.lookup(LOOKUP) == [[False] * 5]
                    await late.aclose()
                assert not scope.cancelled_caught, "Mooncake still has the pages"
        assert scope.cancelled_caught

        async def answers_again() -> bool:
            return await linker.lookup(LOOKUP) == [[True] * 5]

        await until(answers_again)
        await linker.aclose()


@pytest.mark.slow
async def test_a_cache_closes_over_a_lookup_that_hangs():
    with running_master() as master, running_node(master):

        def link(device):
            return own_linker(master, device)

        async with beating():
            async with scene(linker=link, check=False, writes=ReadOnly()) as view:
                await view.serve(prompt(3))
                master.send_signal(signal.SIGSTOP)
                for seed in range(3):
                    assert await view.serve(prompt(3, seed=seed)) in {0, 3 * PAGE}
            master.send_signal(signal.SIGCONT)
