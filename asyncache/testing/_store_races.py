"""What a store must do for many at once: a page is whole or absent, whoever hurries."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import anyio.lowlevel

from asyncache.core import ClosedError, PageKey, PageSpace
from asyncache.stores import Status, Store
from asyncache.testing._samples import (
    LARGE_SPACE,
    OTHER_SPACE,
    SPACE,
    content,
    fill,
    new_keys,
    new_source,
    new_target,
)
from asyncache.testing._store_asserts import (
    PATTERN,
    Law,
    expect,
    expect_in,
    expect_pattern,
    put,
    put_new,
    together,
)

_NUM_ROUNDS = 8
_NUM_WRITERS = 3
# 24 MiB in batches of 2: more than a store needs to have room for.
_NUM_CROWDS = 12
_CROWD = 16
_FLIPPED = bytes(255 - byte for byte in range(256))


async def _answers_come_in_the_order_of_the_keys(store: Store) -> None:
    spaces = [SPACE, OTHER_SPACE, LARGE_SPACE]
    there = [key for space in spaces for key in await put_new(store, 3, space)]
    absent = [key for space in spaces for key in new_keys(3, space)]
    dice = random.Random(0)
    for _ in range(4):
        keys = dice.sample(there + absent, k=len(there) + len(absent))
        keys += keys[:2]
        expect(await store.contains(keys), [key in there for key in keys], "contains")
        targets = [new_target(key) for key in keys]
        expect(
            await store.get_into(keys, targets),
            [Status.HIT if key in there else Status.MISS for key in keys],
            "get_into of some",
        )
        for key, [target] in zip(keys, targets, strict=True):
            if key in there:
                expect(target, content(key), "bytes of a page")
    both = there[::2] + absent[::2]
    expect(
        await store.put(both, [new_source(key) for key in both]),
        [Status.HIT] * len(both),
        "put of pages of which some are there",
    )


async def _a_page_is_whole_or_absent_whoever_hurries(store: Store) -> None:
    """Writers of two versions, readers, a remover, and a crowd that drives pages out.

    Two versions, because a page that is torn between equal ones looks whole.
    """
    [key] = new_keys(1, LARGE_SPACE)
    race = _Race(store, key)
    await together(
        *[partial(race.write, number % 2) for number in range(_NUM_WRITERS)],
        *[partial(race.read, layers) for layers in (None, range(1, 3), range(2, 4))],
        race.remove,
        race.crowd,
    )
    await store.remove([key])
    await put(store, [key])
    target = new_target(key)
    expect(await store.get_into([key], [target]), [Status.HIT], "get_into afterwards")
    expect(target[0], content(key), "bytes of a page")


async def _a_call_under_way_at_the_close_ends(store: Store) -> None:
    there = await put_new(store, _CROWD, LARGE_SPACE)
    others = new_keys(_CROWD, LARGE_SPACE)
    targets = [new_target(key) for key in there]
    sources = [new_source(key) for key in others]

    async def read() -> None:
        try:
            statuses = await store.get_into(there, targets)
        except ClosedError:  # it had not begun
            statuses = [Status.UNAVAILABLE] * len(there)
        for key, [target], status in zip(there, targets, statuses, strict=True):
            if status is Status.HIT:
                expect(target, content(key), "bytes of a page")
        fill(targets, PATTERN)

    async def write() -> None:
        try:
            statuses = await store.put(others, sources)
        except ClosedError:
            statuses = []
        expect_in(statuses, {Status.HIT, Status.UNAVAILABLE, Status.REJECTED}, "put")
        fill(sources, PATTERN)

    async def close() -> None:
        await anyio.lowlevel.checkpoint()
        await store.aclose()

    await together(read, write, close)
    expect_pattern([*targets, *sources])


RACE_LAWS: Sequence[Law] = (
    _answers_come_in_the_order_of_the_keys,
    _a_page_is_whole_or_absent_whoever_hurries,
    _a_call_under_way_at_the_close_ends,
)


class _Race:
    """Everything that can be done to one page, by tasks that take no turns."""

    def __init__(self, store: Store, key: PageKey) -> None:
        self._store = store
        self._key = key
        first = content(key)
        self._versions = (first, first.translate(_FLIPPED))
        self._num_busy = _NUM_WRITERS + 1

    async def write(self, version: int) -> None:
        for _ in range(_NUM_ROUNDS):
            source = [memoryview(bytearray(self._versions[version]))]
            statuses = await self._store.put([self._key], [source])
            expect_in(statuses, {Status.HIT, Status.REJECTED}, "put")
            fill([source], PATTERN)
            await anyio.lowlevel.checkpoint()
        self._num_busy -= 1

    async def remove(self) -> None:
        while self._num_busy:
            await self._store.remove([self._key])
            await self._store.contains([self._key])

    async def read(self, layers: range | None) -> None:
        span = _span(self._key.space, layers)
        while self._num_busy:
            target = new_target(self._key, layers)
            [status] = await self._store.get_into([self._key], [target], layers)
            expect_in([status], {Status.HIT, Status.MISS}, "get_into")
            if status is Status.HIT:
                whole = [version[span] for version in self._versions]
                assert target[0] in whole, f"layers {layers} of a page are torn"

    async def crowd(self) -> None:
        page = [memoryview(bytes(LARGE_SPACE.page_bytes))]
        for _ in range(_NUM_CROWDS):
            keys = new_keys(_CROWD, LARGE_SPACE)
            statuses = await self._store.put(keys, [page] * len(keys))
            expect_in(statuses, {Status.HIT, Status.REJECTED}, "put")
            await self._store.remove(keys[::2])
        self._num_busy -= 1


def _span(space: PageSpace, layers: range | None) -> slice:
    if layers is None:
        return slice(None)
    return slice(layers.start * space.layer_bytes, layers.stop * space.layer_bytes)
