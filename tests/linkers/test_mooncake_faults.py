"""MooncakeLinker where masters and nodes die, hang or come late."""

from __future__ import annotations

import signal
import threading
from array import array
from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest

from asyncache import AttentionPool, CpuDevice, KVLayout
from asyncache.core import Asked, LoadPlan, LookupPlan, Moved, OffloadPlan, PageKey
from asyncache.engine import ReadOnly
from asyncache.linkers import Outcome
from tests.engine.scene import LIMITS, PAGE, keys, prompt, scene
from tests.linkers.mooncake_server import (
    bare_client,
    running_master,
    running_node,
)
from tests.linkers.plans import hashes, load_plan, make_device, offload_plan
from tests.linkers.waits import GRACE_S, beating, in_thread, until
from tests.linkers.worlds import MooncakeWorld, WatchedClient, own_linker

# Until the master gives up a node that is gone.
TTL_S = 2
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
