"""ObjectStore on a real server and in memory: the contract, packs, what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex

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
from asyncache.stores import (
    ObjectStore,
    Status,
    _object_catalog,
    _object_pages,
    _object_reads,
)
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
from asyncache.testing._store_tampering import check_tampering
from tests.servers import free_port
from tests.stores import server_laws
from tests.stores.object_server import (
    BUCKET,
    SECRETS,
    Objects,
    options,
    store_at,
)
from tests.stores.proxy import Proxy

obstore = pytest.importorskip("obstore", reason="obstore is not installed")
Memory, LocalStore = obstore.store.MemoryStore, obstore.store.LocalStore

HIT, MISS, CORRUPT = Status.HIT, Status.MISS, Status.CORRUPT
UNAVAILABLE, REJECTED = Status.UNAVAILABLE, Status.REJECTED
MANY_LAYERS = PageSpace("kv", "all", "uint8", (1500, 1, 1, 1, 8))
# 256 KiB a page, of which 15 fit into a pack.
MIDDLE = PageSpace("kv", "all", "uint8", (8, 2, 16, 4, 256))
# 2 MiB a page, an object each.
BIG = PageSpace("kv", "all", "uint8", (8, 2, 16, 32, 256))
ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(object_server):
    return object_server


@pytest.fixture(params=["in memory", "on a server"])
def make(request):
    """Return what makes stores that share what is behind them."""
    if request.param == "in memory":
        return partial(ObjectStore, Memory(), timeout_s=60.0)
    return partial(store_at, request.getfixturevalue("server").url, token_hex(8))


@pytest.fixture
def nothing_packed(monkeypatch):
    monkeypatch.setattr(_object_pages, "PACK_BYTES", 0)


@pytest.fixture
def one_a_pack(monkeypatch):
    monkeypatch.setattr(_object_pages.Shelf, "num_together", 1)


async def put(store: ObjectStore, *keys: PageKey) -> list[Status]:
    return await store.put(keys, [new_source(key) for key in keys])


async def get(
    store: ObjectStore, *keys: PageKey, layers: range | None = None
) -> list[Status]:
    """Read pages, and check the bytes of those that are hits."""
    targets = [new_target(key, layers) for key in keys]
    statuses = await store.get_into(keys, targets, layers)
    for key, status, [target] in zip(keys, statuses, targets, strict=True):
        start = 0 if layers is None else layers.start * key.space.layer_bytes
        if status is HIT:
            assert target == content(key)[start : start + len(target)]
    return statuses


async def names(store: ObjectStore, part: str = "") -> list[str]:
    return await anyio.to_thread.run_sync(list, Objects(store, part))


async def change(store: ObjectStore, name: str, item: bytes | None) -> None:
    """Write an object anew, or remove it, behind the store's back."""

    def change_now() -> None:
        objects = Objects(store)
        if item is None:
            del objects[name]
        else:
            objects[name] = item

    await anyio.to_thread.run_sync(change_now)


async def read(store: ObjectStore, name: str) -> bytes:
    return await anyio.to_thread.run_sync(Objects(store).__getitem__, name)


def name(key: PageKey, kind: str = "at") -> str:
    digits = key.hash.hex()
    return f"{key.space.name}/{digits[-2:]}/{digits}.{kind}"


class Packs(Objects):
    """Packs to tamper with; of one that gets longer, whose end nobody reads, less."""

    def __setitem__(self, name: str, item: bytes) -> None:
        super().__setitem__(name, item if len(item) <= 640 else item[:600])


# The contract


async def test_it_keeps_the_contract_on_a_server(server):
    where = {"options": options(server.url), "timeout_s": 60.0}
    make = partial(ObjectStore, f"s3://{BUCKET}/contract", **where)
    await check_store(make, reopen=make)


@pytest.mark.usefixtures("nothing_packed")
async def test_pages_that_are_objects_keep_the_contract(monkeypatch):
    # So that part of a page is read by two requests.
    monkeypatch.setattr(_object_reads, "_GAP_BYTES", 0)
    await check_store(partial(ObjectStore, Memory(), num_requests=1, timeout_s=60))


async def test_a_directory_does_as_a_bucket(tmp_path):
    keys = [*new_keys(20), *new_keys(1, BIG)]
    make = partial(ObjectStore, tmp_path.as_uri(), prefix="a/b", timeout_s=60)
    async with make() as store, make() as other:
        assert await put(store, *keys) == [HIT] * 21
        await other.remove([*keys[:10], *new_keys(2), *new_keys(2, BIG)])
        assert await get(other, *keys) == [MISS] * 10 + [HIT] * 11
        assert await put(other, *keys) == [HIT] * 21
        assert await get(store, *keys) == [HIT] * 21


async def test_pointers_that_were_tampered_with_lead_nowhere(make, monkeypatch):
    monkeypatch.setattr(_object_catalog, "_MAX_POINTERS", 0)
    async with make() as store:
        await check_tampering(lambda store: Objects(store, ".at"))(store)


@pytest.mark.usefixtures("one_a_pack")
async def test_packs_that_were_tampered_with_are_not_served(make):
    async with make() as store:
        await check_tampering(lambda store: Packs(store, "packs/"))(store)


@pytest.mark.usefixtures("nothing_packed")
async def test_pages_that_were_tampered_with_are_not_served(make):
    async with make() as store:
        await check_tampering(lambda store: Objects(store, ".kv"))(store)


# Names and bytes that others read


async def test_objects_are_named_and_framed_as_others_may_expect():
    key = PageKey(PageHash(bytes(range(32))), SPACE)
    large = PageKey(key.hash, BIG)
    async with ObjectStore(Memory(), prefix="golden/v1") as store:
        assert await put(store, key, large) == [HIT, HIT]
        found = await names(store)
        [pack] = [found for found in found if "packs" in found]
        assert re.fullmatch(r"golden/v1/packs/[0-9a-f]{32}", pack)
        digits = bytes(range(32)).hex()
        pointer = f"golden/v1/kv-0of1-uint8-4x2x4x2x8/1f/{digits}.at"
        plain = f"golden/v1/kv-all-uint8-8x2x16x32x256/1f/{digits}.kv"
        assert sorted(found) == sorted([pack, pointer, plain])
        assert len(await read(store, pack)) == 640
        assert len(await read(store, plain)) == BIG.page_bytes + 128
        data = await read(store, pointer)
    assert data[:16] == b"asyncache-at\1\0\0\0"
    assert data[16:32].hex() == pack[-32:]
    assert data[32:48] == (0).to_bytes(8, "little") + (640).to_bytes(8, "little")
    assert len(data) == 56


async def test_pages_are_packed_in_order_and_pages_of_other_spaces_apart(make):
    async with make() as store:
        keys, others = new_keys(20, MIDDLE), new_keys(3)
        mixed = [*keys[:5], *others, *keys[5:]]
        assert await put(store, *mixed) == [HIT] * 23
        packs = await names(store, "packs/")
        sizes = sorted([len(await read(store, pack)) for pack in packs])
        frame = MIDDLE.page_bytes + 128
        assert sizes == [3 * 640, 5 * frame, 15 * frame]
        places = [store._catalog.place(key) for key in keys]
        assert [place.start // frame for place in places] == [*range(15), *range(5)]
        assert await get(store, *mixed) == [HIT] * 23
        await store.remove(mixed)


async def test_a_batch_of_many_kinds_is_stored_and_read_whole(make):
    keys = [*new_keys(3, BIG), *new_keys(40, MIDDLE), *new_keys(2), *new_keys(3, BIG)]
    async with make() as store, make(num_requests=1) as other:
        assert await put(store, *keys) == [HIT] * 48
        for each in (store, other):
            assert await get(each, *keys) == [HIT] * 48
            for layers in (range(1), range(3, 4)):
                assert await get(each, *reversed(keys), layers=layers) == [HIT] * 48
        await store.remove(keys)
        assert await other.contains(keys) == [False] * 48


async def test_a_page_may_have_more_layers_than_bytes_a_layer(make):
    [key] = new_keys(1, MANY_LAYERS)
    sizes = one_a_layer(MANY_LAYERS)
    memory = bytearray(MANY_LAYERS.page_bytes)
    async with make() as store:
        assert await store.put([key], [views(content(key), sizes)]) == [HIT]
        assert await store.get_into([key], [views(memory, sizes)]) == [HIT]
    assert memory == content(key)


# What goes over the wire


@asynccontextmanager
async def overheard(server):
    """Yield a store on a server, and the requests that it made so far."""
    heard: list[str] = []

    def note(data: bytes) -> None:
        head, _, _ = data.partition(b"\r\n\r\n")
        if b"HTTP/1.1" in head:
            first, *lines = head.decode().split("\r\n")
            spans = [line for line in lines if line.lower().startswith("range:")]
            method, path, _ = first.split()
            heard.append(" ".join([method, path.removeprefix(f"/{BUCKET}"), *spans]))

    async with Proxy(server) as proxy:
        proxy.answer = note
        async with store_at(proxy.url) as store:
            heard.clear()
            yield store, heard


def pointer_asked(key: PageKey) -> str:
    return f"GET /{name(key)} range: bytes=0-56"


async def test_a_load_that_follows_a_lookup_needs_a_request_a_pack(server):
    keys = new_keys(20, MIDDLE)
    async with store_at(server.url) as writer:
        await put(writer, *keys)
    async with overheard(server) as (store, heard):
        assert await store.contains(keys) == [True] * 20
        assert sorted(heard) == sorted(map(pointer_asked, keys))
        heard.clear()
        assert await get(store, *keys) == [HIT] * 20
        assert len(heard) == 2
        assert all(line.startswith("GET /packs/") for line in heard)
        heard.clear()
        assert await get(store, *keys[2:4]) == [HIT] * 2
        frame = MIDDLE.page_bytes + 128
        [line] = heard
        assert line.lower().endswith(f"range: bytes={2 * frame}-{4 * frame - 1}")
        heard.clear()
        # What lies between is not read.
        assert await get(store, keys[9], keys[2], keys[2]) == [HIT] * 3
        spans = sorted(line.lower().partition("bytes=")[2] for line in heard)
        wanted = [f"{n * frame}-{(n + 1) * frame - 1}" for n in (2, 9)]
        assert spans == sorted(wanted)


async def test_a_page_that_is_there_moves_no_bytes(server):
    keys = [*new_keys(4, MIDDLE), *new_keys(2, BIG)]
    async with overheard(server) as (store, heard):
        assert await put(store, *keys) == [HIT] * 6
        packed = [line.split("/")[1] for line in heard if line.startswith("PUT")]
        assert packed.count("packs") == 1
        heard.clear()
        assert await put(store, *keys) == [HIT] * 6
        asked = list(map(pointer_asked, keys[:4]))
        asked += [f"HEAD /{name(key, 'kv')}" for key in keys[4:]]
        assert sorted(heard) == sorted(asked)


async def test_a_put_that_follows_a_lookup_asks_for_nothing(server, monkeypatch):
    keys = [*new_keys(4, MIDDLE), *new_keys(2, BIG)]
    names = {name(key) for key in keys[:4]} | {name(key, "kv") for key in keys[4:]}
    async with overheard(server) as (store, heard):
        assert await store.contains(keys) == [False] * 6
        heard.clear()
        assert await put(store, *keys) == [HIT] * 6
        assert {line.split()[0] for line in heard} == {"PUT"}
        # What is there now is not taken for new again.
        heard.clear()
        assert await put(store, *keys) == [HIT] * 6
        assert {line.split()[0] for line in heard} == {"GET", "HEAD"}
        await store.remove(keys)
        monkeypatch.setattr(_object_catalog, "_MISSING_S", 0.0)
        assert await store.contains(keys) == [False] * 6
        heard.clear()
        assert await put(store, *keys) == [HIT] * 6
        asked = [line.split()[1][1:] for line in heard if not line.startswith("PUT")]
        assert set(asked) == names


async def test_pages_that_others_put_after_a_lookup_stay_theirs(make):
    keys = [*new_keys(4, MIDDLE), *new_keys(2, BIG)]
    async with make() as store, make() as other:
        for looked in (store, other, store):
            assert await looked.contains(keys) == [False] * 6
        assert await put(other, *keys) == [HIT] * 6
        assert await put(store, *keys) == [HIT] * 6
        assert await store.contains(keys) == [True] * 6
        assert await get(store, *keys) == await get(other, *keys) == [HIT] * 6


async def test_some_layers_of_a_large_page_cost_no_more_than_them(server):
    [key] = new_keys(1, BIG)
    async with overheard(server) as (store, heard):
        assert await put(store, key) == [HIT]
        heard.clear()
        assert await get(store, key, layers=range(6, 8)) == [HIT]
        spans = sorted(line.lower().partition("bytes=")[2] for line in heard)
        start = 128 + 6 * BIG.layer_bytes
        assert spans == ["0-127", f"{start}-{128 + BIG.page_bytes - 1}"]
        heard.clear()
        # Here a second request would take longer than what it saves.
        assert await get(store, key, layers=range(1)) == [HIT]
        assert len(heard) == 1


async def test_requests_are_bounded(server):
    keys = new_keys(100)
    async with Proxy(server) as proxy, store_at(proxy.url, num_requests=4) as store:

        async def use(key: PageKey) -> None:
            assert await put(store, key) == [HIT]
            assert await get(store, key) == [HIT]

        async with anyio.create_task_group() as tasks:
            for key in keys[:50]:
                tasks.start_soon(use, key)
            tasks.start_soon(store.contains, keys)
        assert proxy.num_most <= 8


# Writers, rot, and what is out of date


async def test_of_two_writers_one_pack_stays(make):
    key = new_keys(1)[0]
    async with make() as first, make() as second:
        bucket = second._catalog.bucket
        write = bucket.write

        async def write_late(path, data):
            made = await write(path, data)
            assert await put(first, key) == [HIT]
            return made

        bucket.write = write_late
        assert await put(second, key) == [HIT]
        assert len(await names(second, "packs/")) == 1
        assert await get(first, key) == await get(second, key) == [HIT]
        await first.remove([key])


@pytest.mark.parametrize("layers", [None, range(1, 3)], ids=str)
async def test_a_pack_that_rots_or_is_cut_costs_the_pages_that_it_hits(make, layers):
    async with make() as store:
        keys = new_keys(6)
        await put(store, *keys)
        [pack] = {store._catalog.place(key).path for key in keys}
        good = await read(store, pack)
        rotten = bytearray(good)
        rotten[640 + 150 + 2 * 128] ^= 1  # of the second page, its third layer
        await change(store, pack, bytes(rotten[: 3 * 640 + 520]))
        expected = [HIT, CORRUPT, HIT, CORRUPT, CORRUPT, CORRUPT]
        if layers:
            expected[3] = HIT  # what is wanted of it is there
        assert await get(store, *keys, layers=layers) == expected
        assert await store.contains(keys) == [one is HIT for one in expected]
        assert await put(store, *keys) == [HIT] * 6
        again = await get(store, *keys, layers=layers)
        assert again == [HIT] * 6


@pytest.mark.parametrize("space", [SPACE, BIG], ids=["packed", "plain"])
async def test_a_page_whose_bytes_are_gone_is_a_miss_and_may_be_put_again(make, space):
    async with make() as store, make() as other:
        gone, good = keys = new_keys(2, space)
        for key in keys:
            await put(store, key)
        assert await other.contains(keys) == [True, True]
        await change(store, store._catalog.place(gone).path, None)
        for each in (store, other):
            assert await get(each, gone, good) == [MISS, HIT]
        assert await store.contains(keys) == [False, True]
        assert await put(store, gone) == [HIT]
        assert await get(other, gone) == [HIT]


async def test_a_pointer_that_is_out_of_date_is_asked_for_again(make):
    async with make() as store, make() as other:
        [key] = new_keys(1)
        await put(store, key)
        assert await other.contains([key]) == [True]
        for _ in range(2):
            old = store._catalog.place(key).path
            await store.remove([key])
            await change(store, old, None)
            await put(store, key)
            assert other._catalog.place(key).path == old
            assert await get(other, key) == [HIT]
            assert other._catalog.place(key) == store._catalog.place(key)
        # Where the old pack has other pages by now, as where there is none.
        await change(store, store._catalog.place(key).path, bytes(640))
        assert await get(other, key) == [CORRUPT]
        assert await store.contains([key]) == [False]


async def test_a_pointer_that_rots_is_corrupt_and_in_nobody_s_way(make):
    async with make() as store:
        first, second, _ = keys = new_keys(3)
        await put(store, *keys)
        for key in keys:
            data = bytearray(await read(store, name(key)))
            data[20] ^= 1
            await change(store, name(key), bytes(data))
            store._catalog.forget(key)
        assert await get(store, first) == [CORRUPT]
        assert await store.contains([second]) == [False]
        assert await put(store, *keys) == [HIT] * 3
        assert await get(store, *keys) == [HIT] * 3


async def test_a_pointer_of_another_page_or_another_version_is_none(make):
    async with make() as store:
        first, second = keys = new_keys(2)
        await put(store, *keys)
        shelf = store._catalog.shelf(SPACE)
        data = shelf.pack_pointer(first.hash, store._catalog._pointers[first])
        assert shelf.unpack_pointer(first.hash, data) is not None
        assert shelf.unpack_pointer(second.hash, data) is None
        assert shelf.unpack_pointer(first.hash, b"b" + data[1:]) is None
        others = store._catalog.shelf(LARGE_SPACE)
        assert others.unpack_pointer(first.hash, data) is None


async def test_pointers_that_are_remembered_are_bounded(make, monkeypatch):
    monkeypatch.setattr(_object_catalog, "_MAX_POINTERS", 3)
    async with make() as store:
        keys = new_keys(8)
        await put(store, *keys)
        assert len(store._catalog._pointers) == 3
        assert await get(store, *keys) == [HIT] * 8
        assert len(store._catalog._pointers) == 3


@pytest.mark.parametrize("space", [SPACE, BIG], ids=["packed", "plain"])
async def test_a_page_without_digests_is_of_no_use_to_who_wants_them(space):
    behind = Memory()
    async with (
        ObjectStore(behind, checksums=False) as plain,
        ObjectStore(behind) as store,
    ):
        [key] = new_keys(1, space)
        assert await put(plain, key) == [HIT]
        assert await get(plain, key) == [HIT]
        assert await get(store, key) == [MISS]
        assert await put(store, key) == [HIT]
        assert await get(store, key) == [HIT]
        assert await get(plain, key) == [HIT]


async def test_prefixes_do_not_share(make):
    key = new_keys(1)[0]
    async with make(prefix="a") as one, make(prefix="a/b") as other:
        await put(one, key)
        assert await other.contains([key]) == [False]


# What it says


@pytest.mark.parametrize(
    ("url", "given", "said"),
    [
        ("bucket/path", {}, "cannot open ://bucket/path: relative URL"),
        ("ftp://me:hidden@bucket/a?sig=hidden", {}, "cannot open ftp://bucket/a: "),
        ("s3://bucket", {"endpoint_uri": "x"}, "Configuration key: 'endpoint_uri'"),
        ("s3://bucket", {"access_key_id": 3}, "'int' object is not an instance"),
        ("s3://bucket", {"client_options": {"timeout": "hidden"}}, "s3://bucket: "),
        ("file:///nowhere/at/all", {}, "Unable to canonicalize"),
        ("s3://[bucket", {}, "a url that is none"),
    ],
)
def test_a_url_or_an_option_that_is_none_is_told_without_secrets(url, given, said):
    with pytest.raises(StoreError, match=re.escape(said)) as caught:
        ObjectStore(url, options=given)
    assert "hidden" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_argument_that_is_out_of_range_is_told():
    for prefix in ("/", "a/", "/a", "..", "a/../b", "a b", "ä", "a\n", ".a"):
        with pytest.raises(ValueError, match="prefix must match"):
            ObjectStore(Memory(), prefix=prefix)
    for timeout_s in (0, -1, float("nan"), 601):
        with pytest.raises(
            ValueError, match=f"timeout_s must be in .* not {timeout_s}"
        ):
            ObjectStore(Memory(), timeout_s=timeout_s)
    with pytest.raises(ValueError, match="num_requests must be at least 1, not 0"):
        ObjectStore(Memory(), num_requests=0)
    with pytest.raises(ValueError, match="options are for a url"):
        ObjectStore(Memory(), options={"region": "here"})
    with pytest.raises(
        TypeError, match="must be a url or a store of obstore's, not Posix"
    ):
        ObjectStore(Path())


@pytest.mark.parametrize(
    ("url", "given"),
    [
        ("gs://bucket/a", {"skip_signature": True}),
        ("az://container/a", {"account_name": "me", "skip_signature": True}),
        ("s3://bucket/a", {"unsigned_payload": False, "retry_config": {}}),
        ("memory:///", {}),
    ],
)
def test_buckets_of_all_makers_are_understood(url, given):
    assert repr(ObjectStore(url, options=given)) == f"<ObjectStore {url} ''>"


def test_credentials_show_nowhere():
    key, secret = SECRETS
    given = options("http://127.0.0.1:1")
    stores = [
        ObjectStore(f"s3://{key}:{secret}@{BUCKET}/a?sig={secret}", options=given),
        ObjectStore(obstore.store.S3Store(BUCKET, prefix="a", **given), prefix="b"),
    ]
    assert [repr(store) for store in stores] == [
        "<ObjectStore s3://pages/a ''>",
        "<ObjectStore S3Store 'b/'>",
    ]
    said = "".join(map(repr, [vars(store) for store in stores]))
    assert not {word for word in SECRETS if word in said}


def test_without_the_extra_it_says_what_to_install():
    code = """
import sys
sys.modules["obstore"] = None
import asyncache
try:
    asyncache.ObjectStore("s3://bucket")
except ImportError as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    said = "ObjectStore needs obstore: pip install 'asyncache[object]'\n"
    assert done.stdout == said


def test_obstore_is_not_imported_before_it_is_used():
    code = (
        "import sys, asyncache as a; a.ObjectStore; assert 'obstore' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == 0


async def refusal(store: ObjectStore) -> str:
    with pytest.raises(StoreError) as caught:
        await store.open()
    await store.aclose()
    assert not {word for word in SECRETS if word in str(caught.value)}
    return str(caught.value)


async def test_a_bucket_that_is_not_there_is_told_at_open(server):
    store = ObjectStore("s3://nobodys-bucket/a", options=options(server.url))
    assert await refusal(store) == "s3://nobodys-bucket/a is no bucket: make it first"


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "AccessDenied"])
async def test_a_bucket_that_does_not_let_us_in_says_why_at_open(server, code):
    body = f"<Error><Code>{code}</Code><AWSAccessKeyId>{SECRETS[0]}</AWSAccessKeyId>"
    head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(body)}\r\n\r\n"
    async with Proxy(server) as proxy:
        proxy.answer = lambda data: (head + body).encode()
        said = await refusal(store_at(proxy.url))
        assert said == f"s3://{BUCKET} does not let us in: {code}"


async def test_nobody_there_is_no_error_at_open():
    keys = [*new_keys(2), *new_keys(1, BIG)]
    async with store_at(f"http://127.0.0.1:{free_port()}") as store:
        assert await store.contains(keys) == [False] * 3
        assert await get(store, *keys) == [UNAVAILABLE] * 3
        assert await put(store, *keys) == [UNAVAILABLE] * 3
        await store.remove(keys)


async def test_a_store_that_is_not_open_says_so():
    store = ObjectStore(Memory())
    with pytest.raises(OrderError, match=r"is not open: await its open\(\) first"):
        await store.contains(new_keys(1))
    await store.aclose()
    with pytest.raises(ClosedError, match="the store is closed"):
        await store.open()


async def test_a_directory_that_is_full_rejects(tmp_path, monkeypatch):
    async with ObjectStore(LocalStore(tmp_path)) as store:

        async def refuse(*_: object, **__: object) -> None:
            raise obstore.exceptions.GenericError(
                "No space left on device (os error 28)"
            )

        monkeypatch.setattr(obstore, "put_async", refuse)
        assert await put(store, *new_keys(2), *new_keys(1, BIG)) == [REJECTED] * 3


@pytest.mark.parametrize("style", CancelStyle)
async def test_opening_may_be_cancelled_and_tried_again(server, style):
    await server_laws.opening_may_be_cancelled_and_tried_again(
        lambda: store_at(server.url), style
    )
