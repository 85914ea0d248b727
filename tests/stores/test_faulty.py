"""FaultyStore and GateStore do to a store what a test says, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from asyncache.stores import MemoryStore, Status
from asyncache.testing import (
    FailPoint,
    Fault,
    FaultyStore,
    GateStore,
    check_store,
    fail_nth,
)
from asyncache.testing._samples import content, new_keys, new_source, new_target, views

ROOM = 16 * 2**20
HIT, MISS, CORRUPT = Status.HIT, Status.MISS, Status.CORRUPT
UNAVAILABLE, REJECTED = Status.UNAVAILABLE, Status.REJECTED


@pytest.mark.parametrize(
    ("fault", "put", "found", "read", "stored"),
    [
        (Fault.MISSING, HIT, False, MISS, True),
        (Fault.LOST, HIT, True, MISS, False),
        (Fault.CORRUPT, HIT, True, CORRUPT, False),
        (Fault.TORN, HIT, True, CORRUPT, False),
        (Fault.UNAVAILABLE, UNAVAILABLE, False, UNAVAILABLE, False),
        (Fault.REJECTED, REJECTED, False, MISS, False),
        (Fault.UNREPORTED, UNAVAILABLE, True, HIT, True),
    ],
)
async def test_a_fault_hits_the_chosen_page_and_no_other(
    fault, put, found, read, stored
):
    inner = MemoryStore(ROOM)
    good, bad = keys = new_keys(2)
    store = FaultyStore(inner, fault, keys=[bad])
    targets = [new_target(key) for key in keys]
    assert await store.put(keys, [new_source(key) for key in keys]) == [HIT, put]
    assert await store.contains(keys) == [True, found]
    assert await store.get_into(keys, targets) == [HIT, read]
    assert targets[0][0] == content(good)
    assert (targets[1][0] == content(bad)) == (read is HIT)
    assert await inner.contains(keys) == [True, stored]


async def test_a_torn_read_leaves_half_a_page():
    [key] = new_keys(1)
    store = FaultyStore(MemoryStore(ROOM), Fault.TORN)
    await store.put([key], [new_source(key)])
    half = key.space.page_bytes // 2
    memory = bytearray(key.space.page_bytes)
    target = views(memory, [half, half])
    assert await store.get_into([key], [target]) == [CORRUPT]
    assert memory[:half] == content(key)[:half]
    assert memory[half:] != content(key)[half:]


async def test_a_store_in_breach_raises_for_the_chosen_page_only():
    good, bad = new_keys(2)
    store = FaultyStore(MemoryStore(ROOM), Fault.RAISES, keys=[bad])
    await store.put([good], [new_source(good)])
    for call in (
        store.contains([bad]),
        store.get_into([bad], [new_target(bad)]),
        store.put([bad], [new_source(bad)]),
    ):
        with pytest.raises(OSError, match="injected"):
            await call


async def test_each_call_can_be_the_one_that_fails():
    answers = []

    @asynccontextmanager
    async def fresh(point: FailPoint) -> AsyncIterator[FaultyStore]:
        async with FaultyStore(
            MemoryStore(ROOM), Fault.UNAVAILABLE, point=point
        ) as store:
            yield store

    async def scenario(store: FaultyStore) -> None:
        [key] = new_keys(1)
        answers.append(
            [
                *await store.put([key], [new_source(key)]),
                *await store.contains([key]),
                *await store.get_into([key], [new_target(key)]),
            ]
        )

    async def check(store: FaultyStore) -> None:
        await store.remove(new_keys(1))

    assert await fail_nth(scenario, fresh=fresh, check=check) == 3
    assert answers == [
        [UNAVAILABLE, False, MISS],
        [HIT, False, HIT],
        [HIT, True, UNAVAILABLE],
        [HIT, True, HIT],
    ]


async def test_a_fault_may_begin_and_end():
    [key] = new_keys(1)
    store = FaultyStore(MemoryStore(ROOM))
    await store.put([key], [new_source(key)])
    store.fault = Fault.MISSING
    assert await store.contains([key]) == [False]
    store.fault = None
    assert await store.contains([key]) == [True]
    assert repr(store) == f"<FaultyStore None of {store._inner!r}>"


async def test_without_faults_and_with_open_gates_the_contract_holds():
    await check_store(lambda: FaultyStore(MemoryStore(ROOM)))
    await check_store(lambda: GateStore(MemoryStore(ROOM), is_open=True))


async def test_a_broken_store_fails_the_check_and_the_law_is_named():
    with pytest.raises(AssertionError, match="put: expected") as caught:
        await check_store(lambda: FaultyStore(MemoryStore(ROOM), Fault.REJECTED))
    [note] = caught.value.__notes__
    assert "breaks the law: what_is_put_is_read" in note


async def test_a_store_that_takes_any_length_fails_the_check():
    class Careless(FaultyStore):
        async def put(self, keys, sources):
            try:
                return await super().put(keys, sources)
            except ValueError:
                return [REJECTED] * len(keys)

    with pytest.raises(AssertionError, match="expected ValueError, got the answer"):
        await check_store(lambda: Careless(MemoryStore(ROOM)))


async def test_each_method_waits_at_its_own_gate():
    [key] = new_keys(1)
    inner = MemoryStore(ROOM)
    store = GateStore(inner)
    answers = {}

    async def call(name: str, coroutine) -> None:
        answers[name] = await coroutine

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, "put", store.put([key], [new_source(key)]))
        await store.put_gate.wait_arrived()
        assert inner.num_pages == 0
        store.put_gate.open()
    assert inner.num_pages == 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, "get", store.get_into([key], [new_target(key)]))
        tasks.start_soon(call, "contains", store.contains([key]))
        await store.get_gate.wait_arrived()
        await store.contains_gate.wait_arrived()
        store.get_gate.open()
        store.contains_gate.open()
    assert answers == {"put": [HIT], "get": [HIT], "contains": [True]}
    assert "put=<Gate open" in repr(store)


async def test_a_call_that_is_cancelled_at_its_gate_never_reaches_the_store():
    [key] = new_keys(1)
    inner = MemoryStore(ROOM)
    store = GateStore(inner)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.put, [key], [new_source(key)])
        await store.put_gate.wait_arrived()
        tasks.cancel_scope.cancel()
    store.put_gate.open()
    assert inner.num_pages == 0
