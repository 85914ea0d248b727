"""A FileStore with a cap: what it may take, what goes first, who shares it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from hypothesis import given, settings, strategies as st

from asyncache.core import PageKey
from asyncache.stores import FileStore, Status, _file_room as file_room
from asyncache.stores._frame import Frame
from asyncache.testing import check_store
from asyncache.testing._samples import SPACE
from tests.stores.behind import PageFiles
from tests.stores.segments import get, numbered, put, which

HIT, REJECTED, UNAVAILABLE = Status.HIT, Status.REJECTED, Status.UNAVAILABLE
FILE = Frame(SPACE).file_bytes
CAP = 64 * FILE


def num_files(directory: Path) -> int:
    return sum(1 for _ in directory.rglob("*.kv"))


def path_of(directory: Path, key: PageKey) -> Path:
    name = key.hash.hex()
    return directory / SPACE.name / name[-2:] / f"{name}.kv"


def put_back(directory: Path, key: PageKey, seconds: float) -> None:
    """Have a page be used so long ago."""
    path = path_of(directory, key)
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


@pytest.mark.slow
async def test_it_keeps_the_contract(tmp_path):
    make = partial(FileStore, tmp_path, 64 * 2**20)
    await check_store(make, stored=lambda _: PageFiles(tmp_path), reopen=make)


async def test_what_was_used_longest_ago_gives_way(tmp_path):
    async with FileStore(tmp_path, CAP) as store:
        old, new = numbered(0, 64), numbered(64, 128)
        await put(store, old)
        for age, key in enumerate(old):
            put_back(tmp_path, key, 10_000 - age)
        # A use is noted, by a read as by a put that finds it there.
        assert await get(store, old[:1]) == [HIT]
        assert await put(store, old[1:2]) == [HIT]
        assert await put(store, new[:1]) == [HIT]
        assert await which(store, old) == [0, 1, *range(10, 64)]
        assert await put(store, new[1:]) == [HIT] * 63
        assert num_files(tmp_path) <= 64
        assert (await which(store, new))[-1] == 63


async def test_of_a_prefix_the_end_gives_way_first(tmp_path):
    keys = numbered(0, 65)
    async with FileStore(tmp_path, CAP) as store:
        await put(store, keys[:64])
        await put(store, keys[64:])
        assert await which(store, keys) == [*range(56), 64]
        # Also of what was read together, a while later.
        for key in keys:
            if path_of(tmp_path, key).exists():
                put_back(tmp_path, key, 1000)
        assert await get(store, keys[:56]) == [HIT] * 56
        await put(store, numbered(100, 108))
        left = await which(store, keys)
        assert left == list(range(49))


async def test_it_is_never_over_its_cap_by_more_than_each_may_take(tmp_path):
    stores = [FileStore(tmp_path, CAP) for _ in range(3)]
    for store in stores:
        await store.open()
    for start in range(0, 600, 5):
        await put(stores[start // 5 % 3], numbered(start, start + 5))
        # A page each: a 256th of the cap is less than one.
        assert num_files(tmp_path) <= 64 + 3
    for store in stores:
        await store.aclose()
    assert num_files(tmp_path) > 48


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 9)), max_size=25
    )
)
async def test_whatever_is_written_the_cap_holds(tmp_path_factory, writes):
    directory = tmp_path_factory.mktemp("store")
    stores = [FileStore(directory, 20 * FILE) for _ in range(3)]
    for store in stores:
        await store.open()
    for number, start, count in writes:
        keys = numbered(start, start + count)
        assert await put(stores[number], keys) == [HIT] * count
        assert num_files(directory) <= 20 + 3
    for store in stores:
        await store.aclose()


async def test_who_leaves_gives_back_what_it_took(tmp_path, monkeypatch):
    monkeypatch.setattr(file_room, "_TAKEN_SHARE", 4)
    for number in range(8):
        async with FileStore(tmp_path, CAP) as store:
            await put(store, numbered(number, number + 1))
    left, _ = (tmp_path / "room").read_text().split()
    assert int(left) == CAP - 8 * FILE


async def test_another_cap_counts_anew(tmp_path):
    async with FileStore(tmp_path, CAP) as store:
        await put(store, numbered(0, 60))
    async with FileStore(tmp_path, 16 * FILE) as store:
        await put(store, numbered(60, 61))
        assert num_files(tmp_path) <= 16
    async with FileStore(tmp_path, CAP) as store:
        assert await put(store, numbered(100, 140)) == [HIT] * 40
        assert num_files(tmp_path) > 50


async def test_what_was_there_without_a_cap_is_counted(tmp_path):
    async with FileStore(tmp_path) as store:
        await put(store, numbered(0, 200))
    async with FileStore(tmp_path, CAP) as store:
        assert num_files(tmp_path) == 200
        await put(store, numbered(200, 201))
        assert num_files(tmp_path) == 57
    assert not list((tmp_path / "tmp").iterdir())


async def test_unfinished_pages_of_others_count(tmp_path):
    async with FileStore(tmp_path, CAP) as store:
        (tmp_path / "tmp" / "others").write_bytes(bytes(40 * FILE))
        assert await put(store, numbered(0, 30)) == [HIT] * 30
        assert num_files(tmp_path) <= 24


async def test_a_page_larger_than_the_cap_is_refused(tmp_path):
    async with FileStore(tmp_path, FILE - 1) as store:
        assert await put(store, numbered(0, 2)) == [REJECTED] * 2
    assert num_files(tmp_path) == 0


async def test_who_finds_the_lock_held_waits_for_it_and_not_for_ever(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(file_room, "_WAIT_S", 0.1)
    async with FileStore(tmp_path, CAP) as store:
        with (tmp_path / "room").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert await put(store, numbered(0, 2)) == [UNAVAILABLE] * 2
            # Nobody waits for it any longer than for its caller.
            monkeypatch.setattr(file_room, "_WAIT_S", 60)
            with anyio.fail_after(20), anyio.move_on_after(0.05) as scope:
                await put(store, numbered(0, 2))
            assert scope.cancelled_caught
        assert await put(store, numbered(0, 2)) == [HIT] * 2


def hold_and_be_killed(room: Path) -> None:
    code = f"""
import fcntl, time
file = open({str(room)!r}, "wb")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        holder.send_signal(signal.SIGKILL)


async def test_a_holder_that_was_killed_is_in_nobodys_way(tmp_path):
    async with FileStore(tmp_path, CAP) as store:
        await anyio.to_thread.run_sync(hold_and_be_killed, tmp_path / "room")
        assert await put(store, numbered(0, 2)) == [HIT] * 2


@pytest.mark.parametrize("text", [b"", b"rubbish", b"7", b"-5 -5", b"\xff" * 99])
async def test_rubbish_in_the_way_is_counted_anew(tmp_path, text):
    async with FileStore(tmp_path, CAP) as store:
        (tmp_path / "room").write_bytes(text)
        assert await put(store, numbered(0, 70)) == [HIT] * 70
        assert num_files(tmp_path) <= 64


@pytest.mark.parametrize("kind", ["directory", "link", "fifo"])
async def test_what_is_no_file_in_its_place_makes_writes_fail_and_reads_not(
    tmp_path, kind
):
    async with FileStore(tmp_path, CAP) as store:
        await put(store, numbered(0, 1))
    room = tmp_path / "room"
    room.unlink()
    if kind == "directory":
        room.mkdir()
    elif kind == "link":
        room.symlink_to("/dev/zero")
    else:
        os.mkfifo(room)
    with anyio.fail_after(30):
        async with FileStore(tmp_path, CAP) as store:
            assert await put(store, numbered(0, 2)) == [HIT, UNAVAILABLE]
            assert await get(store, numbered(0, 1)) == [HIT]


async def test_room_of_a_page_that_could_not_be_written_comes_back(
    tmp_path, monkeypatch
):
    walks, walk = [], file_room.walk
    monkeypatch.setattr(
        file_room, "walk", lambda place: [walks.append(place), *walk(place)][1:]
    )
    async with FileStore(tmp_path, 4 * FILE) as store:
        # A file where the space's directory would be.
        (tmp_path / SPACE.name).write_bytes(b"")
        assert await put(store, numbered(0, 9)) == [UNAVAILABLE] * 9
        (tmp_path / SPACE.name).unlink()
        assert await put(store, numbered(0, 4)) == [HIT] * 4
        assert num_files(tmp_path) == 4
        # The one that found out how much there is; nobody had to look again.
        assert len(walks) == 1


async def test_files_are_this_users_alone(tmp_path):
    root = tmp_path / "new"
    async with FileStore(root, CAP) as store:
        await put(store, numbered(0, 3))
    for path in [root, *root.rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert path.stat().st_mode & 0o777 == wanted, path


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_a_cap_below_one_is_refused(tmp_path, max_bytes):
    with pytest.raises(
        ValueError, match=f"max_bytes must be at least 1, not {max_bytes}"
    ):
        FileStore(tmp_path, max_bytes)
