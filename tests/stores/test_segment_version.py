"""What is remembered of the index is believed as long as nobody has changed it."""

from __future__ import annotations

import os
import tempfile
from contextlib import closing, suppress

import pytest
from hypothesis import given, strategies as st

from asyncache.core import PageHash, PageKey
from asyncache.stores import Status, _segment_version as segment_version
from asyncache.stores._segment_database import Patience, SegmentDatabase
from asyncache.stores._segment_index import Place
from asyncache.stores._segment_version import Version
from asyncache.testing._samples import SPACE
from tests.stores.segments import (
    counts,
    get,
    index_of,
    numbered,
    put,
    small_store,
)

HIT, UNAVAILABLE = Status.HIT, Status.UNAVAILABLE


def test_a_version_changes_with_each_change_of_anyone(tmp_path):
    path = str(tmp_path / "index.db")
    (tmp_path / "index.db").touch()
    with (
        (tmp_path / "lock").open("w+b") as a,
        (tmp_path / "lock").open("r+b") as b,
        closing(SegmentDatabase(path, Version(a.fileno()), Patience())) as one,
        closing(SegmentDatabase(path, Version(b.fileno()), Patience())) as other,
    ):
        one.create()
        seen = {one.version.read()}
        for number in range(20):
            with (one, other)[number % 2].change():
                one_or_other = (one, other)[number % 2]
                one_or_other.run("UPDATE clock SET seq = seq + 1")
            assert one.version.read() not in seen
            seen.add(one.version.read())
            other.all("SELECT * FROM page")
            assert one.version.read() == other.version.read() in seen


@given(st.lists(st.integers(0, 2), max_size=60))
def test_a_version_is_of_one_state_however_late_others_are(turns):
    """Three processes commit: each begins, commits and is done, and not in one go."""
    with tempfile.TemporaryFile() as file:
        version = Version(file.fileno())
        steps = [iter(()) for _ in range(3)]
        state, holder, seen = 0, None, {}

        def commit(writer):
            nonlocal state, holder
            with version.changing():
                holder = writer  # as SQLite's lock was before this
                yield
                state, holder = state + 1, None
                yield  # the lock is another's now

        for writer in turns:
            if next(steps[writer], "over") == "over" and holder is None:
                steps[writer] = commit(writer)
                next(steps[writer])
            now = version.read()
            assert now is None or holder is None
            assert now is None or seen.setdefault(now, state) == state
        for left in steps:
            list(left)  # they come to an end, in whatever order
        assert version.read() in {None, state} or not turns


RUBBISH = [b"", b"\xff" * 8, b"\xff" * 16, b"\x07" * 9, b"\5" + b"\0" * 7 + b"\6"]


@pytest.mark.parametrize("content", RUBBISH)
def test_whatever_is_in_the_file_a_change_is_noticed(content):
    with tempfile.TemporaryFile() as file:
        os.pwrite(file.fileno(), content, 0)
        version = Version(file.fileno())
        seen = {version.read()}
        for _ in range(3):
            with version.changing():
                assert version.read() is None
            assert version.read() not in {None, *seen}
            seen.add(version.read())


def test_of_a_process_that_died_in_the_middle_nothing_is_left_by_the_next_change():
    with tempfile.TemporaryFile() as file:
        version = Version(file.fileno())
        dead = version.changing()
        dead.__enter__()
        assert version.read() is None
        with version.changing():
            assert version.read() is None
        assert version.read() == 2
        with suppress(KeyboardInterrupt), version.changing():
            raise KeyboardInterrupt
        assert version.read() == 3
        dead.gen.close()  # so late that it does no harm
        assert version.read() == 3


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_a_commit_is_what_it_is_whether_that_can_be_told_or_not(
    tmp_path, monkeypatch, fails
):
    """No slot is ever a page's and at the same time one to write to."""
    keys = numbered(0, 4)
    original = segment_version.Version._write
    where = {"before": segment_version._BEGUN, "after": segment_version._DONE}[fails]

    def write(version, place, number):
        if place == where:
            raise OSError(28, "No space left on device")
        original(version, place, number)

    async with small_store(tmp_path, 1, 8, num_threads=1) as store:
        assert await put(store, keys[:1]) == [HIT]
        with monkeypatch.context() as patch:
            patch.setattr(segment_version.Version, "_write", write)
            told = await put(store, keys[:3])
        assert told == [HIT, *[HIT if fails == "after" else UNAVAILABLE] * 2]
        assert await put(store, keys) == [HIT] * 4
        assert await get(store, keys) == [HIT] * 4
    assert counts(tmp_path) == {"page": 4, "free": 4, "claim": 0}


async def test_pages_that_are_there_are_hits_where_others_cannot_be_stored(
    tmp_path, monkeypatch
):
    async with small_store(tmp_path, 1, 8) as store:
        assert await put(store, numbered(0, 2)) == [HIT] * 2
        before = (tmp_path / "lock").read_bytes()
        assert await put(store, numbered(0, 2)) == [HIT] * 2
        assert (tmp_path / "lock").read_bytes() == before  # nothing was changed
        with index_of(tmp_path) as index:
            index.execute("BEGIN IMMEDIATE")
            assert await put(store, numbered(0, 3)) == [HIT, HIT, UNAVAILABLE]
            index.execute("ROLLBACK")
        assert await put(store, numbered(0, 3)) == [HIT] * 3


async def test_of_two_pages_said_to_be_in_one_slot_that_goes_which_is_there(tmp_path):
    async with small_store(tmp_path, 1, 2, num_threads=1) as store:
        assert await put(store, numbered(0, 1)) == [HIT]

        def remove(my):
            [place] = my.index.find(1, [numbered(0, 1)[0].hash]).values()
            old = Place(place.slot, place.born - 1)
            my.index.remove([old])
            assert my.index.find(1, [numbered(0, 1)[0].hash])
            my.index.remove([place, old])
            return my.index.find(1, [numbered(0, 1)[0].hash])

        assert await store._ask(store._writes, remove) == {}
    assert counts(tmp_path) == {"page": 0, "free": 2, "claim": 0}


@pytest.mark.parametrize("size", [0, 31, 33])
async def test_a_hash_of_another_length_is_refused_and_hurts_no_other(tmp_path, size):
    bad = PageKey(PageHash(b"x" * size), SPACE)
    async with small_store(tmp_path, 1, 8) as store:
        for use in (put, get):
            with pytest.raises(ValueError, match=f"32 bytes, not {size}"):
                await use(store, [bad, *numbered(0, 2)])
        with pytest.raises(ValueError, match=f"32 bytes, not {size}"):
            await store.contains([bad])
        assert await put(store, numbered(0, 2)) == [HIT] * 2
        assert await get(store, numbered(0, 2)) == [HIT] * 2
    assert counts(tmp_path) == {"page": 2, "free": 6, "claim": 0}
