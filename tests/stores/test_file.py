"""FileStore: the contract, the directory, faults of the disk, every kind of end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from asyncache.core import OrderError, PageHash, PageKey, PageSpace, StoreError
from asyncache.stores import FileStore, Status
from asyncache.stores._directory import STALE_S
from asyncache.testing import CancelStyle, cancel_nth, check_store
from asyncache.testing._cancel import Cancellation, cancel_after
from asyncache.testing._samples import (
    LARGE_SPACE,
    SPACE,
    content,
    fill,
    new_keys,
    new_source,
    new_target,
    one_a_layer,
    views,
)
from asyncache.testing._store_identity import ODD_NAMESPACES, new_layout, page_keys
from tests.stores.behind import PageFiles
from tests.stores.mounts import mounted, remount_read_only

LAYOUT = new_layout()
MANY_LAYERS = PageSpace("kv", "all", "uint8", (1500, 1, 1, 1, 8))
# 1 MiB a page: a few of them make more than one job.
BIG = PageSpace("kv", "all", "uint8", (4, 2, 16, 32, 256))


async def put(store: FileStore, keys: list[PageKey]) -> list[Status]:
    return await store.put(keys, [new_source(key) for key in keys])


async def get(store: FileStore, keys: list[PageKey]) -> list[Status]:
    """Read pages, and check the bytes of those that are hits."""
    targets = [new_target(key) for key in keys]
    statuses = await store.get_into(keys, targets)
    for key, status, [target] in zip(keys, statuses, targets, strict=True):
        assert status is not Status.HIT or target == content(key)
    return statuses


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def pages_in(directory: Path) -> list[Path]:
    return [path for path in files_in(directory) if path.suffix == ".kv"]


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
async def test_it_keeps_the_contract(tmp_path):
    await check_store(
        partial(FileStore, tmp_path),
        stored=lambda _: PageFiles(tmp_path),
        reopen=partial(FileStore, tmp_path),
    )


async def test_it_keeps_the_contract_without_checksums_and_on_one_thread(tmp_path):
    await check_store(lambda: FileStore(tmp_path, checksums=False, num_threads=1))


async def test_it_keeps_the_contract_when_it_waits_for_the_disk(tmp_path):
    await check_store(lambda: FileStore(tmp_path, durable=True))


async def test_pages_outlive_the_store(tmp_path):
    keys = new_keys(5)
    async with FileStore(tmp_path) as store:
        await put(store, keys)
    async with FileStore(tmp_path) as store:
        assert await get(store, keys) == [Status.HIT] * 5


async def test_no_namespace_reaches_a_file_name(tmp_path):
    keys = [page_keys(LAYOUT, namespace)[0] for namespace in ODD_NAMESPACES]
    async with FileStore(tmp_path) as store:
        await put(store, keys)
        assert await get(store, keys) == [Status.HIT] * len(keys)
    [space] = {key.space.name for key in keys}
    assert {str(path.relative_to(tmp_path)) for path in pages_in(tmp_path)} == {
        f"{space}/{key.hash.hex()[-2:]}/{key.hash.hex()}.kv" for key in keys
    }


async def test_stores_of_one_directory_share_their_pages(tmp_path):
    keys = new_keys(5)
    async with FileStore(tmp_path) as one, FileStore(tmp_path) as other:
        await put(one, keys)
        assert await put(other, keys) == [Status.HIT] * 5
        assert await get(other, keys) == [Status.HIT] * 5


async def test_a_batch_larger_than_a_job_is_stored_and_read_whole(tmp_path):
    keys = [*new_keys(6, BIG), *new_keys(2), *new_keys(6, BIG)]
    async with FileStore(tmp_path) as store:
        assert await put(store, keys) == [Status.HIT] * 14
        assert await get(store, keys) == [Status.HIT] * 14


async def test_a_page_may_have_more_buffers_than_one_system_call_takes(tmp_path):
    [key] = new_keys(1, MANY_LAYERS)
    sizes = one_a_layer(MANY_LAYERS)
    memory = bytearray(MANY_LAYERS.page_bytes)
    async with FileStore(tmp_path) as store:
        [status] = await store.put([key], [views(content(key), sizes)])
        assert status is Status.HIT
        [status] = await store.get_into([key], [views(memory, sizes)])
    assert status is Status.HIT
    assert memory == content(key)


async def test_nothing_is_left_beside_the_pages(tmp_path):
    keys = new_keys(3)
    async with FileStore(tmp_path) as store:
        await put(store, keys)
        await store.remove(keys[:1])
    assert len(pages_in(tmp_path)) == 2
    assert set(files_in(tmp_path)) - set(pages_in(tmp_path)) == {
        tmp_path / "asyncache.json"
    }


async def test_no_file_is_left_open_and_no_thread_after_close(tmp_path):
    threads, num_open = threading.active_count(), num_descriptors()
    store = FileStore(tmp_path)
    assert threading.active_count() == threads
    async with store:
        keys = new_keys(8, BIG)
        await put(store, keys)
        await get(store, [*keys, *new_keys(3)])
        assert threading.active_count() > threads
        assert num_descriptors() == num_open
    assert threading.active_count() == threads


async def test_the_directory_may_vanish_under_the_store(tmp_path):
    keys = new_keys(3)
    async with FileStore(tmp_path / "cache") as store:
        await put(store, keys)
        shutil.rmtree(tmp_path / "cache")
        assert await store.contains(keys) == [False] * 3
        assert await get(store, keys) == [Status.MISS] * 3
        assert await put(store, keys) == [Status.HIT] * 3
        assert await get(store, keys) == [Status.HIT] * 3


async def test_a_store_that_is_not_open_says_so(tmp_path):
    store = FileStore(tmp_path)
    with pytest.raises(OrderError, match=r"is not open: await its open\(\) first"):
        await store.contains(new_keys(1))
    await store.aclose()


def test_a_store_needs_a_thread(tmp_path):
    with pytest.raises(ValueError, match="num_threads must be at least 1, not 0"):
        FileStore(tmp_path, num_threads=0)


async def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    store = FileStore(tmp_path / "file" / "cache")
    with pytest.raises(StoreError, match=r"cannot keep pages in '.*/file/cache'"):
        await store.open()
    await store.aclose()


async def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    with mounted(tmp_path / "cache", "size=1m,mode=755"):
        (tmp_path / "cache" / "tmp").mkdir()
        remount_read_only(tmp_path / "cache")
        store = FileStore(tmp_path / "cache")
        with pytest.raises(StoreError, match=r"/cache'.*Read-only file system"):
            await store.open()
        await store.aclose()


async def test_a_directory_that_became_read_only_is_unavailable_and_not_full(tmp_path):
    keys = new_keys(2)
    with mounted(tmp_path / "cache", "size=1m"):
        async with FileStore(tmp_path / "cache") as store:
            await put(store, keys[:1])
            remount_read_only(tmp_path / "cache")
            assert await put(store, keys) == [Status.HIT, Status.UNAVAILABLE]
            await store.remove(keys)
            assert await get(store, keys) == [Status.HIT, Status.MISS]


async def test_a_newer_format_is_refused(tmp_path):
    (tmp_path / "asyncache.json").write_text(json.dumps({"format": 3}))
    store = FileStore(tmp_path)
    with pytest.raises(StoreError, match="says format 3, this asyncache knows 2"):
        await store.open()
    await store.aclose()
    assert files_in(tmp_path) == [tmp_path / "asyncache.json"]


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"format": "x"}', "\x00\xff"])
async def test_a_foreign_control_file_is_refused(tmp_path, text):
    (tmp_path / "asyncache.json").write_text(text)
    store = FileStore(tmp_path)
    with pytest.raises(StoreError, match="is no store's"):
        await store.open()
    await store.aclose()


async def test_many_stores_may_be_opened_at_once(tmp_path):
    async def use() -> None:
        async with FileStore(tmp_path / "cache") as store:
            keys = new_keys(2)
            await put(store, keys)
            assert await get(store, keys) == [Status.HIT] * 2

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(use)


async def test_files_of_dead_writers_are_swept_and_those_of_the_living_are_not(
    tmp_path,
):
    async with FileStore(tmp_path):
        pass
    dead, alive = tmp_path / "tmp" / "dead-1", tmp_path / "tmp" / "alive-1"
    planted = tmp_path / "tmp" / "planted"
    planted.mkdir()
    dead.write_text("half a page")
    alive.write_text("half a page")
    for path in (dead, planted):
        then = path.stat().st_mtime - STALE_S - 1
        os.utime(path, (then, then))
    async with FileStore(tmp_path):
        assert (dead.exists(), alive.exists(), planted.exists()) == (False, True, True)


async def test_a_full_disk_rejects_what_has_no_room_and_recovers(tmp_path):
    keys = new_keys(16, LARGE_SPACE)
    with mounted(tmp_path / "cache", "size=1m"):
        async with FileStore(tmp_path / "cache") as store:
            statuses = await put(store, keys)
            num_stored = statuses.count(Status.HIT)
            assert 0 < num_stored < 8
            assert statuses == [Status.HIT] * num_stored + [Status.REJECTED] * (
                16 - num_stored
            )
            # No half page is left, and what is there is neither lost nor refused.
            assert len(pages_in(tmp_path / "cache")) == num_stored
            assert list((tmp_path / "cache" / "tmp").iterdir()) == []
            assert await get(store, keys[:num_stored]) == [Status.HIT] * num_stored
            again = [keys[-1], *keys[:num_stored]]
            assert await put(store, again) == [
                Status.REJECTED,
                *[Status.HIT] * num_stored,
            ]
            await store.remove(keys[:num_stored])
            assert await put(store, keys[-num_stored:]) == [Status.HIT] * num_stored


async def test_a_full_disk_is_not_tried_again_in_the_same_batch(tmp_path):
    large, small = new_keys(16, LARGE_SPACE), new_keys(1)
    with mounted(tmp_path / "cache", "size=1m"):
        async with FileStore(tmp_path / "cache") as store:
            statuses = await put(store, [*small, *large, *small, *new_keys(1)])
            assert statuses[0] is statuses[-2] is Status.HIT
            assert statuses[-1] is Status.REJECTED
            assert await put(store, new_keys(1)) == [Status.HIT]


async def test_a_missing_descriptor_is_no_answer_and_not_a_miss(tmp_path):
    import resource

    keys = new_keys(2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with FileStore(tmp_path) as store:
        await put(store, keys[:1])
        lowest = os.open("/dev/null", os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            read, written = await get(store, keys[:1]), await put(store, keys[1:])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (read, written) == ([Status.UNAVAILABLE], [Status.UNAVAILABLE])
        assert await get(store, keys) == [Status.HIT, Status.MISS]


@pytest.mark.parametrize("how", Cancellation)
async def test_a_large_batch_may_be_cancelled_at_any_moment(tmp_path, how):
    num_turns, was_cancelled = 0, True
    async with FileStore(tmp_path) as store:
        while was_cancelled:
            keys = new_keys(12, BIG)
            sources = [new_source(key) for key in keys]
            was_cancelled = await cancel_after(
                num_turns, lambda k=keys, s=sources: store.put(k, s), how
            )
            fill(sources, b"\xff")
            assert list((tmp_path / "tmp").iterdir()) == []
            assert set(await get(store, keys)) <= {Status.HIT, Status.MISS}
            await store.remove(keys)
            num_turns = 2 * num_turns + 1


@pytest.mark.parametrize("style", CancelStyle)
async def test_opening_may_be_cancelled_and_tried_again(tmp_path, style):
    class Fresh:
        async def __aenter__(self) -> FileStore:
            self.store = FileStore(tmp_path)
            return self.store

        async def __aexit__(self, *_: object) -> None:
            await self.store.aclose()

    async def check(store: FileStore) -> None:
        await store.open()
        keys = new_keys(1)
        assert await put(store, keys) == [Status.HIT]

    await cancel_nth(FileStore.open, fresh=Fresh, check=check, styles=[style])


async def test_closing_under_a_batch_answers_for_the_pages_it_reached(tmp_path):
    keys = new_keys(64, BIG)
    answers = []
    store = FileStore(tmp_path, num_threads=1)
    await store.open()
    sources = [new_source(key) for key in keys]

    async def put_all() -> None:
        answers.extend(await store.put(keys, sources))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(put_all)
        while not pages_in(tmp_path):
            await anyio.lowlevel.checkpoint()
        await store.aclose()
    assert set(answers) == {Status.HIT, Status.UNAVAILABLE}
    assert len(pages_in(tmp_path)) == answers.count(Status.HIT)


# Imports no more than it must: it is started anew each time.
WRITER = """
import asyncio, hashlib, sys
from asyncache.core import PageHash, PageKey, PageSpace
from asyncache.stores import FileStore

space = PageSpace(*eval(sys.argv[3]))

def content(key):
    return memoryview(hashlib.shake_128(key.name.encode()).digest(space.page_bytes))

async def main():
    async with FileStore(sys.argv[1]) as store:
        print("open", flush=True)
        for start in range(int(sys.argv[2]), 1_000_000, 20):
            hashes = [(start + index).to_bytes(32, "little") for index in range(20)]
            keys = [PageKey(PageHash(hash), space) for hash in hashes]
            await store.put(keys, [[content(key)] for key in keys])

asyncio.run(main())
"""


def numbered(start: int, stop: int) -> list[PageKey]:
    return [
        PageKey(PageHash(number.to_bytes(32, "little")), LARGE_SPACE)
        for number in range(start, stop)
    ]


@pytest.mark.slow
def test_a_writer_killed_in_the_middle_leaves_no_half_page(tmp_path):
    num_stored = 0
    for round_number in range(8):
        num_stored = kill_a_writer(tmp_path, start=num_stored, after=round_number + 1)

    async def read_all() -> list[Status]:
        async with FileStore(tmp_path) as store:
            return await get(store, numbered(0, num_stored + 40))

    with ThreadPoolExecutor(1) as pool:
        statuses = pool.submit(asyncio.run, read_all()).result()
    assert statuses.count(Status.HIT) == len(pages_in(tmp_path)) >= 8
    assert set(statuses) == {Status.HIT, Status.MISS}


def kill_a_writer(directory: Path, *, start: int, after: int) -> int:
    """Kill a writer once it has stored some pages; return how many there are now."""
    space = repr(dataclasses.astuple(LARGE_SPACE))
    command = [sys.executable, "-c", WRITER, str(directory), str(start), space]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        while len(pages_in(directory)) < start + after and writer.poll() is None:
            pass
        writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    return len(pages_in(directory))


async def test_layers_are_read_without_looking_at_the_others(tmp_path):
    [key] = new_keys(1)
    async with FileStore(tmp_path) as store:
        await put(store, [key])
        [path] = pages_in(tmp_path)
        spoilt = bytearray(path.read_bytes())
        spoilt[-1] ^= 1
        path.write_bytes(spoilt)
        layers = range(SPACE.num_layers - 1)
        target = new_target(key, layers)
        assert await store.get_into([key], [target], layers) == [Status.HIT]
        assert target[0] == content(key)[: len(layers) * SPACE.layer_bytes]
        last = range(SPACE.num_layers - 1, SPACE.num_layers)
        target = new_target(key, last)
        assert await store.get_into([key], [target], last) == [Status.CORRUPT]
        assert await store.contains([key]) == [False]
