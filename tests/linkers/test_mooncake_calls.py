"""MooncakeLinker whose calls are cancelled, closed under, or never answered."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest

from asyncache.core import Asked, LookupPlan
from asyncache.linkers import Outcome
from asyncache.testing._cancel import Cancellation
from tests.linkers.plans import hashes, load_plan, make_device, meant, offload_plan
from tests.linkers.waits import GRACE_S, beating, in_thread, until
from tests.linkers.worlds import MooncakeWorld, WatchedClient, own_linker

PATTERN = 0x5A
LOOKUP = LookupPlan(1, 0, 5, (Asked(0, 0, hashes()),))


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
