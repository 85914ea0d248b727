"""RedisStore on a real server: the contract, what it says when it cannot, statuses."""

from __future__ import annotations

import ssl
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import anyio
import pytest

from asyncache.core import (
    ClosedError,
    OrderError,
    PageHash,
    PageKey,
    PageSpace,
    StoreError,
)
from asyncache.stores import RedisStore as Bare, Status
from asyncache.testing import CancelStyle, check_store
from asyncache.testing._samples import (
    LARGE_SPACE,
    SPACE,
    content,
    new_keys,
    new_source,
    new_target,
    one_a_layer,
    views,
)
from tests.servers import free_port
from tests.stores import server_laws
from tests.stores.proxy import Proxy
from tests.stores.redis_server import running

HIT, MISS, CORRUPT = Status.HIT, Status.MISS, Status.CORRUPT
UNAVAILABLE, REJECTED = Status.UNAVAILABLE, Status.REJECTED
MANY_LAYERS = PageSpace("kv", "all", "uint8", (1500, 1, 1, 1, 8))
# 1 MiB a page: a few of them make more than one job.
BIG = PageSpace("kv", "all", "uint8", (4, 2, 16, 32, 256))


@pytest.fixture(scope="module")
def server():
    with running() as started:
        yield started


@pytest.fixture
def full_server():
    """A server that keeps little, and says so: 3 MB of its 4 are its own."""
    with running("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as started:
        yield started


# Nothing here is about time, and the machine may be busy.
RedisStore = partial(Bare, timeout_s=60.0)


async def put(store: Bare, *keys: PageKey) -> list[Status]:
    return await store.put(keys, [new_source(key) for key in keys])


async def get(store: Bare, *keys: PageKey, layers: range | None = None) -> list[Status]:
    """Read pages, and check the bytes of those that are hits."""
    targets = [new_target(key, layers) for key in keys]
    statuses = await store.get_into(keys, targets, layers)
    for key, status, [target] in zip(keys, statuses, targets, strict=True):
        start = 0 if layers is None else layers.start * key.space.layer_bytes
        if status is HIT:
            assert target == content(key)[start : start + len(target)]
    return statuses


def name(key: PageKey, prefix: str = "asyncache") -> str:
    return f"{prefix}:{key.space.name}:{key.hash.hex()}"


async def test_it_keeps_the_contract_on_tcp(server):
    await check_store(lambda: RedisStore(server.url))


async def test_it_keeps_the_contract_on_a_unix_socket(server):
    await check_store(lambda: RedisStore(server.unix_url, num_connections=1))


async def test_it_keeps_the_contract_with_a_password_and_a_database():
    with running(password="s3cret") as server:
        url = f"redis://:s3cret@127.0.0.1:{server.port}/3"
        await check_store(lambda: RedisStore(url, ttl_s=60))
        keys = new_keys(1)
        async with RedisStore(url) as store:
            await put(store, *keys)
        async with RedisStore(f"{url[:-1]}0") as store:
            assert await store.contains(keys) == [False]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", "key.pem", "-out", "cert.pem"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    except OSError as error:
        pytest.skip(f"no certificate can be made: {error}")
    return folder


@pytest.fixture
def tls(certificate):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    return context


async def test_pages_go_through_tls(server, tls, certificate):
    async with Proxy(server, tls) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}"
        known = f"{url}?ssl_ca_certs={certificate / 'cert.pem'}"
        keys = [*new_keys(4, LARGE_SPACE), *new_keys(4)]
        for each in (known, f"{url}?ssl_cert_reqs=none"):
            async with RedisStore(each) as store:
                assert await put(store, *keys) == [HIT] * 8
                assert await get(store, *keys) == [HIT] * 8
                assert await get(store, *keys, layers=range(1, 3)) == [HIT] * 8
                target = [memoryview(bytearray(SPACE.layer_bytes)) for _ in range(4)]
                assert await store.get_into(keys[-1:], [target]) == [HIT]
                assert b"".join(target) == content(keys[-1])
                await store.remove(keys)


async def test_a_server_that_is_another_is_not_talked_to(server, tls):
    async with Proxy(server, tls) as proxy:
        store = RedisStore(f"rediss://127.0.0.1:{proxy.port}")
        with pytest.raises(StoreError, match="is not who it should be"):
            await store.open()
        await store.aclose()


async def test_a_server_without_tls_is_no_hang(server):
    async with RedisStore(f"rediss://127.0.0.1:{server.port}", timeout_s=1) as store:
        assert await get(store, *new_keys(2)) == [UNAVAILABLE] * 2


async def test_tls_that_cannot_be_set_up_is_told(tmp_path):
    for option in (f"ssl_ca_certs={tmp_path / 'none.pem'}", "ssl_cert_reqs=perhaps"):
        store = RedisStore(f"rediss://127.0.0.1:1?{option}")
        with pytest.raises(StoreError, match=r"cannot set up TLS to 127\.0\.0\.1:1"):
            await store.open()
        await store.aclose()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://localhost", "cannot read the url: write redis://"),
        ("redis://localhost:pass/word@x", "cannot read the url"),
        ("redis://localhost/first", "the url's database is no number"),
        ("redis://localhost?db=first", "cannot read the url"),
        ("unix://", "the url has no path"),
        ("redis://localhost?ssl_ca_certs=x", "only rediss:// is TLS"),
        ("redis://localhost?socket_timeout=5", "unknown option, 'socket_timeout'"),
    ],
)
def test_a_url_that_is_none_is_told_without_its_password(url, said):
    with pytest.raises(StoreError, match=said) as caught:
        RedisStore(url)
    assert "pass" not in str(caught.value).replace("password@", "")


def test_an_argument_that_is_out_of_range_is_told():
    url = "redis://localhost"
    for prefix in ("", "a b", "a{b}", "ä", "x" * 129, "a\n"):
        with pytest.raises(ValueError, match="prefix must match"):
            RedisStore(url, prefix=prefix)
    for ttl_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"ttl_s must be in .* not {ttl_s}"):
            RedisStore(url, ttl_s=ttl_s)
    for timeout_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(
            ValueError, match=f"timeout_s must be in .* not {timeout_s}"
        ):
            RedisStore(url, timeout_s=timeout_s)
    with pytest.raises(ValueError, match="num_connections must be at least 1, not 0"):
        RedisStore(url, num_connections=0)


def test_without_the_extra_it_says_what_to_install():
    code = """
import sys
sys.modules["redis"] = sys.modules["redis.connection"] = None
import asyncache
try:
    asyncache.RedisStore("redis://localhost")
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "RedisStore needs redis-py: pip install 'asyncache[redis]'\n"


def test_redis_is_not_imported_before_it_is_used():
    code = (
        "import sys, asyncache; asyncache.RedisStore; assert 'redis' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0


async def refused(url: str) -> str:
    store = RedisStore(url)
    with pytest.raises(StoreError) as caught:
        await store.open()
    await store.aclose()
    return str(caught.value)


async def test_a_server_that_does_not_let_us_in_says_why_at_open(server):
    with running(password="s3cret") as guarded:
        where = f"127.0.0.1:{guarded.port}"
        wrong = f"{where} does not let us in: WRONGPASS"
        assert (await refused(f"redis://:wrong@{where}")).startswith(wrong)
        assert (await refused(f"redis://eve:s3cret@{where}")).startswith(wrong)
        assert "NOAUTH" in await refused(f"redis://{where}")
        guarded.ask("ACL", "SETUSER", "bob", "on", ">pw", "+get", "~*")
        guarded.ask("AUTH", "s3cret")
        with guarded._connected() as admin:
            admin.ask("ACL", "SETUSER", "bob", "on", ">pw", "+get", "~*")
        assert "NOPERM" in await refused(f"redis://bob:pw@{where}")
    assert "out of range" in await refused(f"{server.url}/9999")
    assert "AUTH" in await refused(f"redis://:pw@127.0.0.1:{server.port}")


async def test_a_user_needs_no_more_than_five_commands(server):
    rights = ["resetkeys", "~asyncache:*", "+get", "+getrange", "+set", "+exists"]
    server.ask("ACL", "SETUSER", "narrow", "on", ">pw", *rights, "+unlink")
    url = f"redis://narrow:pw@127.0.0.1:{server.port}"
    await check_store(lambda: RedisStore(url))
    assert "NOPERM" in await refused_prefix(url)


async def refused_prefix(url: str) -> str:
    store = RedisStore(url, prefix="other")
    with pytest.raises(StoreError) as caught:
        await store.open()
    await store.aclose()
    return str(caught.value)


async def test_nobody_there_is_no_error_at_open():
    keys = new_keys(2)
    async with RedisStore(f"redis://127.0.0.1:{free_port()}") as store:
        assert await store.contains(keys) == [False, False]
        assert await get(store, *keys) == [UNAVAILABLE] * 2
        assert await put(store, *keys) == [UNAVAILABLE] * 2
        await store.remove(keys)


async def test_a_store_that_is_not_open_says_so():
    store = RedisStore("redis://user:pw@localhost:1/2")
    assert repr(store) == "<RedisStore localhost:1 asyncache>"
    with pytest.raises(OrderError, match=r"is not open: await its open\(\) first"):
        await store.contains(new_keys(1))
    await store.aclose()
    with pytest.raises(ClosedError, match="the store is closed"):
        await store.open()


async def test_keys_are_named_as_others_may_expect(server):
    key = PageKey(PageHash(bytes(range(32))), SPACE)
    async with RedisStore(server.url, prefix="golden:v1") as store:
        await put(store, key)
    named = f"golden:v1:kv-0of1-uint8-4x2x4x2x8:{bytes(range(32)).hex()}"
    assert server.ask("STRLEN", named) == b":640\r\n"
    assert server.ask("TTL", named) == b":-1\r\n"
    server.ask("UNLINK", named)


async def test_a_time_to_live_is_the_server_s_to_keep(server):
    key, other = new_keys(2)
    async with RedisStore(server.url, ttl_s=1000) as store:
        assert await put(store, key) == [HIT]
        assert 0 < int(server.ask("PTTL", name(key))[1:-2]) <= 1_000_000
    async with RedisStore(server.url, ttl_s=0.001) as store:
        assert await put(store, other) == [HIT]
        with anyio.fail_after(5):
            while await get(store, other) != [MISS]:
                pass


async def test_prefixes_do_not_share(server):
    key = new_keys(1)[0]
    async with (
        RedisStore(server.url, prefix="a") as one,
        RedisStore(server.url, prefix="a:b") as other,
    ):
        await put(one, key)
        assert await other.contains([key]) == [False]


async def test_a_batch_larger_than_a_job_is_stored_and_read_whole(server):
    keys = [*new_keys(6, BIG), *new_keys(2), *new_keys(6, BIG)]
    async with RedisStore(server.url) as store:
        assert await put(store, *keys) == [HIT] * 14
        assert await get(store, *keys) == [HIT] * 14
        await store.remove(keys)


async def test_hundreds_of_keys_are_asked_for_at_once(server):
    keys = new_keys(5000)
    async with RedisStore(server.url) as store:
        await put(store, keys[0], keys[3000])
        found = await store.contains(keys)
    assert [index for index, is_there in enumerate(found) if is_there] == [0, 3000]


async def test_a_page_may_have_more_buffers_than_one_system_call_takes(server):
    [key] = new_keys(1, MANY_LAYERS)
    sizes = one_a_layer(MANY_LAYERS)
    memory = bytearray(MANY_LAYERS.page_bytes)
    async with RedisStore(server.url) as store:
        assert await store.put([key], [views(content(key), sizes)]) == [HIT]
        assert await store.get_into([key], [views(memory, sizes)]) == [HIT]
    assert memory == content(key)


FIRST, LAST = range(1), range(3, 4)


@pytest.mark.parametrize("layers", [None, FIRST, LAST], ids=str)
@pytest.mark.parametrize("at", [0, 20, 40, 100, 127, 128, 639])
async def test_a_page_that_rots_is_corrupt_and_removed(server, at, layers):
    key, other = new_keys(2)
    async with RedisStore(server.url) as store:
        await put(store, key, other)
        byte = server.ask("GETRANGE", name(key), str(at), str(at))[4:5]
        server.ask("SETRANGE", name(key), str(at), bytes([byte[0] ^ 1]))
        is_read = layers is None or at < 128 or layers is (FIRST if at < 256 else LAST)
        expected = CORRUPT if is_read else HIT
        assert await get(store, key, other, layers=layers) == [expected, HIT]
        assert await store.contains([key, other]) == [not is_read, True]
        assert await put(store, key) == [HIT]
        assert await get(store, key) == [HIT if is_read else CORRUPT]


@pytest.mark.parametrize("layers", [None, range(1, 4)], ids=str)
@pytest.mark.parametrize("size", [1, 127, 128, 200, 639, 641, 5000])
async def test_a_page_of_the_wrong_length_is_corrupt_and_removed(server, size, layers):
    key, other = new_keys(2)
    async with RedisStore(server.url) as store:
        await put(store, key, other)
        value = b"".join([*store._shelf(SPACE).set(key.hash, new_source(key))])
        value = value.partition(b"$640\r\n")[2]
        server.ask("SET", name(key), value[:640][:size].ljust(size, b"x"))
        expected = HIT if size > 640 and layers else CORRUPT
        assert await get(store, key, other, layers=layers) == [expected, HIT]
        assert await store.contains([key]) == [expected is HIT]


@pytest.mark.parametrize("layers", [None, range(1, 4)], ids=str)
async def test_another_page_s_bytes_and_other_kinds_of_values_are_corrupt(
    server, layers
):
    copied, listed, good = keys = new_keys(3)
    async with RedisStore(server.url) as store:
        await put(store, good)
        server.ask("COPY", name(good), name(copied))
        server.ask("RPUSH", name(listed), "1")
        statuses = await get(store, *keys, layers=layers)
        assert statuses == [CORRUPT, CORRUPT, HIT]
        assert await store.contains(keys) == [False, False, True]


async def test_a_full_server_rejects_what_has_no_room_and_recovers(full_server):
    keys = new_keys(64, LARGE_SPACE)
    async with RedisStore(full_server.url) as store:
        statuses = await put(store, *keys)
        assert set(statuses) == {HIT, REJECTED}
        there = [
            key for key, status in zip(keys, statuses, strict=True) if status is HIT
        ]
        assert await store.contains(keys) == [status is HIT for status in statuses]
        assert await get(store, *there) == [HIT] * len(there)
        # What is there is not refused.
        assert await put(store, there[0], *new_keys(1, LARGE_SPACE)) == [HIT, REJECTED]
        await store.remove(there)
        assert await put(store, keys[-1]) == [HIT]


async def test_a_server_that_evicts_takes_all_and_misses_some():
    with running("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru") as server:
        keys = new_keys(64, LARGE_SPACE)
        async with RedisStore(server.url) as store:
            for key in keys:
                assert await put(store, key) == [HIT]
            statuses = await get(store, *keys)
            assert set(statuses) == {HIT, MISS}
            assert statuses[-1] is HIT
            assert await store.contains(keys) == [s is HIT for s in statuses]


async def test_a_replica_serves_reads_and_keeps_nothing():
    with running() as primary, running() as replica:
        key, other = new_keys(2)
        async with RedisStore(primary.url) as store:
            await put(store, key)
        replica.ask("REPLICAOF", "127.0.0.1", str(primary.port))
        async with RedisStore(replica.url) as store:
            with anyio.fail_after(20):
                while await get(store, key) != [HIT]:
                    pass
            assert await put(store, key, other) == [HIT, UNAVAILABLE]
            await store.remove([key])
            assert await store.contains([key]) == [True]
            replica.ask("REPLICAOF", "NO", "ONE")
            assert await put(store, other) == [HIT]
            assert await get(store, key, other) == [HIT, HIT]


async def test_connections_and_threads_are_bounded_and_gone_after_close(server):
    threads, keys = threading.active_count(), new_keys(200)

    async def use(store: Bare, key: PageKey) -> None:
        assert await put(store, key) == [HIT]
        assert await get(store, key) == [HIT]
        assert await store.contains([key]) == [True]
        await store.remove([key])

    async with Proxy(server) as proxy, RedisStore(proxy.url) as store:
        async with anyio.create_task_group() as tasks:
            for key in keys:
                tasks.start_soon(use, store, key)
        assert proxy.num_accepted == proxy.num_most <= 6
        assert threading.active_count() - threads <= 6
    assert threading.active_count() == threads


@pytest.mark.parametrize("style", CancelStyle)
async def test_opening_may_be_cancelled_and_tried_again(server, style):
    await server_laws.opening_may_be_cancelled_and_tried_again(
        lambda: RedisStore(server.url), style
    )


OTHER_PROCESS = """
import asyncio, hashlib, sys
from asyncache.core import PageHash, PageKey, PageSpace
from asyncache.stores import RedisStore, Status

space = PageSpace("kv", "0of1", "uint8", (4, 2, 16, 16, 64))
keys = [PageKey(PageHash(number.to_bytes(32, "little")), space) for number in range(40)]

def content(key):
    return hashlib.shake_128(key.name.encode()).digest(space.page_bytes)

async def main():
    async with RedisStore(sys.argv[1], prefix="shared") as store:
        for key in keys[::int(sys.argv[2])]:
            [put] = await store.put([key], [[memoryview(content(key))]])
            target = memoryview(bytearray(space.page_bytes))
            [got] = await store.get_into([key], [[target]])
            assert put is got is Status.HIT and target == content(key), (put, got)

asyncio.run(main())
"""


def test_processes_share_their_pages(server):
    command = [sys.executable, "-c", OTHER_PROCESS, server.url]
    others = [
        subprocess.Popen([*command, step], cwd=Path(__file__).parents[2])
        for step in ("1", "-1")
    ]
    assert [other.wait(60) for other in others] == [0, 0]
    assert (
        server.ask(
            "EXISTS",
            *(
                f"shared:{LARGE_SPACE.name}:{number.to_bytes(32, 'little').hex()}"
                for number in range(40)
            ),
        )
        == b":40\r\n"
    )
