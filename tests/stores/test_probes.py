"""Thirteen things that were done to another cache's stores, and what it came to there.

Each hung, served foreign bytes, leaked or lost count of its room, but for the last.
They are told by the names that the research gave them, and hold for every local store
of ours, or for the server that they need.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import pytest

from asyncache.devices import CpuDevice
from asyncache.linkers import StoreLinker
from asyncache.stores import FileStore, RedisStore, SegmentStore, Status, Store
from asyncache.testing import GateDevice, GateStore
from asyncache.testing._samples import LARGE_SPACE, SPACE, new_target
from asyncache.testing._store_identity import ODD_NAMESPACES, new_layout, page_keys
from tests.engine.scene import (
    LAYOUT,
    PAGE,
    check_pages,
    keys as keys_of,
    memory_store,
    prompt,
    scene,
    store_pages,
)
from tests.stores.mounts import mounted
from tests.stores.redis_server import running
from tests.stores.segments import SLOT, get, numbered, put, slot_of, which

HIT, MISS, CORRUPT = Status.HIT, Status.MISS, Status.CORRUPT
UNAVAILABLE, REJECTED = Status.UNAVAILABLE, Status.REJECTED
MIB = 2**20
CAP = 64 * SLOT


def segments(directory: Path) -> SegmentStore:
    return SegmentStore(directory, CAP, segment_bytes=16 * SLOT)


def files(directory: Path) -> FileStore:
    return FileStore(directory, CAP)


local = pytest.mark.parametrize("make", [segments, files])


def page_place(directory: Path, key) -> tuple[Path, int, int]:
    """Return the file in which a page is, where in it, and how long it is there."""
    name = key.hash.hex()
    path = directory / SPACE.name / name[-2:] / f"{name}.kv"
    if path.exists():
        return path, 0, path.stat().st_size
    return directory / "000000.seg", slot_of(directory, key), SPACE.page_bytes


def fill_up(path: Path) -> None:
    """Write to a file until the disk is full."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        with suppress(OSError):
            while True:
                os.write(descriptor, bytes(64 * 2**10))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("num_batches", [1, 2])
async def test_locklost_a_load_of_more_than_the_staging_holds(tmp_path, num_batches):
    tokens, [pool] = prompt(6), LAYOUT.pools
    page_bytes = LAYOUT.space(pool).page_bytes
    store = FileStore(tmp_path)
    await store.open()
    await store_pages(store, tokens)

    def linker(device):
        return StoreLinker(
            store, device, batch_bytes=2 * page_bytes, num_batches=num_batches
        )

    device = GateDevice(CpuDevice(LAYOUT, 16), is_open=True)
    async with scene(device=device, linker=linker) as view:
        with view.cache.request(tokens) as request:
            hit = await (await request.restore()).wait()
            assert hit.num_tokens == 6 * PAGE
            check_pages(view.device, request, tokens, hit.num_tokens)
        with anyio.fail_after(20):
            assert all(await store.contains(keys_of(tokens)))


@local
async def test_truncated_half_a_page_is_no_page_and_comes_back(tmp_path, make):
    keys = numbered(0, 4)
    async with make(tmp_path) as store:
        await put(store, keys)
        path, start, size = page_place(tmp_path, keys[1])
        with path.open("r+b") as file:
            file.seek(start + size // 2)
            if path.suffix == ".kv":
                file.truncate()
            else:
                file.write(bytes(size // 2))
        statuses = await get(store, keys)
        assert statuses == [HIT, CORRUPT, HIT, HIT]
        # It is no page any more, so that it may be one again.
        assert await put(store, keys) == [HIT] * 4
        assert await get(store, keys) == [HIT] * 4


@local
async def test_bitflip_is_not_served(tmp_path, make):
    keys = numbered(0, 4)
    async with make(tmp_path) as store:
        await put(store, keys)
        path, start, _ = page_place(tmp_path, keys[2])
        with path.open("r+b") as file:
            file.seek(start + 256)
            file.write(b"\xa5" * 64)
        assert await get(store, keys) == [HIT, HIT, CORRUPT, HIT]
        assert await get(store, keys[2:3]) == [MISS]


@local
async def test_missing_what_is_behind_the_index_is_a_miss(tmp_path, make):
    keys = numbered(0, 4)
    async with make(tmp_path) as store:
        await put(store, keys)
        path, _, _ = page_place(tmp_path, keys[0])
        path.unlink()
        async with make(tmp_path) as late:
            statuses = await get(late, keys)
            assert statuses[0] is MISS
            assert set(statuses) <= {HIT, MISS}
            await late.remove(keys)
            assert await put(late, keys) == [HIT] * 4


@pytest.mark.parametrize("make", [segments, files])
async def test_enospc_a_write_that_fails_is_told_and_may_be_tried_again(tmp_path, make):
    """A full tmpfs; pages of 128 KiB, so that one of them fails half-way."""
    directory = tmp_path / "cache"
    with mounted(directory, "size=14m,mode=700"):
        store = (
            SegmentStore(directory, MIB, segment_bytes=MIB)
            if make is segments
            else FileStore(directory)
        )
        async with store:
            ballast = directory / "ballast"
            fill_up(ballast)
            keys = numbered(0, 3, LARGE_SPACE)
            statuses = await put(store, keys)
            # Slots are there already; the index may have room or not.
            assert set(statuses) <= {HIT, REJECTED, UNAVAILABLE}
            assert await which(store, keys) == [
                at for at, status in enumerate(statuses) if status is HIT
            ]
            assert not [path for path in directory.rglob("tmp/*") if path.is_file()]
            ballast.unlink()
            assert await put(store, keys) == [HIT] * 3
            assert await get(store, keys) == [HIT] * 3


@local
async def test_restart_finds_all_and_counts_all(tmp_path, make):
    keys = numbered(0, 40)
    async with make(tmp_path) as store:
        await put(store, keys)
    async with make(tmp_path) as store:
        assert await get(store, keys) == [HIT] * 40
        for start in range(100, 300, 20):
            assert await put(store, numbered(start, start + 20)) == [HIT] * 20
    pages = [path for path in tmp_path.rglob("*") if path.suffix in {".kv", ".seg"}]
    assert sum(path.stat().st_size for path in pages) <= CAP + SLOT


@local
async def test_removeacct_an_emptied_store_takes_as_much_again(tmp_path, make):
    async with make(tmp_path) as store:
        for number in range(3):
            keys = numbered(100 * number, 100 * number + 48)
            assert await put(store, keys) == [HIT] * 48
            assert await which(store, keys) == list(range(48))
            await store.remove(keys)
            assert await which(store, keys) == []


@local
async def test_tagcollide_no_two_tenants_have_a_name_in_common(tmp_path, make):
    layout = new_layout()
    names = [*ODD_NAMESPACES, "a@b", "a%40b", "a@b%1", ("a", "@b"), "a/../b", "a\0b"]
    chains = {name: page_keys(layout, name) for name in dict.fromkeys(names)}
    assert len({key.name for chain in chains.values() for key in chain}) == sum(
        map(len, chains.values())
    )
    first, *others = chains.values()
    async with make(tmp_path) as store:
        await put(store, first[:1])
        for chain in others:
            assert await get(store, chain[:1]) == [MISS]


async def test_executor_gets_that_ran_out_of_time_break_nothing():
    with running() as server:
        keys = numbered(0, 8)
        async with RedisStore(server.url, timeout_s=0.3) as store:
            await put(store, keys)
            with server.paused():
                async with anyio.create_task_group() as group:
                    for _ in range(8):
                        group.start_soon(get, store, keys)
            with anyio.fail_after(30):
                while await get(store, keys) != [HIT] * 8:
                    pass
                assert await store.contains(keys) == [True] * 8


async def test_loopblock_a_read_that_finds_no_buffer_does_not_stop_the_loop():
    tokens, other = prompt(3), prompt(3, seed=1)
    store = GateStore(await memory_store(tokens, other), is_open=True)
    store.get_gate.close()
    device = GateDevice(CpuDevice(LAYOUT, 16), is_open=True)

    def linker(device):
        return StoreLinker(store, device, num_batches=1)

    async with scene(device=device, linker=linker) as view:
        with view.cache.request(tokens) as holds, view.cache.request(other) as waits:
            await holds.restore()
            await store.get_gate.wait_arrived()
            hit = await waits.restore(deadline_s=0.1)
            beats = 0
            async with anyio.create_task_group() as group:

                async def beat() -> None:
                    nonlocal beats
                    while True:
                        await anyio.sleep(0.001)
                        beats += 1

                group.start_soon(beat)
                # Its deadline frees it, whatever the store does.
                with anyio.fail_after(20):
                    await hit.wait()
                group.cancel_scope.cancel()
            assert hit.num_tokens == 0
            assert beats > 5
            store.get_gate.open()


@pytest.mark.parametrize("num_reads", [0, 8])
async def test_closehang_a_close_ends_while_the_server_is_stopped(num_reads):
    with running() as server:
        keys = numbered(0, 4)
        store = RedisStore(server.url, timeout_s=60)
        await store.open()
        await put(store, keys)
        with server.paused():
            async with anyio.create_task_group() as group:
                for _ in range(num_reads):
                    group.start_soon(get, store, keys)
                await anyio.wait_all_tasks_blocked()
                start = time.monotonic()
                await store.aclose()
                assert time.monotonic() - start < 20


@local
async def test_fstmp_two_writers_of_one_key_both_succeed(tmp_path, make):
    async with make(tmp_path) as one, make(tmp_path) as other:
        for number in range(50):
            keys = numbered(number, number + 3)
            async with anyio.create_task_group() as group:
                results = []

                async def write(store: Store, keys=keys, results=results) -> None:
                    results.append(await put(store, keys))

                group.start_soon(write, one)
                group.start_soon(write, other)
            assert results == [[HIT] * 3] * 2
            assert await get(one, keys) == [HIT] * 3


@local
async def test_cancelget_two_hundred_cancelled_reads_leave_nothing_behind(
    tmp_path, make
):
    tokens = prompt(4)
    async with make(tmp_path) as store:
        await store_pages(store, tokens)
        keys = keys_of(tokens)
        targets = [new_target(key) for key in keys]
        for number in range(200):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(partial(store.get_into, keys, targets))
                    for _ in range(number % 4):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()
        assert not store._reads._running
        assert await store.get_into(keys, targets) == [HIT] * len(keys)
