"""Pages that lie side by side are moved at once; where pages are is remembered."""

from __future__ import annotations

import errno
import os
import sqlite3

import anyio
import pytest
from hypothesis import given, settings, strategies as st

from asyncache.core import PageHash
from asyncache.stores import Status, _segment_files as segment_files
from asyncache.stores._segment_index import SegmentIndex
from asyncache.stores._segment_put import Put
from asyncache.testing._samples import SPACE, content, new_source, new_target
from asyncache.threads import Stop
from tests.stores.segments import (
    SLOT,
    WIDE,
    counts,
    get,
    numbered,
    put,
    slot_of,
    small_store,
    which,
)

HIT, MISS, CORRUPT = Status.HIT, Status.MISS, Status.CORRUPT
UNAVAILABLE = Status.UNAVAILABLE
both = pytest.mark.parametrize("checksums", [True, False])


class Calls:
    """Counts calls that move bytes; those that a test names fail."""

    def __init__(self, monkeypatch, name: str) -> None:
        self.offsets: list[int] = []
        self.broken: set[int] = set()
        original = getattr(segment_files, name)

        def call(descriptor, views, offset, *wanted):
            self.offsets.append(offset)
            num_bytes = sum(map(len, views))
            if any(offset <= bad < offset + num_bytes for bad in self.broken):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return original(descriptor, views, offset, *wanted)

        monkeypatch.setattr(segment_files, name, call)


@both
async def test_neighbours_are_written_and_read_by_one_call(
    tmp_path, monkeypatch, checksums
):
    keys = numbered(0, 8)
    writes, reads = (Calls(monkeypatch, name) for name in ("write_all", "read_all"))
    async with small_store(tmp_path, 1, 8, checksums=checksums) as store:
        assert await put(store, keys) == [HIT] * 8
        assert writes.offsets == [0]
        assert await get(store, keys) == [HIT] * 8
        assert reads.offsets == [0]
        # In whatever order they are asked for.
        assert await get(store, keys[::-1]) == [HIT] * 8
        assert reads.offsets == [0, 0]
        # Not where one is missing in between, nor beyond what is worth it.
        assert await get(store, [*keys[:3], *keys[4:]]) == [HIT] * 7
        assert reads.offsets[2:] == [0, 4 * SLOT]
        monkeypatch.setattr(segment_files, "_RUN_BYTES", 3 * SLOT)
    async with small_store(tmp_path, 1, 8, checksums=checksums) as store:
        assert await get(store, keys) == [HIT] * 8
        assert reads.offsets[4:] == [0, 3 * SLOT, 6 * SLOT]


async def test_some_layers_are_read_slot_by_slot(tmp_path, monkeypatch):
    keys = numbered(0, 3)
    async with small_store(tmp_path) as store:
        await put(store, keys)
        targets = [[bytearray(2 * SPACE.layer_bytes)] for _ in keys]
        views = [[memoryview(page)] for [page] in targets]
        assert await store.get_into(keys, views, range(1, 3)) == [HIT] * 3
        for key, [page] in zip(keys, targets, strict=True):
            assert page == content(key)[SPACE.layer_bytes : 3 * SPACE.layer_bytes]


async def test_pages_in_pieces_are_moved_at_once_too(tmp_path, monkeypatch):
    keys = numbered(0, 4)
    writes = Calls(monkeypatch, "write_all")
    pieces = [
        [
            memoryview(content(key))[start : start + SPACE.layer_bytes]
            for start in range(0, SPACE.page_bytes, SPACE.layer_bytes)
        ]
        for key in keys
    ]
    async with small_store(tmp_path) as store:
        assert await store.put(keys, pieces) == [HIT] * 4
        assert writes.offsets == [0]
        assert await get(store, keys) == [HIT] * 4


async def test_one_bad_page_costs_its_neighbours_nothing(tmp_path):
    keys = numbered(0, 4)
    async with small_store(tmp_path) as store:
        await put(store, keys)
        path = tmp_path / "000000.seg"
        data = bytearray(path.read_bytes())
        data[slot_of(tmp_path, keys[2]) + 9] ^= 1
        path.write_bytes(data)
        assert await get(store, keys) == [HIT, HIT, CORRUPT, HIT]
        assert await get(store, keys) == [HIT, HIT, MISS, HIT]


async def test_one_page_that_cannot_be_read_costs_its_neighbours_nothing(
    tmp_path, monkeypatch
):
    keys = numbered(0, 4)
    reads = Calls(monkeypatch, "read_all")
    async with small_store(tmp_path) as store:
        await put(store, keys)
        reads.broken.add(2 * SLOT + 1)
        assert await get(store, keys) == [HIT, HIT, UNAVAILABLE, HIT]
        reads.broken.clear()
        assert await get(store, keys) == [HIT] * 4


async def test_one_slot_that_cannot_be_written_costs_its_neighbours_nothing(
    tmp_path, monkeypatch
):
    keys = numbered(0, 4)
    writes = Calls(monkeypatch, "write_all")
    writes.broken.add(1 * SLOT + 1)
    async with small_store(tmp_path) as store:
        assert await put(store, keys) == [HIT, UNAVAILABLE, HIT, HIT]
        assert await which(store, keys) == [0, 2, 3]
        writes.broken.clear()
        assert await put(store, keys) == [HIT] * 4
    assert counts(tmp_path) == {"page": 4, "free": 0, "claim": 0}


async def test_a_page_that_a_batch_names_twice_has_one_slot(tmp_path):
    keys = numbered(0, 2)
    async with small_store(tmp_path, 1, 8) as store:
        assert await put(store, [*keys, *keys, keys[0]]) == [HIT] * 5
        assert await get(store, [keys[0], *keys]) == [HIT] * 3
    assert counts(tmp_path) == {"page": 2, "free": 6, "claim": 0}


# What is remembered.


@both
async def test_what_others_changed_is_seen_at_once(tmp_path, checksums):
    keys, others = numbered(0, 4), numbered(4, 8)
    async with (
        small_store(tmp_path, checksums=checksums) as store,
        small_store(tmp_path, checksums=checksums) as other,
    ):
        for _ in range(3):
            await put(store, keys)
            assert await get(store, keys) == [HIT] * 4
            # The same slots, with other pages.
            await put(other, others)
            assert await get(store, [*keys, *others]) == [MISS] * 4 + [HIT] * 4
            await other.remove(others)
            assert await which(store, [*keys, *others]) == []


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "remove"]),
            st.integers(0, 1),
            st.integers(0, 9),
            st.integers(1, 4),
        ),
        max_size=30,
    ),
    checksums=st.booleans(),
)
async def test_whatever_happens_what_is_read_is_what_was_put(
    tmp_path_factory, steps, checksums
):
    """Two stores, six slots: get() compares the bytes of each hit."""
    directory = tmp_path_factory.mktemp("store")
    async with (
        small_store(directory, 2, 3, checksums=checksums) as one,
        small_store(directory, 2, 3, checksums=checksums) as other,
    ):
        for what, who, start, count in steps:
            store, keys = (one, other)[who], numbered(start, start + count)
            if what == "put":
                assert await put(store, keys) == [HIT] * count
                assert await get((other, one)[who], keys) == [HIT] * count
            elif what == "get":
                statuses = await get(store, keys)
                hits = [at for at, status in enumerate(statuses) if status is HIT]
                assert hits == await which(store, keys)
            else:
                await store.remove(keys)
                assert await get((other, one)[who], keys) == [MISS] * count
        assert counts(directory)["claim"] == 0


async def test_more_places_than_are_remembered_are_asked_for(tmp_path, monkeypatch):
    from asyncache.stores import _slot_pages

    monkeypatch.setattr(_slot_pages, "_MOST_PLACES", 2)
    keys = numbered(0, 8)
    async with small_store(tmp_path, 1, 8) as store:
        await put(store, keys)
        for _ in range(3):
            assert await get(store, keys) == [HIT] * 8
            assert await get(store, keys[:1]) == [HIT]


async def test_pages_of_two_spaces_in_one_batch(tmp_path):
    keys = [*numbered(0, 3), *numbered(0, 2, WIDE), *numbered(3, 5)]
    async with small_store(tmp_path, 2, 8) as store:
        assert await put(store, keys) == [HIT] * 7
        assert await get(store, keys) == [HIT] * 7
        target = new_target(keys[3])
        assert await store.get_into([keys[3]], [target]) == [HIT]
    assert len({PageHash(key.hash) for key in keys}) == 5
    assert counts(tmp_path)["page"] == 7


async def test_what_a_put_has_not_told_of_yet_is_not_in_its_own_way(tmp_path):
    keys = [*numbered(0, 4), *numbered(0, 2, WIDE)]
    async with small_store(tmp_path, 1, 4) as store:
        assert await put(store, keys) == [HIT] * 6
        # The only segment went to those that came last.
        assert await which(store, keys) == [4, 5]
    assert counts(tmp_path) == {"page": 2, "free": 0, "claim": 0}


async def test_slots_of_pages_that_could_not_be_told_of_are_used_again(
    tmp_path, monkeypatch
):
    keys, publish, fails = numbered(0, 4), SegmentIndex.publish, [True]

    def fail_once(*arguments, **options):
        if fails:
            fails.clear()
            raise sqlite3.OperationalError("disk I/O error")
        return publish(*arguments, **options)

    monkeypatch.setattr(SegmentIndex, "publish", fail_once)
    async with small_store(tmp_path) as store:
        assert await put(store, keys) == [UNAVAILABLE] * 4
        assert await which(store, keys) == []
        assert await put(store, keys) == [HIT] * 4


@pytest.mark.parametrize("num_slots", [4, 8])
async def test_a_page_named_twice_is_stored_once(tmp_path, monkeypatch, num_slots):
    from asyncache.stores import _batches as batches

    monkeypatch.setattr(batches, "_JOB_BYTES", 1)  # a job a page, and all at once
    keys = numbered(0, num_slots)
    for number in range(10):
        async with small_store(tmp_path / str(number), 1, num_slots) as store:
            assert await put(store, keys + keys) == [HIT] * 2 * num_slots
            assert await get(store, keys) == [HIT] * num_slots
        expected = {"page": num_slots, "free": 0, "claim": 0}
        assert counts(tmp_path / str(number)) == expected


async def test_of_pages_named_twice_in_two_spaces_each_is_itself(tmp_path):
    keys = [*numbered(0, 2), *numbered(0, 2, WIDE), *numbered(1, 2)]
    async with small_store(tmp_path, 2, 8) as store:
        assert await put(store, keys) == [HIT] * 5
        assert await get(store, keys) == [HIT] * 5
    assert counts(tmp_path)["page"] == 4


async def test_two_puts_of_the_same_pages_leave_them_whole(tmp_path, monkeypatch):
    from asyncache.stores import _batches as batches

    monkeypatch.setattr(batches, "_JOB_BYTES", 1)
    keys = numbered(0, 6)
    for number in range(10):
        async with small_store(tmp_path / str(number), 1, 8) as store:
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(put, store, keys)
            assert await get(store, keys) == [HIT] * 6
        assert counts(tmp_path / str(number)) == {"page": 6, "free": 2, "claim": 0}


async def test_what_a_put_has_written_is_told_of_though_the_rest_never_began(tmp_path):
    keys = numbered(0, 4)
    async with small_store(tmp_path, 1, 8, num_threads=1) as store:
        called_off = Put(keys, list(map(new_source, keys)), store._stock, store._pages)
        await store._guard(store._writes, called_off.write, [range(2)])
        assert counts(tmp_path) == {"page": 0, "free": 6, "claim": 2}
        called_off.end(store._writes)
        await store._writes.run(
            lambda _, stop: None, [None]
        )  # the thread is ours again
        assert counts(tmp_path) == {"page": 2, "free": 6, "claim": 0}
        assert await get(store, keys) == [HIT] * 2 + [MISS] * 2


async def test_a_page_that_gave_way_to_its_own_put_is_no_hit(tmp_path):
    keys = numbered(0, 4)
    async with small_store(tmp_path, 1, 2) as store:
        assert await put(store, keys[:1]) == [HIT]
        statuses, stop = [MISS] * 4, Stop()

        def tell() -> bool:
            stop.set()
            return True

        def write(_) -> None:
            job = [(at, key.hash, new_source(key)) for at, key in enumerate(keys)]
            pages = store._pages(SPACE, stop)
            assert pages.write(job, statuses, stop, tell=tell) == []

        await store._ask(store._writes, write)
        assert await store.contains(keys) == [False] * 4
        assert HIT not in statuses
