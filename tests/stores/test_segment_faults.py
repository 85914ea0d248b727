"""What can become of a SegmentStore's files: rot, loss, strangers, a full disk."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncache.core import PageKey, StoreError
from asyncache.stores import FileStore, SegmentStore, Status
from asyncache.stores._frame import Frame
from asyncache.testing._samples import (
    LARGE_SPACE,
    SPACE,
    new_keys,
    new_target,
)
from tests.stores.mounts import mounted, remount_read_only
from tests.stores.segments import (
    SLOT,
    counts,
    get,
    index_of,
    numbered,
    put,
    slot_of,
    small_store,
)

MIB = 2**20
HIT, MISS, CORRUPT = Status.HIT, Status.MISS, Status.CORRUPT
UNAVAILABLE, REJECTED = Status.UNAVAILABLE, Status.REJECTED
HEAD_BYTES = Frame(SPACE).head_bytes


def spoil(directory: Path, key: PageKey, at: int, change: int = 1) -> None:
    """Flip bits of a byte of a slot."""
    path = directory / "000000.seg"
    data = bytearray(path.read_bytes())
    data[slot_of(directory, key) + at] ^= change
    path.write_bytes(data)


async def refusal(store: SegmentStore) -> str:
    with pytest.raises(StoreError) as refused:
        await store.open()
    await store.aclose()
    return str(refused.value)


# Rot.


@pytest.mark.parametrize("direct", [True, False])
async def test_any_flipped_bit_is_found_and_its_slot_is_free(tmp_path, direct):
    keys = numbered(0, 2)
    size = SPACE.page_bytes + HEAD_BYTES
    async with small_store(tmp_path, direct=direct) as store:
        for at in (*range(0, SPACE.page_bytes, 97), *range(SPACE.page_bytes, size, 7)):
            await put(store, keys)
            spoil(tmp_path, keys[0], at, 1 << at % 8)
            assert await get(store, keys) == [CORRUPT, HIT], at
            assert await get(store, keys) == [MISS, HIT]
        assert counts(tmp_path) == {"page": 1, "free": 3, "claim": 0}


async def test_without_checksums_the_head_is_verified_all_the_same(tmp_path):
    [key] = numbered(0, 1)
    async with small_store(tmp_path, checksums=False) as store:
        for at in range(0, HEAD_BYTES, 5):
            await put(store, [key])
            spoil(tmp_path, key, SPACE.page_bytes + at)
            assert await get(store, [key]) == [CORRUPT], at


@pytest.mark.parametrize("checksums", [True, False])
async def test_pages_in_the_slots_of_each_other_are_corrupt(tmp_path, checksums):
    keys = numbered(0, 3)
    async with small_store(tmp_path, checksums=checksums) as store:
        await put(store, keys)
        path = tmp_path / "000000.seg"
        data = path.read_bytes()
        path.write_bytes(data[SLOT : 2 * SLOT] + data[:SLOT] + data[2 * SLOT :])
        assert await get(store, keys) == [CORRUPT, CORRUPT, HIT]


async def test_layers_are_read_without_looking_at_the_others(tmp_path):
    [key] = numbered(0, 1)
    async with small_store(tmp_path) as store:
        await put(store, [key])
        spoil(tmp_path, key, SPACE.page_bytes - 1)
        first, last = range(SPACE.num_layers - 1), range(SPACE.num_layers)[-1:]
        for layers, status in ((first, HIT), (last, CORRUPT), (first, MISS)):
            target = [new_target(key, layers)]
            assert await store.get_into([key], target, layers) == [status]


@pytest.mark.parametrize("length", [0, SLOT + 100, 3 * SLOT - 1])
async def test_a_segment_that_was_cut_short_loses_its_pages_and_no_others(
    tmp_path, length
):
    keys = numbered(0, 4)
    async with small_store(tmp_path) as store:
        await put(store, keys)
        os.truncate(tmp_path / "000000.seg", length)
        statuses = await get(store, keys)
        assert statuses == [
            HIT if slot * SLOT + SPACE.page_bytes + HEAD_BYTES <= length else CORRUPT
            for slot in range(4)
        ]
        assert await put(store, keys) == [HIT] * 4
        assert await get(store, keys) == [HIT] * 4
    os.truncate(tmp_path / "000000.seg", length)
    async with small_store(tmp_path) as store:
        assert await get(store, keys) == [MISS] * 4
        assert await put(store, keys) == [HIT] * 4


# Loss.


async def test_a_segment_that_is_gone_is_forgotten_and_the_others_go_on(tmp_path):
    keys = numbered(0, 8)
    async with small_store(tmp_path, 2) as first:
        await put(first, keys)
        (tmp_path / "000000.seg").unlink()
        async with small_store(tmp_path, 2) as late:
            assert await get(late, keys) == [MISS] * 4 + [HIT] * 4
            assert await put(late, numbered(8, 12)) == [HIT] * 4
            assert await get(late, numbered(8, 12)) == [HIT] * 4
            assert late.num_bytes == 4 * SLOT
        assert await get(first, keys[:4]) == [MISS] * 4
        counts(tmp_path)
    async with small_store(tmp_path, 2) as store:
        assert store.num_bytes == 8 * SLOT
        assert await put(store, keys) == [HIT] * 8


async def test_the_directory_may_vanish_under_the_store(tmp_path):
    keys = numbered(0, 3)
    async with small_store(tmp_path / "cache") as store:
        await put(store, keys)
        shutil.rmtree(tmp_path / "cache")
        assert set(await get(store, keys)) <= {HIT, UNAVAILABLE}
        # A thread that has seen the index goes on with it.
        assert set(await put(store, numbered(3, 4))) <= {HIT, UNAVAILABLE}
        async with small_store(tmp_path / "cache") as late:
            assert await get(late, keys) == [MISS] * 3
            assert await put(late, keys) == [HIT] * 3
            assert set(await get(store, keys)) <= {HIT, UNAVAILABLE}


def delete(path: Path) -> None:
    path.unlink()


def make_empty(path: Path) -> None:
    path.write_bytes(b"")


def fill_with_garbage(path: Path) -> None:
    path.write_bytes(os.urandom(40_000))


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite_a_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:8192] = os.urandom(4096)
    path.write_bytes(data)


def replace_by_another_database(path: Path) -> None:
    path.unlink()
    with index_of(path.parent) as index:
        index.execute("CREATE TABLE page (x)")


def replace_by_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_a_link(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


BROKEN = [
    make_empty,
    fill_with_garbage,
    cut_in_half,
    overwrite_a_page,
    replace_by_another_database,
    replace_by_a_fifo,
    replace_by_a_directory,
    replace_by_a_link,
]


@pytest.mark.parametrize("damage", [delete, *BROKEN], ids=lambda call: call.__name__)
async def test_a_broken_index_is_put_aside_and_the_store_starts_empty(
    tmp_path, damage: Callable[[Path], None], caplog
):
    keys = numbered(0, 6)
    for _ in range(2):
        async with small_store(tmp_path, 2) as store:
            assert await put(store, keys) == [HIT] * 6
            assert await get(store, keys) == [HIT] * 6
        damage(tmp_path / "index.db")
    with caplog.at_level(logging.WARNING, "asyncache"):
        async with small_store(tmp_path, 2) as store:
            assert await get(store, keys) == [MISS] * 6
            assert await put(store, keys) == [HIT] * 6
            assert await get(store, keys) == [HIT] * 6
            assert len(list(tmp_path.glob("*.seg"))) == 2
    is_said = "is broken: starting empty" in caplog.text
    assert is_said == (damage not in {delete, make_empty})


async def test_who_comes_where_the_index_is_gone_under_others_is_refused(tmp_path):
    async with small_store(tmp_path) as store:
        (tmp_path / "index.db").unlink()
        message = await refusal(small_store(tmp_path))
        assert "unable to open database file" in message
        assert await put(store, numbered(0, 1)) == [UNAVAILABLE]
        assert not (tmp_path / "index.db").exists()


# Strangers.


async def test_another_length_of_segments_is_refused(tmp_path):
    async with small_store(tmp_path):
        pass
    before = sorted(path.name for path in tmp_path.rglob("*"))
    message = await refusal(small_store(tmp_path, num_slots=8))
    assert '"segment_bytes": 16384' in message
    assert '"segment_bytes": 32768' in message
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "text", ["", "[1]", "\x00\xff", json.dumps({"format": "asyncache segments 3"})]
)
async def test_another_format_is_refused_and_left_alone(tmp_path, text):
    (tmp_path / "asyncache.json").write_text(text)
    message = await refusal(small_store(tmp_path))
    assert "give the store another directory" in message
    assert [path.name for path in tmp_path.iterdir()] == ["asyncache.json"]


async def test_the_directory_of_a_file_store_is_refused_and_so_is_ours(tmp_path):
    async with FileStore(tmp_path / "files"):
        pass
    assert "wanted" in await refusal(small_store(tmp_path / "files"))
    async with small_store(tmp_path / "segments"):
        pass
    store = FileStore(tmp_path / "segments")
    with pytest.raises(StoreError, match="is no store's"):
        await store.open()
    await store.aclose()


async def test_a_directory_that_others_may_write_is_refused(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    message = await refusal(small_store(tmp_path / "cache"))
    assert "can be written by other users" in message
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("damage", [delete, *BROKEN[-3:]], ids=lambda c: c.__name__)
async def test_what_is_planted_in_a_segments_place_is_not_touched(tmp_path, damage):
    keys = numbered(0, 4)
    async with small_store(tmp_path) as store:
        await put(store, keys)
    if damage is replace_by_a_directory:
        damage(tmp_path / "000000.seg")
        assert "directory" in await refusal(small_store(tmp_path))
        return
    damage(tmp_path / "000000.seg")
    async with small_store(tmp_path) as store:
        assert await get(store, keys) == [MISS] * 4
        assert await put(store, keys) == [HIT] * 4
        assert await get(store, keys) == [HIT] * 4
        assert not (tmp_path / "000000.seg").is_symlink()


async def test_a_lock_that_leads_elsewhere_is_refused(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    await refusal(small_store(tmp_path))
    assert not (tmp_path / "elsewhere").exists()


async def test_owners_that_lead_elsewhere_are_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ("0" * 32)).write_text("dear to someone")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "owners").symlink_to(tmp_path / "elsewhere")
    async with small_store(tmp_path / "cache") as store:
        assert await put(store, numbered(0, 1)) == [HIT]
        assert len(list((tmp_path / "elsewhere").iterdir())) == 1


async def test_a_segment_that_nobody_knows_is_removed(tmp_path):
    (tmp_path / "000007.seg").write_bytes(b"x" * 100_000)
    (tmp_path / "mine.seg").write_bytes(b"x")
    async with small_store(tmp_path):
        names = {path.name for path in tmp_path.glob("*.seg")}
    assert names == {"000000.seg", "mine.seg"}


# Room on the disk.


def resident_store(directory: Path, num_segments: int) -> SegmentStore:
    return SegmentStore(directory, num_segments * MIB, segment_bytes=MIB)


async def test_where_there_is_less_room_the_store_is_smaller_and_says_so(
    tmp_path, caplog
):
    keys = new_keys(200, LARGE_SPACE)
    with mounted(tmp_path / "cache", "size=14m,mode=700"):
        async with resident_store(tmp_path / "cache", 40) as store:
            assert 2 * MIB <= store.num_bytes <= 5 * MIB
            assert store.missing_bytes == 40 * MIB - store.num_bytes
            assert "has room for" in caplog.text
            assert "segments of 1048576 bytes, not 40" in caplog.text
            # Nothing fails later for want of room.
            for key in keys:
                assert await put(store, [key]) == [HIT]
            assert (await get(store, keys)).count(HIT) == store.num_bytes // MIB * 7
        async with resident_store(tmp_path / "cache", 40) as store:
            assert (await get(store, keys)).count(HIT) == store.num_bytes // MIB * 7


async def test_where_there_is_no_room_for_a_segment_the_store_is_refused(tmp_path):
    with mounted(tmp_path / "cache", "size=4m,mode=700"):
        message = await refusal(resident_store(tmp_path / "cache", 40))
        assert "has no room for a segment of 1048576" in message


async def test_where_the_index_has_no_room_puts_have_no_answer_and_reads_go_on(
    tmp_path,
):
    keys = numbered(0, 256)
    with mounted(tmp_path / "cache", "size=14m,mode=700"):
        directory = tmp_path / "cache" / "store"
        async with resident_store(directory, 2) as store:
            assert await put(store, keys[:100]) == [HIT] * 100
            fill_up(tmp_path / "cache" / "ballast")
            answers = []
            for _ in range(50):
                answers += await put(store, numbered(1_000, 1_250))
                await store.remove(numbered(1_000, 1_250))
                if UNAVAILABLE in answers:
                    break
            assert UNAVAILABLE in answers
            assert await get(store, keys[:100]) == [HIT] * 100
            (tmp_path / "cache" / "ballast").unlink()
            assert await put(store, keys) == [HIT] * 256
            assert await get(store, keys) == [HIT] * 256
            counts(directory)


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


async def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    with mounted(tmp_path / "cache", "size=12m,mode=700"):
        async with small_store(tmp_path / "cache"):
            pass
        remount_read_only(tmp_path / "cache")
        message = await refusal(small_store(tmp_path / "cache"))
        assert "/cache': [Errno 30] Read-only file system" in message


async def test_where_direct_io_is_impossible_the_store_is_refused(
    tmp_path, monkeypatch
):
    original = os.open

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return original(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    message = await refusal(small_store(tmp_path, direct=True))
    assert "cannot keep pages in" in message
    assert "Invalid argument" in message


async def test_a_missing_descriptor_is_no_answer_and_not_a_miss(tmp_path):
    import resource

    keys = numbered(0, 2)
    async with small_store(tmp_path) as store:
        await put(store, keys[:1])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with small_store(tmp_path) as store:
        lowest = os.open("/dev/null", os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            read, written = await get(store, keys[:1]), await put(store, keys[1:])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (read, written) == ([UNAVAILABLE], [UNAVAILABLE])
        assert await get(store, keys) == [HIT, MISS]
        assert await put(store, keys) == [HIT] * 2
