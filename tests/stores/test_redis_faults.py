"""RedisStore where its server dies, hangs, lies or answers with delay."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import anyio
import anyio.lowlevel
import pytest
from anyio import wait_all_tasks_blocked

from asyncache.stores import RedisStore, Status
from asyncache.testing._cancel import Cancellation
from asyncache.testing._samples import (
    LARGE_SPACE,
    SPACE,
    content,
    fill,
    new_keys,
    new_target,
)
from tests.stores import server_laws
from tests.stores.proxy import Proxy
from tests.stores.redis_server import running
from tests.stores.server_laws import GRACE_S, PATTERN, expect_untouched, returns
from tests.stores.test_redis import get, put

HIT, MISS, CORRUPT = Status.HIT, Status.MISS, Status.CORRUPT
UNAVAILABLE, REJECTED = Status.UNAVAILABLE, Status.REJECTED


@pytest.fixture(scope="module")
def server():
    with running() as started:
        yield started


@pytest.fixture
async def proxy(server):
    async with Proxy(server) as made:
        yield made


@pytest.mark.parametrize("layers", [None, range(1, 3)], ids=str)
async def test_a_connection_cut_at_any_byte_costs_no_more_than_what_was_not_read(
    proxy, layers
):
    keys = new_keys(3)
    async with RedisStore(proxy.url, timeout_s=60) as store:
        await put(store, *keys)
        nums_good = []
        # A reply is no shorter than this, whole or in parts.
        shortest = 2 * SPACE.layer_bytes + 128
        cuts = [0, 1, 4, 5, 6, 7, 133, 134, 135, 136, *range(140, 3 * shortest, 157)]
        for left in cuts:
            proxy.left = left
            targets = [new_target(key, layers) for key in keys]
            statuses = await store.get_into(keys, targets, layers)
            num_good = statuses.count(HIT)
            nums_good.append(num_good)
            assert statuses == [HIT] * num_good + [UNAVAILABLE] * (3 - num_good)
            start = 0 if layers is None else layers.start * SPACE.layer_bytes
            for key, [target] in list(zip(keys, targets, strict=True))[:num_good]:
                assert target == content(key)[start : start + len(target)]
            fill(targets, PATTERN)
            proxy.calm()
            assert await get(store, *keys, layers=layers) == [HIT] * 3
            expect_untouched(targets)
        assert nums_good[0] == 0
        assert nums_good == sorted(nums_good)
        assert max(nums_good) in {1, 2}


async def test_a_put_that_is_cut_at_any_byte_leaves_a_page_whole_or_absent(proxy):
    async with RedisStore(proxy.url, timeout_s=60) as store:
        for left in [0, 1, 60, 130, 131, 200, 230, 380, 900, 1010, 1020, 1700]:
            keys = new_keys(2)
            proxy.left_up = left
            statuses = await put(store, *keys)
            proxy.calm()
            found = await get(store, *keys)
            assert set(statuses) <= {HIT, UNAVAILABLE}
            for said, status in zip(statuses, found, strict=True):
                assert status is HIT or (status is MISS and said is UNAVAILABLE)


def lies() -> dict[str, Callable[[bytes], bytes]]:
    dice = Random(7)
    return {
        "noise": lambda data: dice.randbytes(len(data)),
        "no end": lambda data: b"+" + b"x" * 100_000,
        "http": lambda data: b"HTTP/1.1 400 Bad Request\r\n\r\n",
        "negative": lambda data: b"$-7\r\n",
        "huge": lambda data: b"$99999999999999999999\r\n",
        "words": lambda data: b"$one\r\n",
        "number": lambda data: b":12345\r\n" * 9,
        "ok": lambda data: b"+WHAT\r\n" * 9,
        "array": lambda data: b"*1\r\n" * 20,
        "short": lambda data: b"$3\r\nabcdefghi\r\n" * 9,
        "nothing": lambda data: b"\r\n\r\n",
    }


@pytest.mark.parametrize("lie", lies())
async def test_garbage_is_no_exception_and_no_hang(proxy, lie):
    keys = new_keys(3)
    # Noise may have no end of a line in it: that is waited for, as long as may be.
    async with RedisStore(proxy.url, timeout_s=0.5) as store:
        await returns(store, *keys)
        proxy.spoil = lies()[lie]
        for layers in (None, range(1, 3)):
            statuses = await get(store, *keys, layers=layers)
            assert set(statuses) <= {UNAVAILABLE, CORRUPT}
        assert await store.contains(keys) == [False] * 3
        assert await put(store, *new_keys(2)) == [UNAVAILABLE] * 2
        await store.remove(new_keys(2))
        proxy.calm()
        await returns(store, *keys)


@pytest.mark.parametrize(
    "error",
    [
        "LOADING Valkey is loading the dataset in memory",
        "READONLY You can't write against a read only replica.",
        "MASTERDOWN Link with MASTER is down",
        "CLUSTERDOWN Hash slot not served",
        "NOAUTH Authentication required.",
        "NOPERM this user has no permissions",
        "MISCONF Errors writing to the RDB file",
        "BUSY running a script",
        "ERR unknown command",
    ],
    ids=lambda error: error.split()[0],
)
async def test_an_error_is_no_answer_and_not_a_miss(proxy, error):
    keys = new_keys(2)
    reply = f"-{error}\r\n".encode()
    async with RedisStore(proxy.url, timeout_s=60) as store:
        await put(store, *keys)
        proxy.spoil = lambda data: reply * 2
        assert await get(store, *keys) == [UNAVAILABLE] * 2
        proxy.spoil = lambda data: reply * 4
        assert await get(store, *keys, layers=range(1)) == [UNAVAILABLE] * 2
        proxy.spoil = lambda data: reply * 2
        assert await store.contains(keys) == [False] * 2
        assert await put(store, *new_keys(2)) == [UNAVAILABLE] * 2
        await store.remove(new_keys(2))
        proxy.calm()
        assert await get(store, *keys) == [HIT] * 2


async def test_a_server_that_lies_at_open_is_no_error(proxy):
    for lie in lies().values():
        proxy.spoil = lie
        async with RedisStore(proxy.url, timeout_s=0.5) as store:
            proxy.calm()
            await returns(store, *new_keys(1))


async def test_an_answer_that_comes_byte_by_byte_ends_with_the_time(proxy):
    await server_laws.an_answer_that_comes_byte_by_byte_ends_with_the_time(
        RedisStore(proxy.url, timeout_s=60), RedisStore(proxy.url, timeout_s=0.3), proxy
    )


async def test_a_server_that_is_paused_is_unavailable_in_time_and_close_is_quick(
    server,
):
    keys = new_keys(64, LARGE_SPACE)
    async with RedisStore(server.url, timeout_s=60) as store:
        await put(store, *keys)
    async with RedisStore(server.url, timeout_s=0.2) as store:
        with server.paused():
            targets = [new_target(key) for key in keys]
            with anyio.fail_after(GRACE_S):
                assert await store.get_into(keys, targets) == [UNAVAILABLE] * 64
                assert await store.contains(keys) == [False] * 64
                assert await put(store, *new_keys(64)) == [UNAVAILABLE] * 64
                async with anyio.create_task_group() as tasks:
                    for _ in range(200):
                        tasks.start_soon(store.contains, keys)
            fill(targets, PATTERN)
        await returns(store, *new_keys(2))
        expect_untouched(targets)
    for _ in range(2):
        with server.paused():
            closing = RedisStore(server.url, timeout_s=60)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(closing.open)
                await wait_all_tasks_blocked()
                with anyio.fail_after(GRACE_S):
                    await closing.aclose()


async def test_closing_under_a_paused_read_ends_it(server):
    keys = new_keys(8, LARGE_SPACE)
    store = RedisStore(server.url, timeout_s=60)
    await store.open()
    await put(store, *keys)
    answers = []

    async def read() -> None:
        answers.extend(await get(store, *keys))

    with server.paused():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await wait_all_tasks_blocked()
            with anyio.fail_after(GRACE_S):
                await store.aclose()
    assert answers == [UNAVAILABLE] * 8


@pytest.mark.parametrize("how", Cancellation)
@pytest.mark.parametrize("left", [0, 3, 700, 130_000, 400_000])
async def test_a_read_that_is_cancelled_under_a_held_answer_lets_go(proxy, how, left):
    async with RedisStore(proxy.url, timeout_s=60) as store:
        await server_laws.a_read_that_is_cancelled_under_a_held_answer_lets_go(
            store, proxy, left, how
        )


@pytest.mark.parametrize("how", Cancellation)
async def test_calls_through_a_proxy_may_be_cancelled_at_any_turn(proxy, how):
    async with RedisStore(proxy.url, timeout_s=60) as store:
        spaces = [LARGE_SPACE] * 3
        await server_laws.calls_may_be_cancelled_at_any_turn(store, spaces, how)


async def test_a_server_that_comes_late_is_used_and_a_restarted_one_again():
    keys = new_keys(2)
    with running() as server:
        server.kill()
        async with RedisStore(server.url, timeout_s=60) as store:
            assert await get(store, *keys) == [UNAVAILABLE] * 2
            for _ in range(3):
                await anyio.to_thread.run_sync(server.start)
                assert await put(store, *keys) == [HIT] * 2
                assert await get(store, *keys) == [HIT] * 2
                server.kill()
                assert await get(store, *keys) == [UNAVAILABLE] * 2
            await anyio.to_thread.run_sync(server.start)
            assert await get(store, *keys) == [MISS] * 2
            # A restart that nobody saw costs nothing but what the server has lost.
            assert await put(store, *keys) == [HIT] * 2
            server.kill()
            await anyio.to_thread.run_sync(server.start)
            assert await get(store, *keys) == [MISS] * 2


async def test_a_cache_serves_on_while_its_server_dies_and_hits_return():
    with running() as server:
        await server_laws.a_cache_serves_on_while_its_server_dies_and_hits_return(
            RedisStore(server.url, timeout_s=60), server
        )


async def test_an_address_that_never_answers_ends_with_the_time():
    import socket

    # A listener that accepts nobody, with its queue full: what comes waits.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        port = silent.getsockname()[1]
        waiting = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            waiting.append(one)
        with anyio.fail_after(GRACE_S):
            async with RedisStore(f"redis://127.0.0.1:{port}", timeout_s=0.3) as store:
                assert await get(store, *new_keys(2)) == [UNAVAILABLE] * 2
            closing = RedisStore(f"redis://127.0.0.1:{port}", timeout_s=60)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(closing.open)
                await wait_all_tasks_blocked()
                await closing.aclose()
        for one in waiting:
            one.close()


async def test_a_server_that_moves_elsewhere_is_asked_where(proxy, server):
    keys = new_keys(1)
    async with RedisStore(proxy.url, timeout_s=60) as store:
        await put(store, *keys)
        proxy.spoil = lambda data: f"-MOVED 1 127.0.0.1:{server.port}\r\n".encode()
        assert await get(store, *keys) == [UNAVAILABLE]
        slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n"
        proxy.spoil = lambda data: b":0\r\n" + slots % server.port
        assert await get(store, *keys) == [HIT]
