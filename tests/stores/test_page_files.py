"""The bytes of a page file, and everything that can lie in its place."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from asyncache.core import PageHash, PageKey, PageSpace
from asyncache.stores import FileStore, Status
from asyncache.stores._frame import Frame
from asyncache.stores._frame_io import drop_bytes
from asyncache.testing._samples import SPACE, content, new_source, new_target

HASH = PageHash(bytes(range(32)))
KEY = PageKey(HASH, SPACE)
PLACE = f"{SPACE.name}/1f/{HASH.hex()}.kv"
HEAD_BYTES = Frame(SPACE).head_bytes
TINY = PageKey(HASH, PageSpace("kv", "all", "uint8", (2, 1, 1, 1, 8)))
# Other processes, and other versions, read these bytes.
GOLDEN = {
    True: (
        "6173796e 63616368 652d6b76 01000100 02000000 00000000 08000000 00000000 "
        "8be980c9 2f3c2d87 4d3d7021 b26a8694 00000000 00000000 f5047cdd 2801d96c "
        "6c617965 72203030 6c617965 72203031"
    ),
    False: (
        "6173796e 63616368 652d6b76 01000000 02000000 00000000 08000000 00000000 "
        "00000000 00000000 00000000 00000000 00000000 00000000 2776ffa7 f5b122d4 "
        "6c617965 72203030 6c617965 72203031"
    ),
}


async def read_once_and_again(store: FileStore) -> list[Status]:
    """Read the page, and what is in its place after that."""
    first = await store.get_into([KEY], [new_target(KEY)])
    return first + await store.get_into([KEY], [new_target(KEY)])


async def put_and_read(store: FileStore) -> list[Status]:
    """Put the page and read it back, bit for bit."""
    statuses = await store.put([KEY], [new_source(KEY)])
    target = new_target(KEY)
    statuses += await store.get_into([KEY], [target])
    assert target[0] == content(KEY)
    return statuses


async def whole_page(directory: Path) -> bytes:
    async with FileStore(directory) as store:
        assert await put_and_read(store) == [Status.HIT] * 2
    return (directory / PLACE).read_bytes()


@pytest.mark.parametrize("checksums", [True, False])
async def test_the_bytes_of_a_file_are_these(tmp_path, checksums):
    async with FileStore(tmp_path, checksums=checksums) as store:
        await store.put([TINY], [[memoryview(b"layer 00"), memoryview(b"layer 01")]])
    data = (tmp_path / TINY.space.name / "1f" / f"{HASH.hex()}.kv").read_bytes()
    assert data.hex(" ", 4) == GOLDEN[checksums]


async def test_a_file_of_any_other_length_is_corrupt_and_removed(tmp_path):
    data = await whole_page(tmp_path)
    lengths = {0, 1, 31, 32, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1}
    lengths |= {HEAD_BYTES + SPACE.layer_bytes, len(data) - 1, len(data) + 1}
    lengths.add(2 * len(data))
    async with FileStore(tmp_path) as store:
        for length in sorted(lengths):
            (tmp_path / PLACE).write_bytes((data + data)[:length])
            assert await store.contains([KEY]) == [False], length
            answer = await read_once_and_again(store)
            assert answer == [Status.CORRUPT, Status.MISS], length
            assert await put_and_read(store) == [Status.HIT] * 2


async def test_a_file_of_the_wrong_length_does_not_stop_the_page_from_being_put(
    tmp_path,
):
    data = await whole_page(tmp_path)
    async with FileStore(tmp_path) as store:
        (tmp_path / PLACE).write_bytes(data[:-1])
        assert await put_and_read(store) == [Status.HIT] * 2


async def test_any_flipped_bit_is_found(tmp_path):
    data = await whole_page(tmp_path)
    async with FileStore(tmp_path) as store:
        for index in [*range(HEAD_BYTES), *range(HEAD_BYTES, len(data), 37)]:
            spoilt = bytearray(data)
            spoilt[index] ^= 1 << index % 8
            (tmp_path / PLACE).write_bytes(spoilt)
            answer = await read_once_and_again(store)
            assert answer == [Status.CORRUPT, Status.MISS], index


async def test_without_checksums_the_head_is_verified_all_the_same(tmp_path):
    async with FileStore(tmp_path, checksums=False) as store:
        await put_and_read(store)
        data = (tmp_path / PLACE).read_bytes()
        for index in range(HEAD_BYTES):
            spoilt = bytearray(data)
            spoilt[index] ^= 1 << index % 8
            (tmp_path / PLACE).write_bytes(spoilt)
            answer = await read_once_and_again(store)
            assert answer == [Status.CORRUPT, Status.MISS], index


async def test_swapped_layers_are_found(tmp_path):
    data = await whole_page(tmp_path)
    head, first = data[:HEAD_BYTES], data[HEAD_BYTES:][: SPACE.layer_bytes]
    second = data[HEAD_BYTES:][SPACE.layer_bytes : 2 * SPACE.layer_bytes]
    rest = data[HEAD_BYTES + 2 * SPACE.layer_bytes :]
    async with FileStore(tmp_path) as store:
        (tmp_path / PLACE).write_bytes(head + second + first + rest)
        assert await read_once_and_again(store) == [Status.CORRUPT, Status.MISS]


async def test_a_page_under_the_name_of_another_key_is_corrupt(tmp_path):
    data = await whole_page(tmp_path)
    other = PageKey(PageHash(HASH[:-1] + b"\1"), SPACE)
    place = tmp_path / SPACE.name / "01" / f"{other.hash.hex()}.kv"
    place.parent.mkdir()
    place.write_bytes(data)
    async with FileStore(tmp_path) as store:
        statuses = await store.get_into([KEY, other], [new_target(KEY)] * 2)
        assert statuses == [Status.HIT, Status.CORRUPT]


async def test_pages_without_digests_are_replaced_by_a_store_that_wants_them(tmp_path):
    async with FileStore(tmp_path, checksums=False) as store:
        await put_and_read(store)
    async with FileStore(tmp_path) as store:
        assert await read_once_and_again(store) == [Status.MISS, Status.MISS]
        await put_and_read(store)
    async with FileStore(tmp_path, checksums=False) as store:
        assert await read_once_and_again(store) == [Status.HIT, Status.HIT]


def plant_fifo(place: Path) -> None:
    os.mkfifo(place)


def plant_directory(place: Path) -> None:
    place.mkdir()


def plant_full_directory(place: Path) -> None:
    place.mkdir()
    (place / "precious").write_text("not ours")


def plant_link_to_a_page(place: Path) -> None:
    elsewhere = place.with_name("elsewhere")
    place.rename(elsewhere) if place.exists() else elsewhere.write_bytes(b"x")
    place.symlink_to(elsewhere)


def plant_dangling_link(place: Path) -> None:
    place.symlink_to("/nowhere/at/all")


def plant_socket(place: Path) -> None:
    # A socket's path must be short.
    here = Path.cwd()
    os.chdir(place.parent)
    try:
        with socket.socket(socket.AF_UNIX) as planted:
            planted.bind(".s")
        Path(".s").rename(place)
    finally:
        os.chdir(here)


def plant_foreign_file(place: Path) -> None:
    place.write_text("a shopping list, not a page")


def plant_endless_device(place: Path) -> None:
    command = ["mknod", str(place), "c", "1", "5"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"cannot make a device node: {made.stderr.strip()}")


PLANTS = [
    plant_fifo,
    plant_directory,
    plant_full_directory,
    plant_link_to_a_page,
    plant_dangling_link,
    plant_socket,
    plant_foreign_file,
    plant_endless_device,
]


@pytest.mark.parametrize("plant", PLANTS)
async def test_what_is_planted_in_a_pages_place_is_removed_by_a_read(tmp_path, plant):
    data = await whole_page(tmp_path)
    (tmp_path / PLACE).unlink()
    plant(tmp_path / PLACE)
    async with FileStore(tmp_path) as store:
        assert await store.contains([KEY]) == [False]
        assert await read_once_and_again(store) == [Status.CORRUPT, Status.MISS]
        assert await put_and_read(store) == [Status.HIT] * 2
    assert (tmp_path / PLACE).read_bytes() == data


@pytest.mark.parametrize("plant", PLANTS)
async def test_what_is_planted_in_a_pages_place_is_removed_by_a_put(tmp_path, plant):
    data = await whole_page(tmp_path)
    (tmp_path / PLACE).unlink()
    plant(tmp_path / PLACE)
    async with FileStore(tmp_path) as store:
        assert await put_and_read(store) == [Status.HIT] * 2
    assert (tmp_path / PLACE).read_bytes() == data


async def test_a_link_is_not_followed_even_to_a_page(tmp_path):
    await whole_page(tmp_path)
    plant_link_to_a_page(tmp_path / PLACE)
    async with FileStore(tmp_path) as store:
        assert await read_once_and_again(store) == [Status.CORRUPT, Status.MISS]


async def test_what_is_in_a_planted_directory_is_moved_and_not_deleted(tmp_path):
    await whole_page(tmp_path)
    (tmp_path / PLACE).unlink()
    plant_full_directory(tmp_path / PLACE)
    async with FileStore(tmp_path) as store:
        await read_once_and_again(store)
    [precious] = tmp_path.rglob("precious")
    assert precious.read_text() == "not ours"


async def test_a_file_in_place_of_a_directory_costs_its_pages_and_no_more(tmp_path):
    (tmp_path / SPACE.name).mkdir()
    (tmp_path / SPACE.name / "1f").write_text("in the way")
    other = PageKey(PageHash(HASH[:-1] + b"\1"), SPACE)
    keys = [KEY, other]
    async with FileStore(tmp_path) as store:
        statuses = await store.put(keys, [new_source(key) for key in keys])
        assert statuses == [Status.UNAVAILABLE, Status.HIT]
        statuses = await store.get_into(keys, [new_target(key) for key in keys])
        assert statuses == [Status.MISS, Status.HIT]
        assert list((tmp_path / "tmp").iterdir()) == []


@given(st.lists(st.binary(max_size=5)), st.integers(0, 30))
def test_dropping_bytes_leaves_the_rest_in_order(pieces, count):
    left = drop_bytes([memoryview(piece) for piece in pieces], count)
    assert b"".join(left) == b"".join(pieces)[count:]
