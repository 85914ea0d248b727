"""Several processes on one directory, and what is left of those that are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from asyncache.stores import Status
from tests.stores.segment_rounds import KEYS, new_store, read_once
from tests.stores.segments import (
    check_index,
    counts,
    index_of,
    numbered,
    put,
    small_store,
)

HIT, REJECTED = Status.HIT, Status.REJECTED

# A process that holds a claim until it is told to go on; it leaves as one should.
HOLDER = """
import asyncio, sys
from asyncache.core import PageHash, PageKey, PageSpace
from asyncache.stores import SegmentStore
from asyncache.stores._segment_files import Slots

key = PageKey(PageHash(bytes(32)), PageSpace("kv", "0of1", "uint8", (4, 2, 4, 2, 8)))
original = Slots.write

def write(slots, slot, buffers, head):
    print("claimed", flush=True)
    sys.stdin.readline()
    original(slots, slot, buffers, head)

async def main():
    async with SegmentStore(sys.argv[1], 4 * 4096, segment_bytes=4 * 4096) as store:
        page = [memoryview(bytes(key.space.page_bytes))]
        print(await store.put([key], [page]), flush=True)

Slots.write = write
asyncio.run(main())
"""


def start_holder(directory: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "claimed\n"
    return holder


def kill_writers(directory: Path, digests: str, *, num_rounds: int) -> Counter[str]:
    """Return what a reader found meanwhile."""
    rounds = "tests.stores.segment_rounds"
    arguments = (rounds, str(directory), str(num_rounds), digests)
    done = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Counter(json.loads(done.stdout))


async def fill(directory: Path) -> list[Status]:
    """Put as many pages as there are slots."""
    async with small_store(directory) as store:
        return await put(store, numbered(1, 5))


async def test_a_process_that_was_stopped_keeps_its_claims(tmp_path):
    with start_holder(tmp_path) as holder:
        holder.send_signal(signal.SIGSTOP)
        assert await fill(tmp_path) == [HIT] * 3 + [REJECTED]
        holder.send_signal(signal.SIGCONT)
        answer, _ = holder.communicate("\n")
    assert "HIT" in answer
    assert counts(tmp_path) == {"page": 4, "free": 0, "claim": 0}
    assert list((tmp_path / "owners").iterdir()) == []


async def test_a_process_that_was_killed_does_not(tmp_path):
    with start_holder(tmp_path) as holder:
        holder.kill()
    assert counts(tmp_path)["claim"] == 1
    assert await fill(tmp_path) == [HIT] * 4
    assert counts(tmp_path) == {"page": 4, "free": 0, "claim": 0}


async def test_claims_of_the_dead_are_taken_while_others_live(tmp_path):
    async with small_store(tmp_path) as store:
        with start_holder(tmp_path) as holder:
            assert await put(store, numbered(1, 5)) == [HIT] * 3 + [REJECTED]
            holder.kill()
        assert await put(store, numbered(1, 5)) == [HIT] * 4
        assert counts(tmp_path) == {"page": 4, "free": 0, "claim": 0}


@pytest.mark.slow
@pytest.mark.parametrize("digests", ["xxh3", "none"])
async def test_killed_writers_leave_no_wrong_page_and_no_slot_that_nobody_has(
    tmp_path, digests
):
    found = kill_writers(tmp_path, digests, num_rounds=200)
    assert found["WRONG"] == found["CORRUPT"] == found["UNAVAILABLE"] == 0
    assert found["HIT"] > 0
    with index_of(tmp_path) as index:
        check_index(index)
    async with new_store(tmp_path, digests) as store:
        found.clear()
        await read_once(store, KEYS, found)
        assert set(found) <= {"HIT", "MISS"}
    assert counts(tmp_path)["claim"] == 0
