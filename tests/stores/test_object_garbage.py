"""What ObjectStore lists, what it takes for garbage, and what it leaves alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from anyio import fail_after

from asyncache.core import StoreError
from asyncache.stores import ObjectStore, Status, _object_bucket, _object_census
from asyncache.testing._samples import OTHER_SPACE, SPACE, new_keys
from tests.stores.object_server import store_at
from tests.stores.proxy import Proxy
from tests.stores.test_object import BIG, Memory, change, get, name, names, put

HIT, MISS = Status.HIT, Status.MISS


@pytest.fixture
def server(object_server):
    return object_server


@pytest.fixture
def all_are_old(monkeypatch):
    """Have nothing be too young to be garbage."""
    monkeypatch.setattr(_object_census, "_STALE", timedelta(hours=-1))


async def listed(store: ObjectStore) -> list[str]:
    keys = store.keys()
    return sorted([key.name async for key in keys])


async def test_pages_of_all_kinds_are_listed_and_what_is_none_is_not(monkeypatch):
    monkeypatch.setattr(_object_bucket, "_CHUNK", 3)
    behind = Memory()
    async with (
        ObjectStore(behind, prefix="a") as store,
        ObjectStore(behind, prefix="ab") as other,
        ObjectStore(behind) as top,
    ):
        keys = [*new_keys(7), *new_keys(2, OTHER_SPACE), *new_keys(2, BIG)]
        await put(store, *keys)
        await put(other, *new_keys(1))
        good = name(keys[0])
        folder, pair, file = good.split("/")
        for odd in (
            "a/readme",
            f"a/{folder}/readme",
            f"a/{folder}/{pair}/{file[:-4]}.at",
            f"a/{folder}/{pair}/{file}.at",
            f"a/{folder}/{pair}/{file.upper()}",
            f"a/{folder}/zz/{file}",
            f"a/{folder}/{pair}/{file[:-3]}.kv",
            f"a/{folder}-x/{pair}/{file}",
            f"a/kv-0of1-uint8-999999999x04/{pair}/{file}",
            f"a/b/{good}",
        ):
            await change(top, odd, b"odd")
        assert await listed(store) == sorted(key.name for key in keys)
        assert len(await listed(other)) == 1
        assert await listed(top) == []


async def test_a_listing_that_is_not_answered_says_so(server):
    async with Proxy(server) as proxy, store_at(proxy.url, timeout_s=0.5) as store:
        proxy.answer = lambda data: b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
        with pytest.raises(StoreError, match="cannot list its pages: no answer"):
            await listed(store)
        with pytest.raises(StoreError, match="cannot list its pages: no answer"):
            await store.collect_garbage()
        said = pytest.raises(StoreError, match="cannot list its pages: no answer")
        with server.paused(), fail_after(20), said:
            await listed(store)


@pytest.mark.usefixtures("all_are_old")
@pytest.mark.parametrize("where", ["in memory", "on a server"])
async def test_packs_without_pointers_and_pointers_without_a_pack_go(
    where, request, monkeypatch
):
    monkeypatch.setattr(_object_bucket, "_CHUNK", 2)
    if where == "in memory":
        store = ObjectStore(Memory(), prefix="p")
    else:
        store = store_at(request.getfixturevalue("server").url, "garbage", prefix="p")
    async with store:
        kept, removed, broken = new_keys(3), new_keys(3), new_keys(3)
        large = new_keys(1, BIG)
        for batch in (kept, removed, broken, large):
            await put(store, *batch)
        await store.remove([kept[0], *removed])
        await change(store, store._catalog.place(broken[0]).path, None)
        assert await store.collect_garbage() == 3 * 640 + 3 * 56
        assert await store.contains(broken) == [False] * 3
        assert len(await names(store, "packs/")) == 1
        assert await get(store, *kept, *large) == [MISS, HIT, HIT, HIT]
        assert await store.collect_garbage() == 0
        await store.remove([*kept, *large])
        assert await store.collect_garbage() == 3 * 640
        assert await names(store) == []


async def test_a_pack_that_is_young_may_be_about_to_be_pointed_at():
    async with ObjectStore(Memory()) as store:
        pack = f"packs/{32 * 'a'}"
        await change(store, pack, b"x" * 640)
        assert await store.collect_garbage() == 0
        assert await names(store) == [pack]
        census = _object_census.Census(store._catalog, store._reads)
        made = datetime.now(UTC) - timedelta(minutes=59)
        census.note_packs([_object_bucket.Entry(pack, 640, made)])
        await census.remove_packs()
        assert await names(store) == [pack]
        made -= timedelta(minutes=2)
        census.note_packs([_object_bucket.Entry(pack, 640, made)])
        await census.remove_packs()
        assert await names(store) == []


@pytest.mark.usefixtures("all_are_old")
async def test_a_page_that_is_put_meanwhile_is_no_garbage():
    behind = Memory()
    async with ObjectStore(behind) as store, ObjectStore(behind) as writer:
        keys, late = new_keys(2), new_keys(2)
        await put(store, *keys)
        walk = store._catalog.bucket.walk

        def walk_slowly(folder):
            advance = walk(folder)

            async def put_and_advance():
                if folder != store._catalog.packs:
                    await put(writer, *late)  # its pack was not there a moment ago
                return await advance()

            return put_and_advance

        store._catalog.bucket.walk = walk_slowly
        assert await store.collect_garbage() == 0
        assert await get(store, *keys, *late) == [HIT] * 4


@pytest.mark.usefixtures("all_are_old")
async def test_nothing_goes_while_pointers_cannot_be_read(server):
    async with Proxy(server) as proxy, store_at(proxy.url, "unread") as store:
        keys = new_keys(3)
        await put(store, *keys)
        trouble = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        proxy.answer = lambda data: trouble if b".at HTTP" in data else None
        with pytest.raises(StoreError, match="cannot tell garbage from pages"):
            await store.collect_garbage()
        proxy.calm()
        assert await get(store, *keys) == [HIT] * 3
        assert SPACE.name in (await names(store, ".at"))[0]
