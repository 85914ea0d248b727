"""SegmentStore: the contract, room, races with other users, every kind of end."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asyncache.core import ClosedError, OrderError, StoreError
from asyncache.stores import (
    SegmentStore,
    Status,
    _segment_database as segment_database,
    _segment_files as segment_files,
    _segment_version as segment_version,
)
from asyncache.stores._segment_directory import SegmentDirectory
from asyncache.stores._segment_files import Slots
from asyncache.testing import CancelStyle, cancel_nth, check_store
from asyncache.testing._cancel import Cancellation, cancel_after
from asyncache.testing._samples import (
    LARGE_SPACE,
    OTHER_SPACE,
    SPACE,
    fill,
    new_keys,
    new_source,
    new_target,
)
from tests.stores.segments import (
    SLOT,
    WIDE,
    HeldRead,
    check_index,
    counts,
    get,
    index_of,
    numbered,
    put,
    small_store,
    which,
)

MIB = 2**20
HIT, MISS = Status.HIT, Status.MISS
UNAVAILABLE, REJECTED = Status.UNAVAILABLE, Status.REJECTED


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def large_store(directory: Path, **options: bool | int) -> SegmentStore:
    # A segment a space: the kit has many spaces.
    return SegmentStore(directory, 64 * MIB, segment_bytes=MIB, **options)


# The contract.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"direct": True},
        {"checksums": False, "num_threads": 1},
        {"durable": True},
        {"direct": True, "checksums": False},
    ],
    ids=lambda options: "-".join(options) or "buffered",
)
async def test_it_keeps_the_contract(tmp_path, options):
    await check_store(lambda: large_store(tmp_path, **options))
    assert counts(tmp_path)["claim"] == 0


@pytest.mark.parametrize("checksums", [True, False])
async def test_it_keeps_the_contract_in_shared_memory(shared_memory, checksums):
    await check_store(lambda: large_store(shared_memory, checksums=checksums))
    assert counts(shared_memory)["claim"] == 0


async def test_pages_outlive_the_store(tmp_path):
    keys = [*new_keys(5), *new_keys(5, LARGE_SPACE)]
    async with large_store(tmp_path) as store:
        await put(store, keys)
    async with large_store(tmp_path, direct=True) as store:
        assert await get(store, keys) == [HIT] * 10


async def test_stores_of_one_directory_share_their_pages(tmp_path):
    keys = new_keys(5)
    async with large_store(tmp_path) as one, large_store(tmp_path) as other:
        assert await put(one, keys) == [HIT] * 5
        assert await put(other, keys) == [HIT] * 5
        assert await get(other, keys) == [HIT] * 5
        await other.remove(keys[:1])
        assert await get(one, keys) == [MISS, *[HIT] * 4]


async def test_a_page_without_digests_gives_way_to_one_with(tmp_path):
    keys = new_keys(2)
    async with (
        large_store(tmp_path) as checked,
        large_store(tmp_path, checksums=False) as plain,
    ):
        await put(plain, keys)
        assert await get(checked, keys) == [MISS] * 2
        assert await put(checked, keys) == [HIT] * 2
        assert await get(checked, keys) == await get(plain, keys) == [HIT] * 2


async def test_names_are_numbers_and_everything_is_for_its_user_alone(tmp_path):
    old = os.umask(0)
    try:
        async with small_store(tmp_path / "cache") as store:
            await put(store, new_keys(2))
            found = {
                str(path.relative_to(tmp_path / "cache")): path.stat().st_mode & 0o777
                for path in (tmp_path / "cache").rglob("*")
            }
    finally:
        os.umask(old)
    [owner] = [name for name in found if name.startswith("owners/")]
    assert found == {
        "asyncache.json": 0o600,
        "lock": 0o600,
        "index.db": 0o600,
        "index.db-wal": 0o600,
        "index.db-shm": 0o600,
        "owners": 0o700,
        owner: 0o600,
        "000000.seg": 0o600,
    }
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


# Room.


async def test_there_are_never_more_bytes_than_were_asked_for(tmp_path):
    async with small_store(tmp_path, num_segments=3) as store:
        for first in range(0, 60, 6):
            await put(store, numbered(first, first + 6))
            await put(store, numbered(first, first + 3, WIDE))
            sizes = [path.stat().st_size for path in tmp_path.glob("*.seg")]
            assert sizes == [4 * SLOT] * 3
            counts(tmp_path)
        assert store.num_bytes == 12 * SLOT


async def test_what_was_used_longest_ago_gives_way(tmp_path):
    keys = numbered(0, 8)
    async with small_store(tmp_path) as store:
        await put(store, keys[3::-1])
        assert await get(store, keys[:2]) == [HIT] * 2
        for more, left in (
            ([4], [0, 1, 3, 4]),
            ([5], [0, 1, 4, 5]),
            ([6], [0, 4, 5, 6]),
            ([0, 7], [0, 5, 6, 7]),  # a put of what is there is a use
        ):
            await put(store, [keys[place] for place in more])
            assert await which(store, keys) == left


async def test_of_a_prefix_the_end_gives_way_first(tmp_path):
    keys = numbered(0, 6)
    async with small_store(tmp_path) as store:
        await put(store, keys[:4])
        await put(store, keys[4:5])
        assert await which(store, keys) == [0, 1, 2, 4]
        # Also of what was read together, in whatever order it lies.
        assert await get(store, [keys[4], *keys[:3]]) == [HIT] * 4
        await put(store, keys[5:])
        assert await which(store, keys) == [0, 1, 4, 5]


async def test_asking_is_no_use(tmp_path):
    keys = numbered(0, 5)
    async with small_store(tmp_path) as store:
        await put(store, keys[3::-1])
        await store.contains(keys[:1])
        await put(store, keys[4:])
        assert await which(store, keys) == [1, 2, 3, 4]


async def test_the_oldest_page_gives_way_whatever_its_space(tmp_path):
    ours, others = numbered(0, 8), numbered(0, 8, OTHER_SPACE)
    async with small_store(tmp_path, num_segments=2) as store:
        await put(store, ours[:4])
        await put(store, others[:4])
        # Ours has the oldest page: others take the segment that it is in.
        await put(store, others[4:5])
        assert await which(store, ours) == []
        assert await which(store, others) == [0, 1, 2, 3, 4]
        # Now it is one of their own.
        await get(store, others[:1])
        await put(store, others[5:])
        await put(store, numbered(8, 9, OTHER_SPACE))
        assert await which(store, others) == [0, 1, 2, 4, 5, 6, 7]


async def test_pages_that_another_store_read_are_not_the_oldest(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncache.stores._stock._UNTOLD_S", 0.0)
    keys = numbered(0, 5)
    async with small_store(tmp_path) as writer, small_store(tmp_path) as reader:
        await put(writer, keys[3::-1])
        assert await get(reader, keys[:1]) == [HIT]
        await put(writer, keys[4:])
        assert await which(writer, keys) == [0, 2, 3, 4]


async def test_uses_are_told_of_at_the_latest_when_the_store_is_closed(tmp_path):
    keys = numbered(0, 5)
    async with small_store(tmp_path) as writer:
        await put(writer, keys[3::-1])
        async with small_store(tmp_path) as reader:
            await get(reader, keys[3:4])  # uses are told of now, and then in a second
            assert await get(reader, keys[:1]) == [HIT]
        await put(writer, keys[4:])
        assert await which(writer, keys) == [0, 2, 3, 4]


async def test_more_spaces_than_segments_take_turns(tmp_path):
    spaces = [SPACE, OTHER_SPACE, WIDE]
    async with small_store(tmp_path) as one, small_store(tmp_path) as other:
        for turn in range(9):
            [key] = numbered(turn, turn + 1, spaces[turn % 3])
            store = (one, other)[turn % 2]
            assert await put(store, [key]) == [HIT]
            assert await get(other, [key]) == [HIT]
    assert counts(tmp_path)["claim"] == 0


async def test_a_space_whose_pages_were_removed_leaves_room_for_others(tmp_path):
    keys = numbered(0, 4)
    async with small_store(tmp_path) as store:
        await put(store, keys)
        await store.remove(keys)
        assert await put(store, numbered(0, 4, OTHER_SPACE)) == [HIT] * 4


async def test_a_batch_takes_as_many_segments_as_it_needs(tmp_path):
    async with small_store(tmp_path, num_segments=4, num_slots=1) as store:
        keys = numbered(0, 4)
        assert await put(store, keys) == [HIT] * 4
        assert await get(store, keys) == [HIT] * 4


async def test_a_batch_larger_than_the_store_is_kept_in_part(tmp_path):
    async with small_store(tmp_path) as store:
        keys = numbered(0, 6)
        assert await put(store, keys) == [HIT] * 4 + [REJECTED] * 2
        assert await get(store, keys) == [HIT] * 4 + [MISS] * 2


async def test_a_page_larger_than_a_segment_is_rejected(tmp_path):
    [key] = new_keys(1, WIDE)
    async with small_store(tmp_path, num_slots=1) as store:
        assert await put(store, [key]) == [REJECTED]
        assert await store.contains([key]) == [False]
        assert await get(store, [key]) == [MISS]
        await store.remove([key])
        assert await put(store, new_keys(1)) == [HIT]


async def test_who_comes_while_others_are_there_takes_their_segments(tmp_path):
    async with small_store(tmp_path, 2), small_store(tmp_path, 4) as late:
        assert late.num_bytes == 2 * 4 * SLOT


async def test_who_is_alone_may_have_more_segments_or_fewer(tmp_path):
    keys = numbered(0, 8)
    async with small_store(tmp_path, 2) as store:
        await put(store, keys)
    async with small_store(tmp_path, 4) as store:
        assert store.num_bytes == 4 * 4 * SLOT
        assert await get(store, keys) == [HIT] * 8
    async with small_store(tmp_path, 1) as store:
        assert await get(store, keys) == [HIT] * 4 + [MISS] * 4
        assert [path.name for path in tmp_path.glob("*.seg")] == ["000000.seg"]


async def test_claims_are_given_back_when_no_put_is_under_way(tmp_path):
    async with large_store(tmp_path) as store:
        keys = new_keys(64)
        await put(store, keys[32:])
        async with anyio.create_task_group() as tasks:
            for key in keys:
                tasks.start_soon(put, store, [key])
        assert counts(tmp_path)["claim"] == 0
        large = new_keys(96, LARGE_SPACE)
        await put(store, large[33:])
        await put(store, large)  # claims for the first job's pages and for all others
        assert counts(tmp_path)["claim"] == 0


# Races with other users.


@pytest.mark.parametrize("num_bytes", [0, 100, SPACE.page_bytes])
@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_slot_that_is_recycled_while_it_is_read_is_a_miss(  # noqa: PLR0917
    tmp_path, monkeypatch, num_bytes, checksums, direct, comes_back
):
    [key] = numbered(0, 1)
    statuses = []

    async def read(store: SegmentStore) -> None:
        statuses.extend(await get(store, [key]))

    options = {"num_slots": 1, "checksums": checksums}
    async with (
        small_store(tmp_path, direct=direct, **options) as reader,
        small_store(tmp_path, **options) as writer,
    ):
        await put(writer, [key])
        held = HeldRead(monkeypatch, 0 if direct else num_bytes)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, reader)
            await held.arrived()
            assert await put(writer, numbered(1, 2)) == [HIT]
            if comes_back:
                assert await put(writer, [key]) == [HIT]
            held.open()
        # Digests tell that what came back is the page; nothing else could.
        assert statuses == [HIT if checksums and comes_back else MISS]
        # What is there now was never in doubt.
        assert await which(writer, numbered(0, 2)) == [0 if comes_back else 1]


@pytest.mark.parametrize("checksums", [True, False])
async def test_a_page_removed_after_it_was_read_is_a_hit_only_if_its_digests_say_so(
    tmp_path, monkeypatch, checksums
):
    keys, statuses = new_keys(1), []
    arrived, opened = threading.Event(), threading.Event()
    original = Slots.read

    def read_slot(slots, slot, layers, buffers):
        answer = original(slots, slot, layers, buffers)
        arrived.set()
        opened.wait(30)
        return answer

    async def read(store: SegmentStore) -> None:
        statuses.extend(await get(store, keys))

    monkeypatch.setattr(Slots, "read", read_slot)
    async with small_store(tmp_path, checksums=checksums) as store:
        await put(store, keys)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, store)
            await anyio.to_thread.run_sync(arrived.wait)
            await store.remove(keys)
            opened.set()
    assert statuses == [HIT if checksums else MISS]


async def test_two_users_may_put_one_page_at_once(tmp_path, monkeypatch):
    keys = numbered(0, 3)
    barrier = threading.Barrier(2, timeout=30)
    original = segment_files.write_all

    def write(*arguments):
        if threading.current_thread() not in seen:
            seen.add(threading.current_thread())
            barrier.wait()
        original(*arguments)

    seen: set[threading.Thread] = set()
    monkeypatch.setattr(segment_files, "write_all", write)
    async with small_store(tmp_path, 2) as one, small_store(tmp_path, 2) as other:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put, one, keys)
            tasks.start_soon(put, other, keys)
        assert len(seen) == 2
        assert await get(one, keys) == await get(other, keys) == [HIT] * 3
        assert counts(tmp_path) == {"page": 3, "free": 5, "claim": 0}


class HeldWrite:
    """Holds the first write of a slot before it."""

    def __init__(self, monkeypatch) -> None:
        self.arrived, self.opened = threading.Event(), threading.Event()
        original = segment_files.write_all

        def write(*arguments):
            if not self.arrived.is_set():
                self.arrived.set()
                self.opened.wait(30)
            original(*arguments)

        monkeypatch.setattr(segment_files, "write_all", write)

    async def until_arrived(self) -> None:
        await anyio.to_thread.run_sync(self.arrived.wait)


async def test_a_page_is_told_of_when_its_bytes_are_in_place(tmp_path, monkeypatch):
    keys = numbered(0, 2)
    async with small_store(tmp_path) as store, small_store(tmp_path) as other:
        held = HeldWrite(monkeypatch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put, store, keys)
            await held.until_arrived()
            assert await get(other, keys) == [MISS] * 2
            await other.remove(keys)
            held.opened.set()
        assert await get(other, keys) == [HIT] * 2


async def test_nobody_takes_a_slot_that_is_being_written(tmp_path, monkeypatch):
    async with small_store(tmp_path) as store, small_store(tmp_path) as other:
        held = HeldWrite(monkeypatch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put, store, numbered(0, 1))
            await held.until_arrived()
            assert await put(other, numbered(1, 5)) == [HIT] * 3 + [REJECTED]
            assert await put(other, numbered(0, 1, OTHER_SPACE)) == [REJECTED]
            held.opened.set()
        assert await get(other, numbered(0, 1)) == [HIT]
        counts(tmp_path)


async def test_a_writer_whose_claims_were_taken_tells_of_nothing(tmp_path, monkeypatch):
    keys = numbered(0, 1)
    answers = []

    async def write(store: SegmentStore) -> None:
        answers.extend(await put(store, keys))

    async with small_store(tmp_path) as store:
        held = HeldWrite(monkeypatch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write, store)
            await held.until_arrived()
            with index_of(tmp_path) as index:
                index.execute("BEGIN IMMEDIATE")
                index.execute("INSERT INTO free SELECT space, slot FROM claim")
                index.execute("DELETE FROM claim")
                index.execute("COMMIT")
            held.opened.set()
        assert answers == [UNAVAILABLE]
        assert await get(store, keys) == [MISS]
        counts(tmp_path)


async def test_an_owner_whose_file_was_tidied_away_keeps_its_claims(
    tmp_path, monkeypatch
):
    async with small_store(tmp_path) as store, small_store(tmp_path) as other:
        held = HeldWrite(monkeypatch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put, store, numbered(0, 1))
            await held.until_arrived()
            for path in (tmp_path / "owners").iterdir():
                path.unlink()
            assert await put(other, numbered(1, 5)) == [HIT] * 3 + [REJECTED]
            held.opened.set()
        assert await get(other, numbered(0, 1)) == [HIT]


# Others that keep the index to themselves.


@contextmanager
def write_lock(directory: Path) -> Iterator[None]:
    with index_of(directory) as index:
        index.execute("BEGIN IMMEDIATE")
        yield
        index.execute("ROLLBACK")


async def test_a_busy_index_is_no_answer_after_a_while_and_reads_go_on(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(segment_database, "WAIT_S", 0.2)
    keys = numbered(0, 2)
    async with small_store(tmp_path) as store:
        await put(store, keys)
        with write_lock(tmp_path), anyio.fail_after(5):
            assert await put(store, numbered(2, 4)) == [UNAVAILABLE] * 2
            assert await get(store, keys) == [HIT] * 2
            assert await store.contains(keys) == [True] * 2
            await store.remove(keys)
            # A new thread, and a new space, may come meanwhile.
            assert await get(store, numbered(0, 1, OTHER_SPACE)) == [MISS]
            assert await put(store, numbered(0, 1, OTHER_SPACE)) == [UNAVAILABLE]
        assert await put(store, [*keys, *numbered(2, 4)]) == [HIT] * 4
        check_counts = counts(tmp_path)
        assert check_counts == {"page": 4, "free": 0, "claim": 0}


async def test_calls_do_not_wait_for_a_busy_index_one_after_the_other(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(segment_database, "WAIT_S", 1.0)
    async with small_store(tmp_path) as store:
        await put(store, numbered(0, 1))
        with write_lock(tmp_path), anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for number in range(1, 100):
                    tasks.start_soon(put, store, numbered(number, number + 1))
        assert await put(store, numbered(1, 2)) == [HIT]


async def test_a_put_waits_for_an_index_that_is_busy_for_a_moment(tmp_path):
    answers = []

    async def write(store: SegmentStore) -> None:
        answers.extend(await put(store, numbered(0, 1)))

    async with small_store(tmp_path) as store:
        begun = threading.Event()

        def wait(attempt, wait_s, stop):
            begun.set()
            return original(attempt, 30.0, stop)

        original = segment_database.wait
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segment_database, "wait", wait)
            async with anyio.create_task_group() as tasks:
                with write_lock(tmp_path):
                    tasks.start_soon(write, store)
                    await anyio.to_thread.run_sync(begun.wait)
                    assert answers == []
        assert answers == [HIT]


@pytest.mark.parametrize("how", Cancellation)
async def test_a_cancelled_call_does_not_wait_for_a_busy_index(
    tmp_path, monkeypatch, how
):
    monkeypatch.setattr(segment_database, "WAIT_S", 600.0)
    async with small_store(tmp_path) as store:
        await put(store, numbered(0, 1))
        with write_lock(tmp_path), anyio.fail_after(10):
            for num_turns in (1, 5, 100):
                assert await cancel_after(
                    num_turns, lambda: put(store, numbered(1, 2)), how
                )
        assert await put(store, numbered(1, 2)) == [HIT]
        assert counts(tmp_path)["claim"] == 0


async def test_closing_waits_a_second_for_a_busy_index_and_its_claims_are_a_dead_ones(
    tmp_path, monkeypatch
):
    store = small_store(tmp_path)
    async with small_store(tmp_path) as other:
        await store.open()
        held = HeldWrite(monkeypatch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put, store, numbered(0, 1))
            await held.until_arrived()
            with write_lock(tmp_path), anyio.fail_after(5):
                held.opened.set()
                await store.aclose()
        assert counts(tmp_path)["claim"] == 1
        assert await put(other, numbered(1, 5)) == [HIT] * 4
        assert counts(tmp_path) == {"page": 4, "free": 0, "claim": 0}


# The end.


async def test_a_store_that_is_not_open_says_so(tmp_path):
    store = small_store(tmp_path)
    with pytest.raises(OrderError, match=r"is not open: await its open\(\) first"):
        await store.contains(new_keys(1))
    assert store.num_bytes == 0
    await store.aclose()
    with pytest.raises(ClosedError, match="the store is closed"):
        await store.open()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_threads": 0}, "num_threads must be at least 1, not 0"),
        ({"segment_bytes": 0}, "must be a multiple of 4096 up to 4294967296, not 0"),
        ({"segment_bytes": 4097}, "must be a multiple of 4096 .* not 4097"),
        ({"segment_bytes": 2**33}, "must be a multiple of 4096 .* not 8589934592"),
        ({"segment_bytes": 2**20}, "must hold a segment of 1048576, not 65536"),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        SegmentStore(tmp_path, 2**16, **options)
    assert list(tmp_path.iterdir()) == []


async def test_no_file_is_left_open_and_no_thread_after_close(tmp_path):
    threads = threading.active_count()
    num_open = num_descriptors()
    async with small_store(tmp_path) as store:
        await put(store, new_keys(3))
        await get(store, new_keys(3))
    assert threading.active_count() == threads
    assert num_descriptors() == num_open
    assert list((tmp_path / "owners").iterdir()) == []


async def test_closing_twice_at_once_ends_twice(tmp_path):
    store = small_store(tmp_path)
    await store.open()
    await put(store, new_keys(2))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.aclose)
        tasks.start_soon(store.aclose)
    assert list((tmp_path / "owners").iterdir()) == []


async def test_opening_twice_at_once_opens_once(tmp_path):
    store = small_store(tmp_path)
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(store.open)
    assert len(list((tmp_path / "owners").iterdir())) == 1
    assert await put(store, new_keys(2)) == [HIT] * 2
    await store.aclose()
    assert list((tmp_path / "owners").iterdir()) == []


async def test_many_stores_may_be_opened_at_once(tmp_path):
    async def use() -> None:
        async with large_store(tmp_path / "cache") as store:
            keys = new_keys(2)
            assert await put(store, keys) == [HIT] * 2
            assert await get(store, keys) == [HIT] * 2

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(use)
    assert counts(tmp_path / "cache")["page"] == 16


async def test_closing_while_it_is_opened_leaves_nothing_open(tmp_path, monkeypatch):
    arrived, opened = threading.Event(), threading.Event()
    original = SegmentDirectory._set_up

    def set_up(directory: SegmentDirectory, max_segments: int) -> None:
        arrived.set()
        opened.wait(30)
        original(directory, max_segments)

    monkeypatch.setattr(SegmentDirectory, "_set_up", set_up)
    store = small_store(tmp_path)

    async def open_it() -> None:
        with pytest.raises(ClosedError, match="closed"):
            await store.open()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(open_it)
        await anyio.to_thread.run_sync(arrived.wait)
        tasks.start_soon(store.aclose)
        await anyio.lowlevel.checkpoint()
        opened.set()
    assert store.num_bytes == 0


@pytest.mark.parametrize("style", CancelStyle)
async def test_opening_may_be_cancelled_and_tried_again(tmp_path, style):
    class Fresh:
        async def __aenter__(self) -> SegmentStore:
            self.store = small_store(tmp_path, 3)
            return self.store

        async def __aexit__(self, *_: object) -> None:
            await self.store.aclose()

    async def check(store: SegmentStore) -> None:
        await store.open()
        assert store.num_bytes == 12 * SLOT
        assert await put(store, new_keys(1)) == [HIT]

    await cancel_nth(SegmentStore.open, fresh=Fresh, check=check, styles=[style])


async def test_opening_does_not_wait_for_who_sets_up_longer_than_anyone_waits_for_it(
    tmp_path, monkeypatch
):
    arrived, opened = threading.Event(), threading.Event()
    original = SegmentDirectory._set_up

    def set_up(directory: SegmentDirectory, max_segments: int) -> None:
        arrived.set()
        opened.wait(30)
        original(directory, max_segments)

    monkeypatch.setattr(SegmentDirectory, "_set_up", set_up)
    first, second = small_store(tmp_path), small_store(tmp_path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.open)
        await anyio.to_thread.run_sync(arrived.wait)
        with anyio.fail_after(10):
            for how in Cancellation:
                assert await cancel_after(3, second.open, how)
        tasks.start_soon(second.open)
        await anyio.lowlevel.checkpoint()
        opened.set()
    assert await put(first, numbered(0, 1)) == [HIT]
    assert await get(second, numbered(0, 1)) == [HIT]
    await first.aclose()
    await second.aclose()


@pytest.mark.parametrize("style", CancelStyle)
async def test_closing_may_be_cancelled_and_tried_again(tmp_path, style):
    class Fresh:
        async def __aenter__(self) -> SegmentStore:
            store = small_store(tmp_path)
            await store.open()
            await put(store, new_keys(2))
            return store

        async def __aexit__(self, *_: object) -> None:
            pass

    async def check(store: SegmentStore) -> None:
        await store.aclose()
        assert await anyio.to_thread.run_sync(os.listdir, tmp_path / "owners") == []
        found = await anyio.to_thread.run_sync(counts, tmp_path)
        assert found["claim"] == 0

    await cancel_nth(SegmentStore.aclose, fresh=Fresh, check=check, styles=[style])


@pytest.mark.parametrize("how", Cancellation)
async def test_a_large_batch_may_be_cancelled_at_any_moment(tmp_path, how):
    num_turns, was_cancelled = 0, True
    async with large_store(tmp_path, num_threads=2) as store:
        while was_cancelled:
            keys = new_keys(96, LARGE_SPACE)
            sources = [new_source(key) for key in keys]
            was_cancelled = await cancel_after(
                num_turns, lambda k=keys, s=sources: store.put(k, s), how
            )
            fill(sources, b"\xff")
            assert counts(tmp_path)["claim"] == 0
            assert set(await get(store, keys)) <= {HIT, MISS}
            await store.remove(keys)
            num_turns = 2 * num_turns + 1


async def test_closing_under_a_put_answers_for_the_pages_it_reached(
    tmp_path, monkeypatch
):
    keys = new_keys(96, LARGE_SPACE)
    answers = []
    store = large_store(tmp_path, num_threads=1)
    await store.open()
    held = HeldWrite(monkeypatch)

    async def put_all() -> None:
        answers.extend(await put(store, keys))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(put_all)
        await held.until_arrived()
        tasks.start_soon(store.aclose)
        while not store._writes._closed:
            await anyio.lowlevel.checkpoint()
        # Not one file may be closed yet: its number might be another's already.
        held.opened.set()
    assert set(answers) == {HIT, UNAVAILABLE}
    async with large_store(tmp_path) as store:
        assert await get(store, keys) == [
            HIT if status is HIT else MISS for status in answers
        ]


@pytest.mark.parametrize("checksums", [True, False])
async def test_closing_under_a_read_makes_no_hit_of_what_is_in_doubt(
    tmp_path, monkeypatch, checksums
):
    keys = numbered(0, 3)
    answers = []

    async def read(store: SegmentStore) -> None:
        answers.extend(await get(store, keys))

    store = small_store(tmp_path, checksums=checksums)
    async with small_store(tmp_path, checksums=checksums) as other:
        await store.open()
        await put(other, keys)
        held = HeldRead(monkeypatch, 100)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, store)
            await held.arrived()
            await put(other, numbered(3, 7))
            tasks.start_soon(store.aclose)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            held.open()
        assert answers[0] is MISS
        assert set(answers[1:]) <= {MISS, UNAVAILABLE}


async def test_what_cannot_be_looked_up_again_is_no_hit(tmp_path, monkeypatch):
    keys = numbered(0, 2)
    async with small_store(tmp_path, checksums=False) as store:
        await put(store, keys)
        original, calls = segment_database.SegmentDatabase.all, []

        def fail_second(database, query, *arguments):
            if "page WHERE space" in query:
                calls.append(query)
                if len(calls) == 2:
                    raise sqlite3.OperationalError("disk I/O error")
            return original(database, query, *arguments)

        monkeypatch.setattr(segment_database.SegmentDatabase, "all", fail_second)
        # As if others changed something all the time.
        monkeypatch.setattr(segment_version.Version, "read", lambda _: None)
        assert await get(store, keys) == [UNAVAILABLE] * 2
        assert await get(store, keys) == [HIT] * 2


async def test_a_failed_commit_is_no_end_of_the_connection(tmp_path, monkeypatch):
    keys = numbered(0, 2)
    async with small_store(tmp_path, num_threads=1) as store:
        await put(store, keys[:1])
        original = segment_database.SegmentDatabase.change
        failing = [True]

        class Failing:
            def __init__(self, connection) -> None:
                self._connection = connection

            def execute(self, statement, *arguments):
                if statement == "COMMIT" and failing[0]:
                    raise sqlite3.OperationalError("database or disk is full")
                return self._connection.execute(statement, *arguments)

            def __getattr__(self, name):
                return getattr(self._connection, name)

        def change(database, **options):
            if not isinstance(database._connection, Failing):
                database._connection = Failing(database._connection)
            return original(database, **options)

        monkeypatch.setattr(segment_database.SegmentDatabase, "change", change)
        assert await put(store, keys[1:]) == [UNAVAILABLE]
        failing[0] = False
        assert await put(store, keys[1:]) == [HIT]
        counts(tmp_path)


def test_after_a_fork_the_store_is_the_parents(tmp_path):
    # In an interpreter of its own, for the tests' has threads.
    code = f"""
import asyncio, os
from asyncache.core import OrderError
from tests.stores.segments import get, numbered, put, small_store
from asyncache.stores import Status
from pathlib import Path

async def main():
    keys = numbered(0, 2)
    async with small_store(Path({str(tmp_path)!r})) as store:
        await put(store, keys)
        child = os.fork()
        if not child:
            try:
                store._check_usable()
            except OrderError as error:
                assert "was opened by the parent of this process" in str(error)
                store._leave()
                os._exit(7)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        assert await put(store, numbered(2, 4)) == [Status.HIT] * 2
        assert await get(store, numbered(0, 4)) == [Status.HIT] * 4

asyncio.run(main())
"""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with index_of(tmp_path) as index:
        assert check_index(index) == {"page": 4, "free": 0, "claim": 0}


@pytest.mark.slow
async def test_any_number_of_puts_may_wait_and_all_are_done(tmp_path):
    """Fails if threads of one store find each other's transactions in the way."""
    keys = numbered(0, 5_000)
    target = new_target(keys[0])
    async with SegmentStore(tmp_path, 128 * MIB, segment_bytes=32 * MIB) as store:
        calls = [asyncio.ensure_future(store.put([key], [target])) for key in keys]
        assert {status for [status] in await asyncio.gather(*calls)} == {HIT}


async def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    store = small_store(tmp_path / "file" / "cache")
    with pytest.raises(StoreError, match=r"cannot keep pages in '.*/file/cache'"):
        await store.open()
    await store.aclose()
