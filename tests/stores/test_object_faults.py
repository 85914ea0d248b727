"""ObjectStore where its server dies, hangs, lies, is full or answers with delay."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest
from anyio import wait_all_tasks_blocked

from asyncache.stores import Status
from asyncache.testing._cancel import Cancellation
from asyncache.testing._samples import (
    LARGE_SPACE,
    content,
    fill,
    new_keys,
    new_source,
    new_target,
)
from tests.servers import free_port
from tests.stores import server_laws
from tests.stores.object_server import running, store_at
from tests.stores.proxy import Proxy
from tests.stores.server_laws import (
    GRACE_S,
    PATTERN,
    cancel,
    expect_untouched,
    returns,
)
from tests.stores.test_object import BIG, get, names, put

HIT, MISS, CORRUPT = Status.HIT, Status.MISS, Status.CORRUPT
UNAVAILABLE, REJECTED = Status.UNAVAILABLE, Status.REJECTED


@pytest.fixture
def server(object_server):
    return object_server


@pytest.fixture
async def proxy(server):
    async with Proxy(server) as made:
        yield made


def answer(code: int, body: str = "") -> bytes:
    head = f"HTTP/1.1 {code} Because\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n{body}".encode()


TROUBLE = {
    "500": answer(500),
    "503": answer(503, "<Error><Code>SlowDown</Code></Error>"),
    "429": answer(429),
    "403": answer(403, "<Error><Code>RequestTimeTooSkewed</Code></Error>"),
    "400": answer(400),
    "elsewhere": b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
    "nothing": b"",
    "noise": b"\x00\xff" * 50,
    "redis": b"-ERR unknown command\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
}


@pytest.mark.parametrize("trouble", TROUBLE)
async def test_trouble_is_no_answer_and_not_a_miss(proxy, trouble):
    small, _ = keys = [*new_keys(1), *new_keys(1, BIG)]
    async with store_at(proxy.url) as store:
        assert await put(store, *keys) == [HIT] * 2
        proxy.answer = lambda data: TROUBLE[trouble]
        for layers in (None, range(1, 3)):
            assert await get(store, *keys, layers=layers) == [UNAVAILABLE] * 2
        store._catalog.forget(small)
        assert await get(store, small) == [UNAVAILABLE]
        assert await store.contains(keys) == [False] * 2
        fresh = [*new_keys(2), *new_keys(1, BIG)]
        assert await put(store, *fresh) == [UNAVAILABLE] * 3
        await store.remove(fresh)
        other = store_at(proxy.url)
        if trouble != "403":
            await other.open()
        proxy.calm()
        async with other:
            assert await get(store, *keys) == [HIT] * 2
            assert await get(other, *keys) == [HIT] * 2


@pytest.mark.parametrize("layers", [None, range(1)], ids=str)
async def test_packs_that_cannot_be_read_now_stay_pointed_at(proxy, layers):
    keys = new_keys(3)
    async with store_at(proxy.url) as store:
        await put(store, *keys)
        for _ in range(2):  # with pointers that are remembered, and without
            proxy.answer = lambda d: TROUBLE["503"] if b"/packs/" in d[:99] else None
            assert await get(store, *keys, layers=layers) == [UNAVAILABLE] * 3
            proxy.calm()
            assert await store.contains(keys) == [True] * 3
            assert await get(store, *keys, layers=layers) == [HIT] * 3
            for key in keys:
                store._catalog.forget(key)


FULL = {
    "507": answer(507),
    "413": answer(413),
    "code": answer(400, "<Error><Code>EntityTooLarge</Code></Error>"),
    "quota": answer(403, "<Error><Code>QuotaExceeded</Code></Error>"),
}


@pytest.mark.parametrize("full", FULL)
async def test_a_bucket_that_is_full_rejects_and_recovers(proxy, full):
    keys = [*new_keys(3), *new_keys(1, BIG)]
    async with store_at(proxy.url) as store:
        there = new_keys(1)
        await put(store, *there)
        proxy.answer = lambda d: FULL[full] if d.startswith(b"PUT") else None
        # What is there is not refused.
        assert await put(store, *there, *keys) == [HIT] + [REJECTED] * 4
        assert await get(store, *keys) == [MISS] * 4
        proxy.calm()
        assert await put(store, *keys) == [HIT] * 4
        assert await get(store, *keys) == [HIT] * 4


@pytest.mark.parametrize(
    ("reply", "expected", "num_packs"),
    # What was answered so has not been done; what was not may have been.
    [(FULL["507"], REJECTED, 0), (TROUBLE["500"], UNAVAILABLE, 1)],
    ids=["507", "500"],
)
async def test_a_pack_that_nobody_can_point_at_is_deleted(
    proxy, reply, expected, num_packs
):
    keys = new_keys(3)
    async with store_at(proxy.url, f"pointers-{expected.name}") as store:
        proxy.answer = lambda d: reply if b".at HTTP" in d and b"PUT" in d else None
        assert await put(store, *keys) == [expected] * 3
        proxy.calm()
        assert len(await names(store, "packs/")) == num_packs
        assert await get(store, *keys) == [MISS] * 3
        assert await put(store, *keys) == [HIT] * 3
        assert await get(store, *keys) == [HIT] * 3


async def test_a_pack_that_was_not_stored_is_not_pointed_at(proxy):
    keys = new_keys(3)
    async with store_at(proxy.url, "no-packs") as store:
        proxy.answer = lambda d: TROUBLE["500"] if b"/packs/" in d[:99] else None
        assert await put(store, *keys) == [UNAVAILABLE] * 3
        proxy.calm()
        assert await names(store) == []
        assert await put(store, *keys) == [HIT] * 3
        assert await get(store, *keys) == [HIT] * 3


@pytest.mark.parametrize("layers", [None, range(1, 3)], ids=str)
async def test_a_connection_cut_at_any_byte_costs_what_was_not_read(proxy, layers):
    keys = new_keys(3, LARGE_SPACE)
    async with store_at(proxy.url, num_requests=1) as store:
        for key in keys:  # in packs of their own
            await put(store, key)
        nums_good = []
        for left in [0, 1, 100, 700, 90_000, 132_000, 200_000, 270_000, 350_000]:
            proxy.left = left
            targets = [new_target(key, layers) for key in keys]
            statuses = await store.get_into(keys, targets, layers)
            nums_good.append(statuses.count(HIT))
            assert statuses.count(UNAVAILABLE) == 3 - nums_good[-1]
            start = 0 if layers is None else layers.start * LARGE_SPACE.layer_bytes
            for key, [target], status in zip(keys, targets, statuses, strict=True):
                if status is HIT:
                    assert target == content(key)[start : start + len(target)]
            fill(targets, PATTERN)
            proxy.calm()
            assert await get(store, *keys, layers=layers) == [HIT] * 3
            expect_untouched(targets)
        assert nums_good[0] == 0
        assert nums_good == sorted(nums_good)
        assert max(nums_good) >= 2


async def test_a_put_that_is_cut_at_any_byte_leaves_pages_whole_or_absent(proxy):
    async with store_at(proxy.url, num_requests=1) as store:
        for left in [0, 1, 400, 900, 1500, 3000, 90_000, 260_000, 265_000, 300_000]:
            keys = new_keys(2, LARGE_SPACE)
            proxy.left_up = left
            statuses = await put(store, *keys)
            proxy.calm()
            found = await get(store, *keys)
            assert set(statuses) <= {HIT, UNAVAILABLE}
            for said, status in zip(statuses, found, strict=True):
                assert status is HIT or (status is MISS and said is UNAVAILABLE)


async def test_an_answer_that_comes_byte_by_byte_ends_with_the_time(proxy):
    await server_laws.an_answer_that_comes_byte_by_byte_ends_with_the_time(
        store_at(proxy.url, timeout_s=60), store_at(proxy.url, timeout_s=0.5), proxy
    )


async def test_a_server_that_is_paused_is_unavailable_in_time_and_close_is_quick(
    server,
):
    keys = [*new_keys(30, LARGE_SPACE), *new_keys(2, BIG)]
    fresh = [*new_keys(30, LARGE_SPACE), *new_keys(2, BIG)]
    async with store_at(server.url) as store:
        await put(store, *keys)
    async with store_at(server.url, timeout_s=0.5) as store:
        with server.paused():
            targets = [new_target(key) for key in keys]
            sources = [new_source(key) for key in fresh]
            with anyio.fail_after(GRACE_S):
                assert await store.get_into(keys, targets) == [UNAVAILABLE] * 32
                assert await store.contains(keys) == [False] * 32
                assert await store.put(fresh, sources) == [UNAVAILABLE] * 32
                async with anyio.create_task_group() as tasks:
                    for _ in range(100):
                        tasks.start_soon(store.contains, keys)
            fill([*targets, *sources], PATTERN)
        await returns(store, *new_keys(2))
        # What the server does late is whole, whatever is in the sources by now.
        async with store_at(server.url) as patient:
            assert set(await get(patient, *fresh)) <= {HIT, MISS}
        expect_untouched([*targets, *sources])
    with server.paused():
        closing = store_at(server.url)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(closing.open)
            await wait_all_tasks_blocked()
            with anyio.fail_after(GRACE_S):
                await closing.aclose()


async def test_closing_under_a_paused_call_ends_it(server):
    keys, fresh = new_keys(8, LARGE_SPACE), new_keys(8, LARGE_SPACE)
    store = store_at(server.url)
    await store.open()
    await put(store, *keys)
    answers = []

    async def read() -> None:
        answers.extend(await get(store, *keys))

    async def write() -> None:
        answers.extend(await put(store, *fresh))

    with server.paused():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(write)
            await wait_all_tasks_blocked()
            with anyio.fail_after(GRACE_S):
                await store.aclose()
    assert answers == [UNAVAILABLE] * 16


@pytest.mark.parametrize("how", Cancellation)
@pytest.mark.parametrize("left", [0, 100, 130_000, 400_000])
async def test_a_read_that_is_cancelled_under_a_held_answer_lets_go(proxy, how, left):
    async with store_at(proxy.url) as store:
        await server_laws.a_read_that_is_cancelled_under_a_held_answer_lets_go(
            store, proxy, left, how
        )


@pytest.mark.parametrize("how", Cancellation)
async def test_a_put_that_is_cancelled_under_a_stuck_server_lets_go(server, how):
    keys = new_keys(2, BIG)
    sources = [new_source(key) for key in keys]
    async with store_at(server.url) as store:
        bucket, begun = store._catalog.bucket, anyio.Event()
        make = bucket.make

        async def make_slowly(path, data):
            begun.set()
            return await make(path, data)

        bucket.make = make_slowly
        with server.paused():
            bucket.has = lambda *_: asyncio.sleep(0, MISS)
            scope = anyio.CancelScope()

            async def write() -> None:
                with scope:
                    await store.put(keys, sources)

            task = asyncio.ensure_future(write())
            await begun.wait()
            await wait_all_tasks_blocked()
            await cancel(task, scope, how)
            with anyio.fail_after(GRACE_S):
                await asyncio.wait([task])
            fill(sources, PATTERN)
        del bucket.has, bucket.make
        assert set(await get(store, *keys)) <= {HIT, MISS}
        expect_untouched(sources)


@pytest.mark.parametrize("how", Cancellation)
async def test_calls_through_a_proxy_may_be_cancelled_at_any_turn(proxy, how):
    spaces = [*[LARGE_SPACE] * 3, BIG]
    async with store_at(proxy.url) as store:
        await server_laws.calls_may_be_cancelled_at_any_turn(store, spaces, how)


async def test_a_server_that_dies_is_unavailable_and_its_pages_outlive_it():
    keys = [*new_keys(4, LARGE_SPACE), *new_keys(1, BIG)]
    with running() as server:
        server.kill()
        async with store_at(server.url, num_requests=3) as store:
            assert await get(store, *keys) == [UNAVAILABLE] * 5
            await anyio.to_thread.run_sync(server.start)
            await returns(store, *keys)
            # In the middle of reads and of writes.
            fresh, statuses = new_keys(12, BIG), []
            bucket, begun = store._catalog.bucket, anyio.Event()
            make = bucket.make

            async def note_and_make(path, data):
                made = await make(path, data)
                begun.set()
                return made

            bucket.make = note_and_make

            async def write() -> None:
                statuses.extend(await put(store, *fresh))

            async def read() -> None:
                with anyio.fail_after(60):
                    while UNAVAILABLE not in await get(store, *keys):
                        pass

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write)
                tasks.start_soon(read)
                await begun.wait()
                server.kill()
            assert UNAVAILABLE in statuses
            assert await get(store, *keys) == [UNAVAILABLE] * 5
            assert await store.contains(keys) == [False] * 5
            await anyio.to_thread.run_sync(server.start)
            await returns(store, *keys)
            found = await get(store, *fresh)
            assert set(found) <= {HIT, MISS}
            for said, status in zip(statuses, found, strict=True):
                assert said is not HIT or status is HIT


async def test_a_cache_serves_on_while_its_server_dies_and_hits_return():
    with running() as server:
        await server_laws.a_cache_serves_on_while_its_server_dies_and_hits_return(
            store_at(server.url), server, num_deaths=1
        )


async def test_an_address_that_never_answers_ends_with_the_time():
    keys = new_keys(2)
    async with store_at(f"http://127.0.0.1:{free_port()}") as store:
        assert await get(store, *keys) == [UNAVAILABLE] * 2  # refused at once

    async def be_silent(reader, writer) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(be_silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    with anyio.fail_after(GRACE_S):
        async with store_at(url, timeout_s=0.3) as store:
            assert await get(store, *keys) == [UNAVAILABLE] * 2
        closing = store_at(url)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(closing.open)
            await wait_all_tasks_blocked()
            await closing.aclose()
    silent.close()
    await silent.wait_closed()
