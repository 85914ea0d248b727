"""Kills writers of a SegmentStore, round after round; run in an interpreter of its own.

Writers are forks of this process, which never opened the store, so a round costs a few
milliseconds. A reader lives through all rounds. ``python -m tests.stores.segment_rounds
DIRECTORY NUM_ROUNDS DIGESTS`` prints what the reader found, as JSON. Imports no more
than it must: no torch.
"""

# ruff: noqa: T201 - the test reads what it prints

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from asyncache.core import PageHash, PageKey, PageSpace
from asyncache.stores import SegmentStore, Status

# Two sizes, so that segments change hands too; more pages than there is room for.
SPACES = [
    PageSpace("kv", "0of1", "uint8", (4, 2, 16, 2, 64)),
    PageSpace("kv", "1of2", "uint8", (4, 2, 16, 4, 64)),
]
KEYS = [
    PageKey(PageHash(number.to_bytes(32, "little")), space)
    for space in SPACES
    for number in range(60)
]
CONTENT = {
    key: hashlib.shake_128(key.name.encode()).digest(key.space.page_bytes)
    for key in KEYS
}
NUM_WRITERS = 2
Make = Callable[[], SegmentStore]


def new_store(directory: Path, digests: str) -> SegmentStore:
    """Return a store with digests, or without any where they are "none"."""
    return SegmentStore(
        directory,
        8 * 2**18,
        segment_bytes=2**18,
        num_threads=2,
        checksums=digests != "none",
    )


async def write(make: Make, seed: int, told: Callable[[], object]) -> None:
    """Put pages, and remove some, until the end."""
    chance = random.Random(seed)
    async with make() as store:
        while True:
            keys = chance.sample(KEYS, 6)
            pages = [[memoryview(CONTENT[key])] for key in keys]
            told()
            statuses = await store.put(keys, pages)
            assert set(statuses) <= {Status.HIT, Status.REJECTED, Status.UNAVAILABLE}
            await store.remove(keys[:1])


async def read(make: Make, goes_on: Callable[[], bool]) -> Counter[str]:
    """Read pages until the end; count what came of them."""
    found: Counter[str] = Counter()
    async with make() as store:
        while goes_on():
            await read_once(store, KEYS, found)
    return found


async def read_once(
    store: SegmentStore, keys: list[PageKey], found: Counter[str]
) -> None:
    targets = [memoryview(bytearray(key.space.page_bytes)) for key in keys]
    statuses = await store.get_into(keys, [[target] for target in targets])
    for key, status, target in zip(keys, statuses, targets, strict=True):
        is_wrong = status is Status.HIT and target != CONTENT[key]
        found["WRONG" if is_wrong else status.name] += 1


def fork(work: Callable[[], Awaitable[object]]) -> int:
    """Run an async function in a child; return its process."""
    child = os.fork()
    if not child:
        try:
            asyncio.run(work())
        finally:
            os._exit(1)
    return child


def start_writer(make: Make, seed: int) -> tuple[int, int]:
    """Return a writer, and where it tells of each put that it begins."""
    told, tell = os.pipe()
    child = fork(lambda: write(make, seed, lambda: os.write(tell, b".")))
    os.close(tell)
    return child, told


def kill_round(make: Make, number: int, chance: random.Random) -> None:
    """Start writers, and kill each in the middle of some put."""
    writers = [start_writer(make, NUM_WRITERS * number + n) for n in range(NUM_WRITERS)]
    try:
        for child, told in writers:
            for _ in range(chance.randint(1, 6)):
                assert os.read(told, 1) == b".", "a writer failed"
            for _ in range(chance.choice((0, 100, 1_000, 10_000))):
                pass
            os.kill(child, signal.SIGKILL)
    finally:
        # Also after a failure: one that lived on would keep the reader going.
        for child, told in writers:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(told)


def main(directory: Path, num_rounds: int, digests: str) -> None:
    make = partial(new_store, directory, digests)
    chance = random.Random(num_rounds)
    lasts, last = os.pipe()
    answers, answer = os.pipe()
    os.set_blocking(lasts, False)

    async def reader() -> None:
        os.close(last)
        found = await read(make, goes_on)
        os.write(answer, json.dumps(found).encode())

    def goes_on() -> bool:
        try:
            return os.read(lasts, 1) != b""
        except BlockingIOError:
            return True

    fork(reader)
    os.close(answer)
    for number in range(num_rounds):
        kill_round(make, number, chance)
    os.close(last)
    print(os.read(answers, 10_000).decode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
