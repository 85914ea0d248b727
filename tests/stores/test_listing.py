"""Which pages there are, and what is given back of what nobody can read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asyncache.core import ClosedError, OrderError, PageKey, StoreError
from asyncache.stores import (
    Control,
    EncryptedStore,
    FileStore,
    MemoryStore,
    RedisStore,
    SegmentStore,
    Status,
    Store,
    StoreKind,
    TieredStore,
    _page_walk as page_walk,
    frame_bytes,
    frame_page,
    read_control,
    unframe_page,
)
from asyncache.stores._directory import STALE_S
from asyncache.stores._redis_pages import scan
from asyncache.stores._redis_wire import Wire, WireError
from asyncache.stores._segment_directory import FORMAT
from asyncache.testing import FaultyStore, GateStore, check_store
from asyncache.testing._samples import SPACE, content, new_keys
from tests.stores.redis_server import running
from tests.stores.segments import (
    SLOT,
    WIDE,
    counts,
    get,
    index_of,
    numbered,
    put,
    small_store,
)
from tests.stores.test_segment_processes import start_holder

HIT, MISS, CORRUPT = Status.HIT, Status.MISS, Status.CORRUPT
LONG_AGO_S = STALE_S + 1


async def listed(store: Store) -> list[PageKey]:
    found = []
    async for key in store.keys():
        found.append(key)  # noqa: PERF401 - else it passes for a dict
    return found


async def drain(left: AsyncIterator[PageKey]) -> None:
    async for _ in left:
        pass


class Bare(MemoryStore):
    """A store of somebody who knows neither call."""

    keys = Store.keys


# The contract.


async def test_a_store_that_cannot_list_says_so_and_keeps_the_contract():
    await check_store(lambda: Bare(16 * 2**20))
    with pytest.raises(StoreError, match=r"^Bare cannot list its pages$"):
        await listed(Bare(0))
    assert await Bare(0).collect_garbage() == 0


async def test_a_store_that_lists_what_is_not_there_breaks_the_contract():
    class Late(MemoryStore):
        async def keys(self):
            for key in keys:
                yield key

        async def put(self, some, sources):
            keys.extend(some)
            return await super().put(some, sources)

    keys: list[PageKey] = []
    with pytest.raises(AssertionError, match="keys: expected") as broken:
        await check_store(lambda: Late(16 * 2**20))
    [note] = broken.value.__notes__
    assert note.endswith("what_is_put_is_listed_and_what_is_removed_is_not")


async def test_a_coded_store_names_the_one_that_can_tell():
    store = EncryptedStore(MemoryStore(1), key=bytes(32))
    with pytest.raises(StoreError, match=r"^EncryptedStore cannot .* <MemoryStore"):
        await listed(store)
    assert await store.collect_garbage() == 0
    await store.aclose()


async def test_fakes_ask_the_store_inside():
    keys = new_keys(2)
    inner = MemoryStore(2**20)
    await put(inner, keys)
    for store in (FaultyStore(inner), GateStore(inner)):
        assert sorted(await listed(store)) == sorted(keys)
        assert await store.collect_garbage() == 0


async def test_tiers_list_each_page_once_and_give_back_what_each_does(tmp_path):
    slow = FileStore(tmp_path)
    fast = MemoryStore(2**20)
    async with TieredStore([fast, slow]) as store:
        keys = new_keys(3)
        await put(store, keys)
        await fast.remove(keys[:1])
        await slow.remove(keys[1:2])
        assert sorted(await listed(store)) == sorted(keys)
        plant_dead(tmp_path, b"half a page")
        assert await store.collect_garbage() == 11
        left = store.keys()
        await anext(left)
        await store.aclose()
        with pytest.raises(ClosedError):
            await anext(left)


async def test_memory_lists_no_page_that_is_gone_by_then():
    store = MemoryStore(2**20)
    keys = new_keys(3)
    await put(store, keys)
    left = store.keys()
    keys.remove(await anext(left))
    gone, stays = keys
    await store.remove([gone])
    assert [key async for key in left] == [stays]


# Files.


def plant_dead(directory: Path, text: bytes) -> Path:
    path = directory / "tmp" / "dead"
    path.write_bytes(text)
    age(path)
    return path


def age(path: Path) -> None:
    then = path.stat().st_mtime - LONG_AGO_S
    os.utime(path, (then, then))


def left_of(*paths: Path) -> list[Path]:
    return [path for path in paths if os.path.lexists(path)]


def path_of(directory: Path, key: PageKey) -> Path:
    name = key.hash.hex()
    return directory / key.space.name / name[-2:] / f"{name}.kv"


async def test_only_what_is_a_page_is_listed(tmp_path):
    keys = new_keys(6)
    async with FileStore(tmp_path) as store:
        await put(store, keys)
        folder = tmp_path / SPACE.name
        page = path_of(tmp_path, keys[0]).read_bytes()
        for name in ("notes.txt", "xx/notes", "00/notes", f"00/{'f' * 64}.kv"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(page)
        (tmp_path / "foreign").mkdir()
        (tmp_path / "foreign" / "00").write_text("")
        (tmp_path / "kv-all-uint8-999999999x9").write_text("no directory")
        path_of(tmp_path, keys[1]).write_bytes(page[:-1])
        path_of(tmp_path, keys[2]).unlink()
        path_of(tmp_path, keys[2]).mkdir()
        path_of(tmp_path, keys[3]).unlink()
        path_of(tmp_path, keys[3]).symlink_to("/etc/passwd")
        assert sorted(await listed(store)) == sorted([keys[0], *keys[4:]])


async def test_a_claim_of_a_million_layers_costs_nothing(tmp_path):
    async with FileStore(tmp_path) as store:
        name = "0" * 64
        path = tmp_path / f"kv-all-uint8-{10**15}x1" / "00" / f"{name}.kv"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"no such page")
        assert await listed(store) == []
        assert await store.collect_garbage() == 12
        assert not path.exists()


async def test_what_is_no_page_under_a_pages_name_is_garbage(tmp_path):
    keys = new_keys(6)
    async with FileStore(tmp_path) as store:
        await put(store, keys)
        paths = [path_of(tmp_path, key) for key in keys]
        os.truncate(paths[0], 100)
        paths[1].write_bytes(paths[1].read_bytes() + b"x")
        for path in paths[2:5]:
            path.unlink()
        paths[2].symlink_to(tmp_path / "asyncache.json")
        os.mkfifo(paths[3])
        paths[4].mkdir()
        dead = plant_dead(tmp_path, bytes(1000))
        alive = tmp_path / "tmp" / "alive"
        alive.write_text("half a page")
        freed = await store.collect_garbage()
        assert freed == 100 + frame_bytes(SPACE) + 1 + 1000
        assert left_of(*paths[:5], dead) == []
        assert alive.exists()
        assert (tmp_path / "asyncache.json").exists()
        assert await listed(store) == keys[5:]
        assert await store.collect_garbage() == 0


async def test_a_directory_that_vanishes_holds_nothing(tmp_path):
    async with FileStore(tmp_path / "cache") as store:
        await put(store, new_keys(2))
        shutil.rmtree(tmp_path / "cache")
        assert await listed(store) == []
        assert await store.collect_garbage() == 0


async def test_pages_that_vanish_under_the_walk_are_not_listed(tmp_path, monkeypatch):
    keys = new_keys(3)
    async with FileStore(tmp_path) as store:
        await put(store, keys)
        look = page_walk._look

        def look_late(path, key):
            if key == keys[1]:
                Path(path).unlink()
            return look(path, key)

        monkeypatch.setattr(page_walk, "_look", look_late)
        assert sorted(await listed(store)) == sorted([keys[0], keys[2]])


async def test_a_directory_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with FileStore(tmp_path) as store:
        monkeypatch.setattr(os, "scandir", fail)
        with pytest.raises(StoreError, match=r"cannot list its pages: .*Input/output"):
            await listed(store)
        with pytest.raises(StoreError, match=r"cannot remove garbage: .*Input/output"):
            await store.collect_garbage()


async def test_a_listing_of_files_ends_with_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncache.stores._file._JOB_ENTRIES", 2)
    async with FileStore(tmp_path) as store:
        await put(store, new_keys(8))
        left = store.keys()
        await anext(left)
        await store.aclose()
        with pytest.raises(ClosedError):
            await drain(left)


async def test_what_is_closed_or_not_open_collects_nothing(tmp_path):
    for store in (FileStore(tmp_path), SegmentStore(tmp_path / "s", 2**30)):
        for call in (listed, lambda s: s.collect_garbage()):
            with pytest.raises(OrderError, match="is not open"):
                await call(store)
        await store.aclose()
        with pytest.raises(ClosedError):
            await store.collect_garbage()


async def test_collecting_ends_with_the_store(tmp_path, monkeypatch):
    keys = new_keys(2)
    walked, closing = threading.Event(), threading.Event()

    def slow_walk(directory):
        for entry in page_walk.walk(directory):
            walked.set()
            closing.wait(30)
            yield entry

    async with FileStore(tmp_path) as store:
        await put(store, keys)
        os.truncate(path_of(tmp_path, keys[0]), 100)
        monkeypatch.setattr("asyncache.stores._file.walk", slow_walk)

        async def close() -> None:
            await anyio.to_thread.run_sync(walked.wait)
            async with anyio.create_task_group() as others:
                others.start_soon(store.aclose)
                while not store._writes._closed:
                    await anyio.lowlevel.checkpoint()
                closing.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
            assert await store.collect_garbage() == 0


@pytest.mark.parametrize("kind", [FileStore, small_store])
async def test_who_waits_for_a_thread_when_the_store_is_closed_is_told(tmp_path, kind):
    store = kind(tmp_path, num_threads=1)
    async with store:
        await put(store, numbered(0, 2))
        store._reads.executor.submit(await_shutdown, store._reads.executor)

        async def close() -> None:
            await anyio.wait_all_tasks_blocked()
            await store.aclose()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
            with pytest.raises(ClosedError):
                await listed(store)


def await_shutdown(executor: ThreadPoolExecutor) -> None:
    """Keep a thread until the jobs that wait behind this one were dropped."""
    while True:
        with executor._shutdown_lock:
            if executor._shutdown:
                return
        time.sleep(0.001)


# Files, as they are.


def look_at(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


async def test_files_that_are_opened_as_they_are_stay_as_they_are(tmp_path):
    keys, plain = new_keys(3), new_keys(2)
    async with FileStore(tmp_path) as store:
        await put(store, keys)
    async with FileStore(tmp_path, checksums=False) as store:
        await put(store, plain)
    plant_dead(tmp_path, b"half a page")
    before = look_at(tmp_path)
    async with FileStore(tmp_path, create=False) as store:
        assert sorted(await listed(store)) == sorted([*keys, *plain])
        assert await get(store, [*keys, *plain]) == [HIT] * 3 + [MISS] * 2
    async with FileStore(tmp_path, create=False, checksums=False) as store:
        assert await get(store, plain) == [HIT] * 2
    assert look_at(tmp_path) == before
    async with FileStore(tmp_path, create=False) as store:
        path = path_of(tmp_path, keys[0])
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert await get(store, keys) == [CORRUPT, HIT, HIT]
        shutil.rmtree(tmp_path / "tmp")
        assert await put(store, keys[:1]) == [HIT]
        assert await get(store, keys[:1]) == [HIT]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no store: it has no asyncache.json"),
        ("nonsense", "asyncache.json is no store's: b'nonsense'"),
        ("[" * 100_000, "is no store's"),
        ('{"format": true}', "is no store's"),
        ('{"format": "asyncache segments x", "segment_bytes": 1}', "is no store's"),
        ('{"format": "asyncache segments 1", "segment_bytes": 0}', "is no store's"),
        ('{"format": 99}', "holds files of format 99, not files of format "),
        (
            '{"format": "asyncache segments 1", "segment_bytes": 4096}',
            "holds segments of format 1, not files",
        ),
    ],
)
async def test_no_store_of_files_is_opened_as_it_is(tmp_path, text, message):
    if text is not None:
        (tmp_path / "asyncache.json").write_text(text)
    before = look_at(tmp_path)
    store = FileStore(tmp_path, create=False)
    with pytest.raises(StoreError, match=message):
        await store.open()
    await store.aclose()
    assert look_at(tmp_path) == before


def test_a_directory_says_what_it_holds(tmp_path):
    control = tmp_path / "asyncache.json"
    control.write_text('{"format": 7}')
    assert read_control(str(tmp_path)) == Control(StoreKind.FILES, 7, 0)
    control.write_text('{"format": "asyncache segments 3", "segment_bytes": 4096}')
    assert read_control(str(tmp_path)) == Control(StoreKind.SEGMENTS, 3, 4096)
    control.unlink()
    control.mkdir()
    with pytest.raises(StoreError, match=r"cannot read .*asyncache.json"):
        read_control(str(tmp_path))


# Segments.


async def test_segments_are_listed_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncache.stores._segment_census._MOST_PAGES", 3)
    keys = [*numbered(0, 7), *numbered(0, 3, WIDE)]
    async with small_store(tmp_path, 4) as store:
        await put(store, keys)
        assert set(await listed(store)) == {*keys}
        left = store.keys()
        await anext(left)
        await store.aclose()
        with pytest.raises(ClosedError):
            await drain(left)


async def test_what_a_broken_index_calls_a_page_is_not_listed(tmp_path):
    keys = numbered(0, 3)
    async with small_store(tmp_path) as store:
        await put(store, keys)
        with index_of(tmp_path) as index:
            index.execute("UPDATE page SET hash = 'text' WHERE hash = ?", keys[0][:1])
            index.execute("INSERT INTO space VALUES (9, '../space', 1)")
            index.execute("UPDATE page SET hash = x'00' WHERE hash = ?", keys[1][:1])
        assert await listed(store) == keys[2:]


async def test_an_index_that_cannot_be_read_is_told(tmp_path):
    async with small_store(tmp_path) as store:
        await put(store, numbered(0, 3))
        for path in tmp_path.glob("index.db*"):
            path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(StoreError, match="cannot tell"):
            await listed(store)


async def test_segments_without_files_and_files_without_segments_are_garbage(tmp_path):
    keys = numbered(0, 8)
    async with small_store(tmp_path, 2) as store:
        await put(store, keys)
        (tmp_path / "000001.seg").unlink()
        (tmp_path / "000007.seg").write_bytes(bytes(100))
        assert await store.collect_garbage() == 100
        assert await listed(store) == keys[:4]
        assert await get(store, keys) == [HIT] * 4 + [MISS] * 4
        assert {path.name for path in tmp_path.glob("*.seg")} == {"000000.seg"}
        counts(tmp_path)


async def test_what_dead_processes_claimed_is_garbage_and_what_the_living_do_is_not(
    tmp_path,
):
    holder = start_holder(tmp_path)
    try:
        async with SegmentStore(tmp_path, None) as store:
            assert (await store.usage()).num_claims == 1
            assert await store.collect_garbage() == 0
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            usage = await store.usage()
            assert (usage.num_claims, usage.num_dead_claims) == (0, 1)
            assert (usage.num_bytes, usage.free_bytes) == (4 * SLOT, 3 * SLOT)
            assert await store.collect_garbage() == SLOT
            usage = await store.usage()
            assert (usage.num_dead_claims, usage.free_bytes) == (0, 4 * SLOT)
    finally:
        holder.kill()
        holder.communicate()


async def test_segments_that_nobody_cut_are_free(tmp_path):
    async with small_store(tmp_path, 3) as store:
        await put(store, numbered(0, 1))
        usage = await store.usage()
        assert (usage.num_bytes, usage.free_bytes) == (12 * SLOT, 11 * SLOT)


# Segments, as they are.


def tables(directory: Path) -> dict[str, list[tuple]]:
    with index_of(directory) as index:
        return {
            table: index.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()
            for table in ("space", "segment", "page", "free", "claim")
        }


def segments(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.seg")}


async def test_segments_that_are_opened_as_they_are_stay_as_they_are(tmp_path):
    keys, plain = numbered(0, 6), numbered(6, 8)
    async with small_store(tmp_path, 2) as store:
        await put(store, keys)
    async with small_store(tmp_path, 2, checksums=False) as store:
        await put(store, plain)
    (tmp_path / "000009.seg").write_text("nobody's")
    before = tables(tmp_path), segments(tmp_path), set(tmp_path.iterdir())
    async with SegmentStore(tmp_path, None) as store:
        assert store.num_bytes == 8 * SLOT
        assert sorted(await listed(store)) == [*keys, *plain]
        assert await get(store, [*reversed(keys), *plain]) == [HIT] * 6 + [MISS] * 2
        async with SegmentStore(tmp_path, None, checksums=False) as other:
            assert await get(other, plain) == [HIT] * 2
    assert (tables(tmp_path), segments(tmp_path), set(tmp_path.iterdir())) == before
    async with SegmentStore(tmp_path, None) as store:
        assert await put(store, numbered(8, 9)) == [HIT]
        assert await get(store, numbered(8, 9)) == [HIT]


async def test_a_lost_segment_is_not_dropped_by_who_only_looks(tmp_path):
    async with small_store(tmp_path, 2) as store:
        await put(store, numbered(0, 8))
    (tmp_path / "000001.seg").rename(tmp_path / "away")
    before = tables(tmp_path)
    async with SegmentStore(tmp_path, None) as store:
        assert len(await listed(store)) == 8
    assert tables(tmp_path) == before
    (tmp_path / "away").rename(tmp_path / "000001.seg")
    async with SegmentStore(tmp_path, None) as store:
        assert await get(store, numbered(0, 8)) == [HIT] * 8


@pytest.mark.parametrize("size", [None, 100, 4096, 40960])
async def test_a_broken_index_is_told_and_not_put_aside(tmp_path, size):
    async with small_store(tmp_path) as store:
        await put(store, numbered(0, 3))
    index = tmp_path / "index.db"
    data = index.read_bytes()
    index.write_bytes(b"x" * len(data) if size is None else data[:size])
    before = look_at(tmp_path)
    store = SegmentStore(tmp_path, None)
    with pytest.raises(StoreError, match=f"the index of {tmp_path} is broken"):
        await store.open()
    await store.aclose()
    after = look_at(tmp_path)
    assert {name: after.get(name) for name in before} == before


async def test_a_lost_index_is_told_and_not_made_anew(tmp_path):
    async with small_store(tmp_path) as store:
        await put(store, numbered(0, 3))
    (tmp_path / "index.db").unlink()
    store = SegmentStore(tmp_path, None)
    with pytest.raises(StoreError, match=r"cannot keep pages in .* unable to open"):
        await store.open()
    await store.aclose()
    assert not (tmp_path / "index.db").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no store"),
        ('{"format": 1}', "holds files, not segments"),
        ('{"format": "asyncache segments 99", "segment_bytes": 4096}', "wanted"),
        (json.dumps({"format": FORMAT, "segment_bytes": 4096}), "cannot keep"),
    ],
)
async def test_no_store_of_segments_is_opened_as_it_is(tmp_path, text, message):
    if text is not None:
        (tmp_path / "asyncache.json").write_text(text)
    before = look_at(tmp_path)
    store = SegmentStore(tmp_path, None)
    with pytest.raises(StoreError, match=message):
        await store.open()
    await store.aclose()
    assert look_at(tmp_path) == before


# Redis.


async def test_other_keys_of_a_server_are_not_listed():
    keys = new_keys(5)
    with running() as server:
        async with (
            RedisStore(server.url) as store,
            RedisStore(server.url, prefix="asyncache:b") as other,
        ):
            await put(store, keys)
            await put(other, keys[:1])
            name = f"asyncache:{SPACE.name}:{'f' * 64}"
            for key in (f"{name}:x", name[:-1], name[10:], "asyncache:x", "a", "é:"):
                server.ask("SET", key, "x")
            server.ask("SET", b"asyncache:\xff:" + b"0" * 64, "x")
            assert sorted(set(await listed(store))) == sorted(keys)
            assert await listed(other) == keys[:1]
            assert await store.collect_garbage() == 0


async def test_a_server_of_many_keys_is_asked_again_and_again():
    keys = new_keys(5)
    many = "for i = 1, 5000 do redis.call('SET', 'other' .. i, '') end"
    with running() as server:
        async with RedisStore(server.url) as store:
            await put(store, keys)
            server.ask("EVAL", many, "0")
            assert set(await listed(store)) == {*keys}
            server.ask("EVAL", many.replace("other", f"asyncache:{SPACE.name}:"), "0")
            assert set(await listed(store)) == {*keys}


@pytest.mark.parametrize("answer", [b"*0\r\n", b"*2\r\n:0\r\n*0\r\n", b"+OK\r\n"])
def test_what_is_no_answer_to_scan_ends_the_connection(answer):
    ours, theirs = socket.socketpair()
    with closing(Wire(ours)) as wire, theirs:
        theirs.sendall(answer)
        with pytest.raises(WireError, match="no answer to SCAN"):
            scan(wire, "asyncache", b"0")


async def test_a_server_that_does_not_list_is_told():
    with running("--rename-command", "SCAN", "") as server:
        async with RedisStore(server.url) as store:
            with pytest.raises(StoreError, match="cannot list its pages: ERR unknown"):
                await listed(store)
            server.kill()
            with pytest.raises(StoreError, match=r"cannot list its pages: .*refused"):
                await listed(store)
            server.start()


async def test_a_server_that_does_not_answer_is_not_waited_for():
    with running() as server:
        async with RedisStore(server.url, timeout_s=0.2) as store:
            await put(store, new_keys(1))
            with server.paused(), pytest.raises(StoreError, match=r"within 0.2 s"):
                await listed(store)
            assert len(await listed(store)) == 1


# Pages as files.


def test_a_page_is_framed_as_in_a_store_of_files(tmp_path):
    [key] = new_keys(1)
    page = memoryview(content(key))
    for checksums in (True, False):
        framed = frame_page(key, page, checksums=checksums) + content(key)
        assert len(framed) == frame_bytes(SPACE)
        assert unframe_page(key, memoryview(framed)) == (page, checksums)


def test_what_is_not_to_the_bit_a_pages_file_is_refused():
    [key, other] = new_keys(2)
    framed = bytearray(frame_page(key, memoryview(content(key))) + content(key))
    for at in range(0, len(framed), 7):
        framed[at] ^= 1
        with pytest.raises(
            ValueError, match=r"head is another page's|head vouches for"
        ):
            unframe_page(key, memoryview(framed))
        framed[at] ^= 1
    with pytest.raises(ValueError, match="the head is another page's"):
        unframe_page(other, memoryview(framed))
    with pytest.raises(ValueError, match="a file has 640 bytes, not 639"):
        unframe_page(key, memoryview(framed)[:-1])
    with pytest.raises(ValueError, match="a page has 512 bytes, not 511"):
        frame_page(key, memoryview(content(key))[:-1])
