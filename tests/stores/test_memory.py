"""MemoryStore: the contract, the budget, and who gives way."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest

from asyncache.core import PageKey, PageSpace
from asyncache.stores import MemoryStore, Status
from asyncache.testing import check_store
from asyncache.testing._samples import SPACE, content, new_keys, new_source, new_target

PAGE = SPACE.page_bytes
HUGE = PageSpace("kv", "all", "uint8", (2, 2, 64, 64, 1024))  # 16 MiB


async def put(store: MemoryStore, *keys: PageKey) -> list[Status]:
    return await store.put(keys, [new_source(key) for key in keys])


async def get(store: MemoryStore, *keys: PageKey) -> list[Status]:
    return await store.get_into(keys, [new_target(key) for key in keys])


async def test_it_keeps_the_contract():
    await check_store(lambda: MemoryStore(16 * 2**20))


async def test_the_page_used_longest_ago_gives_way():
    store = MemoryStore(3 * PAGE)
    a, b, c, d = new_keys(4)
    for key in (a, b, c, d):
        await put(store, key)
    assert await store.contains([a, b, c, d]) == [False, True, True, True]


async def test_of_a_prefix_the_end_gives_way_first():
    store = MemoryStore(3 * PAGE)
    a, b, c, d, e = new_keys(5)
    await put(store, a, b, c)
    await put(store, d)
    assert await store.contains([a, b, c, d]) == [True, True, False, True]
    await get(store, a, b, d)
    await put(store, e)
    assert await store.contains([a, b, d, e]) == [True, True, False, True]


async def test_reading_and_putting_are_uses_and_asking_is_none():
    store = MemoryStore(3 * PAGE)
    a, b, c, d, e = new_keys(5)
    await put(store, a, b, c)
    await get(store, a)
    await put(store, b)
    await store.contains([c])
    await put(store, d)
    assert await store.contains([a, b, c, d]) == [True, True, False, True]
    await put(store, e)
    assert await store.contains([a, b, d, e]) == [False, True, True, True]


async def test_a_page_larger_than_the_budget_is_rejected_and_drives_nobody_out():
    store = MemoryStore(PAGE - 1)
    [key] = new_keys(1)
    assert await put(store, key) == [Status.REJECTED]
    assert (store.num_bytes, store.num_pages) == (0, 0)
    store = MemoryStore(2 * PAGE)
    [huge] = new_keys(1, HUGE)
    await put(store, key)
    assert await put(store, huge) == [Status.REJECTED]
    assert await get(store, key) == [Status.HIT]


async def test_bytes_are_counted_to_the_byte():
    store = MemoryStore(2 * PAGE)
    a, b, c = new_keys(3)
    await put(store, a, b, b, c)
    assert (store.num_bytes, store.num_pages) == (2 * PAGE, 2)
    assert repr(store) == f"<MemoryStore 2 pages, {2 * PAGE} of {2 * PAGE} bytes>"
    await store.remove([c, c, a])
    assert (store.num_bytes, store.num_pages) == (PAGE, 1)
    await store.aclose()
    assert (store.num_bytes, store.num_pages) == (0, 0)


async def test_an_empty_budget_rejects_all_and_a_negative_one_is_refused():
    [key] = new_keys(1)
    assert await put(MemoryStore(0), key) == [Status.REJECTED]
    with pytest.raises(ValueError, match="max_bytes must be at least 0, not -1"):
        MemoryStore(-1)


async def test_other_tasks_run_while_a_huge_page_is_copied():
    store = MemoryStore(2 * HUGE.page_bytes)
    [key] = new_keys(1, HUGE)
    num_turns, turns_by = 0, {}

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        for call in (put, get):
            num_turns = 0
            await call(store, key)
            turns_by[call] = num_turns
        tasks.cancel_scope.cancel()
    assert all(turns >= 4 for turns in turns_by.values()), turns_by


async def test_a_huge_page_comes_back_bit_for_bit():
    store = MemoryStore(HUGE.page_bytes)
    [key] = new_keys(1, HUGE)
    await put(store, key)
    half = HUGE.layer_bytes
    target = memoryview(bytearray(HUGE.page_bytes))
    assert await store.get_into([key], [[target[:half], target[half:]]]) == [Status.HIT]
    assert target == content(key)


async def test_overlapping_puts_never_exceed_the_budget():
    store = MemoryStore(HUGE.page_bytes)
    first, second = new_keys(2, HUGE)
    statuses = {}

    async def put_one(key: PageKey) -> None:
        [statuses[key]] = await put(store, key)
        assert store.num_bytes <= HUGE.page_bytes

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(put_one, first)
        tasks.start_soon(put_one, second)
    assert sorted(status.name for status in statuses.values()) == ["HIT", "REJECTED"]
    assert store.num_bytes == HUGE.page_bytes


async def test_the_same_page_put_twice_at_once_is_counted_once():
    store = MemoryStore(2 * HUGE.page_bytes)
    [key] = new_keys(1, HUGE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(put, store, key)
        tasks.start_soon(put, store, key)
    assert (store.num_bytes, store.num_pages) == (HUGE.page_bytes, 1)


async def test_a_cancelled_put_gives_its_room_back():
    store = MemoryStore(HUGE.page_bytes)
    [key] = new_keys(1, HUGE)
    task = asyncio.create_task(put(store, key))
    while not store.num_bytes:
        await anyio.lowlevel.checkpoint()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (store.num_bytes, store.num_pages) == (0, 0)


async def test_closing_under_a_put_keeps_nothing():
    store = MemoryStore(HUGE.page_bytes)
    [key] = new_keys(1, HUGE)
    task = asyncio.create_task(put(store, key))
    while not store.num_bytes:
        await anyio.lowlevel.checkpoint()
    await store.aclose()
    assert await task == [Status.UNAVAILABLE]
    assert (store.num_bytes, store.num_pages) == (0, 0)


async def test_a_page_that_is_evicted_while_it_is_read_is_read_whole():
    store = MemoryStore(HUGE.page_bytes)
    first, second = new_keys(2, HUGE)
    await put(store, first)
    target = new_target(first)
    task = asyncio.create_task(store.get_into([first], [target]))
    await anyio.lowlevel.checkpoint()
    await anyio.lowlevel.checkpoint()
    await put(store, second)
    assert await task == [Status.HIT]
    assert target[0] == content(first)
