"""CompressedStore and EncryptedStore: the contract, what they serve and keep."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
from collections import Counter
from functools import partial

import anyio
import pytest

from asyncache.core import PageHash, PageKey, PageSpace, StoreError, namespace_tag
from asyncache.stores import (
    CompressedStore,
    EncryptedStore,
    FileStore,
    MemoryStore,
    Status,
    TieredStore,
    _coded,
    _namespaces,
)
from asyncache.testing import Fault, FaultyStore, Gate, GateStore, check_store
from asyncache.testing._samples import (
    LARGE_SPACE,
    SPACE,
    content,
    new_keys,
    new_source,
    new_target,
)
from tests.stores.behind import MemoryPages, PageFiles

# A compressed page finds no room that an evicted one leaves: 24 MiB are put, and more.
ROOM = 32 * 2**20
KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))
HIT, MISS, CORRUPT = Status.HIT, Status.MISS, Status.CORRUPT
UNAVAILABLE, REJECTED = Status.UNAVAILABLE, Status.REJECTED
TINY = PageSpace("kv", "all", "uint8", (3, 1))

encrypted = partial(EncryptedStore, key=KEY)
CODECS = [CompressedStore, encrypted]
both = pytest.mark.parametrize("codec", CODECS, ids=["zstd", "aes"])


def compressed_and_encrypted(inner):
    return CompressedStore(encrypted(inner))


def encrypted_and_compressed(inner):
    return encrypted(CompressedStore(inner))


def memory_behind(store):
    while not isinstance(store, MemoryStore):
        store = store._inner
    return MemoryPages(store)


def in_files(codec, directory):
    return codec(FileStore(directory))


async def put(store, *keys):
    return await store.put(keys, [new_source(key) for key in keys])


async def get(store, *keys, layers=None):
    """Read pages, and check the bytes of those that are hits."""
    targets = [new_target(key, layers) for key in keys]
    statuses = await store.get_into(keys, targets, layers)
    for key, status, [target] in zip(keys, statuses, targets, strict=True):
        size = key.space.layer_bytes
        wanted = layers or range(key.space.num_layers)
        expected = content(key)[wanted.start * size : wanted.stop * size]
        assert status is not HIT or target == expected
    return statuses


@pytest.mark.parametrize(
    "codec",
    [CompressedStore, encrypted, compressed_and_encrypted, encrypted_and_compressed],
)
async def test_over_memory_it_keeps_the_contract(codec):
    await check_store(lambda: codec(MemoryStore(ROOM)), stored=memory_behind)


@pytest.mark.slow
@both
async def test_over_files_it_keeps_the_contract(codec, tmp_path):
    await check_store(
        partial(in_files, codec, tmp_path),
        stored=lambda _: PageFiles(tmp_path),
        reopen=partial(in_files, codec, tmp_path),
    )


@pytest.mark.slow
@both
async def test_over_files_without_digests_nothing_tampered_with_is_served(
    codec, tmp_path
):
    await check_store(
        lambda: codec(FileStore(tmp_path, checksums=False)),
        stored=lambda _: PageFiles(tmp_path),
    )


@both
async def test_as_a_tier_it_keeps_the_contract(codec):
    await check_store(
        lambda: TieredStore([MemoryStore(2**16), codec(MemoryStore(ROOM))])
    )


@both
async def test_a_bit_that_is_flipped_anywhere_is_found(codec):
    memory = MemoryStore(ROOM)
    store, items = codec(memory), MemoryPages(memory)
    async with store:
        await put(store, *new_keys(1, TINY))
        num_bits = 8 * memory.num_bytes
        keys = new_keys(num_bits, TINY)
        await put(store, *keys)
        for place, name in enumerate(list(items)[-num_bits:]):
            bad = bytearray(items[name])
            bad[place // 8] ^= 1 << place % 8
            items[name] = bytes(bad)
        assert await get(store, *keys) == [CORRUPT] * num_bits
        assert memory.num_pages == 1
        assert await put(store, *keys) == [HIT] * num_bits
        assert await get(store, *keys) == [HIT] * num_bits


@both
async def test_slices_of_one_page_cannot_be_exchanged(codec):
    memory, [key] = MemoryStore(ROOM), new_keys(1)
    store, items = codec(memory), MemoryPages(memory)
    async with store:
        await put(store, key)
        [(name, good)] = items.items()
        size = len(good) // SPACE.num_layers
        items[name] = good[size : 2 * size] + good[:size] + good[2 * size :]
        assert await get(store, key, layers=range(2, 4)) == [HIT]
        assert await get(store, key, layers=range(2)) == [CORRUPT]
        assert await get(store, key) == [MISS]


@both
async def test_layers_are_read_alone(codec):
    [key] = new_keys(1)
    asked = []

    class Noting(MemoryStore):
        async def get_into(self, keys, targets, layers=None):
            asked.append((layers, sum(map(len, targets[0]))))
            return await super().get_into(keys, targets, layers)

    async with codec(Noting(ROOM)) as store:
        await put(store, key)
        assert await get(store, key, layers=range(1, 2)) == [HIT]
        assert await get(store, key) == [HIT]
    [(layers, num_bytes), (_, num_all)] = asked
    assert layers == range(1, 2)
    assert num_bytes * SPACE.num_layers == num_all


@both
async def test_a_batch_larger_than_a_part_is_stored_and_read_whole(codec, monkeypatch):
    monkeypatch.setattr(_coded, "_PART_BYTES", 3 * SPACE.page_bytes)
    monkeypatch.setattr(_coded, "_JOB_BYTES", SPACE.page_bytes)
    keys = [*new_keys(10), *new_keys(1, LARGE_SPACE), *new_keys(2)]
    async with codec(MemoryStore(ROOM)) as store:
        assert await put(store, *keys) == [HIT] * 13
        assert await get(store, *keys) == [HIT] * 13


@both
async def test_what_the_inner_store_says_is_passed_on(codec):
    [key] = new_keys(1)
    faulty = FaultyStore(MemoryStore(ROOM))
    async with codec(faulty) as store:
        for fault, answer in [
            (Fault.UNAVAILABLE, UNAVAILABLE),
            (Fault.REJECTED, REJECTED),
        ]:
            faulty.fault = fault
            assert await put(store, key) == [answer]
        faulty.fault = None
        assert await put(store, key) == [HIT]
        for fault, answer in [
            (Fault.UNAVAILABLE, UNAVAILABLE),
            (Fault.MISSING, MISS),
            (Fault.CORRUPT, CORRUPT),
        ]:
            faulty.fault = fault
            assert await get(store, key) == [answer]


@both
@pytest.mark.parametrize("gate", ["contains_gate", "put_gate", "get_gate"])
async def test_a_close_under_a_call_leaves_pages_unreached(codec, gate):
    [key] = new_keys(1)
    inner = GateStore(MemoryStore(ROOM), is_open=True)
    held = Gate()
    async with codec(inner) as store:
        if gate == "get_gate":
            await put(store, key)
        setattr(inner, gate, held)
        answers = []

        async def call():
            answers.extend(await (get if gate == "get_gate" else put)(store, key))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await held.wait_arrived()
            store._is_closed = True  # as the first thing that aclose() does
            held.open()
    assert answers == [HIT if gate == "put_gate" else UNAVAILABLE]


@both
async def test_a_close_while_pages_are_coded_puts_none_of_them(codec):
    [key] = new_keys(1)
    inner = GateStore(MemoryStore(ROOM), is_open=True)
    begun, go, answers = threading.Event(), threading.Event(), []
    async with codec(inner) as store:
        coder = store._codec.coder

        def held():
            begun.set()
            go.wait(10)
            return coder()

        store._codec.coder = held

        async def call():
            answers.extend(await put(store, key))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await anyio.to_thread.run_sync(begun.wait)
            store._is_closed = True  # as the first thing that aclose() does
            go.set()
    assert answers == [UNAVAILABLE]
    assert inner.put_gate.num_arrived == 0


@both
def test_a_store_needs_a_thread(codec):
    with pytest.raises(ValueError, match="num_threads must be at least 1, not 0"):
        codec(MemoryStore(0), num_threads=0)


@both
async def test_plain_and_coded_pages_do_not_mix(codec, tmp_path):
    [plain, coded] = new_keys(2)
    async with FileStore(tmp_path) as files:
        await put(files, plain)
    async with codec(FileStore(tmp_path)) as store:
        assert await get(store, plain) == [MISS]
        await put(store, plain, coded)
        assert await get(store, plain, coded) == [HIT] * 2
    async with FileStore(tmp_path) as files:
        assert await get(files, plain, coded) == [HIT, MISS]


# CompressedStore.


def zeros(space):
    return [memoryview(bytes(space.page_bytes))]


async def test_a_page_takes_the_room_that_it_needs():
    memory = MemoryStore(ROOM)
    [random, empty] = new_keys(2, LARGE_SPACE)
    async with CompressedStore(memory) as store:
        await put(store, random)
        head = 16 * LARGE_SPACE.num_layers
        assert memory.num_bytes == LARGE_SPACE.page_bytes + head
        await store.put([empty], [zeros(LARGE_SPACE)])
        eighth = LARGE_SPACE.page_bytes // 8
        assert memory.num_bytes == LARGE_SPACE.page_bytes + eighth + 2 * head
        target = new_target(empty)
        assert await store.get_into([empty], [target]) == [HIT]
        assert target == zeros(LARGE_SPACE)


async def test_a_page_is_written_once_whatever_room_another_would_take():
    memory, [key] = MemoryStore(ROOM), new_keys(1)
    async with CompressedStore(memory) as store:
        await put(store, key)
        assert await store.put([key], [zeros(SPACE)]) == [HIT]
        assert memory.num_pages == 1
        assert await get(store, key) == [HIT]


async def test_one_layer_may_be_compressed_and_another_not():
    [key] = new_keys(1, LARGE_SPACE)
    half = LARGE_SPACE.page_bytes // 2
    page = secrets.token_bytes(half) + bytes(half)
    async with CompressedStore(MemoryStore(ROOM)) as store:
        assert await store.put([key], [[memoryview(page)]]) == [HIT]
        target = new_target(key)
        assert await store.get_into([key], [target]) == [HIT]
        assert target[0] == page


@pytest.mark.parametrize("level", [-100, 1, 19])
async def test_pages_of_any_level_are_read(level):
    memory, [key] = MemoryStore(ROOM), new_keys(1)
    async with CompressedStore(memory) as reader:
        store = CompressedStore(memory, level=level)
        assert await store.put([key], [zeros(SPACE)]) == [HIT]
        target = new_target(key)
        assert await reader.get_into([key], [target]) == [HIT]
        assert target == zeros(SPACE)
        await store.aclose()


async def test_a_forged_frame_is_corrupt_and_allocates_nothing():
    import zstandard

    from asyncache.stores._compressed import _digest

    [key] = new_keys(1, LARGE_SPACE)
    for forged in (zstandard.compress(bytes(2**24)), b"no frame"):
        memory = MemoryStore(ROOM)
        store, items = CompressedStore(memory), MemoryPages(memory)
        async with store:
            await store.put([key], [zeros(LARGE_SPACE)])
            [(name, page)] = items.items()
            size = len(page) // LARGE_SPACE.num_layers
            slot = len(forged).to_bytes(8, "little") + forged.ljust(size - 16, b"\0")
            page_hash = PageHash(bytes.fromhex(name[:64]))
            digest = _digest(page_hash, 0, memoryview(bytes(8) + slot))
            items[name] = digest + slot + page[size:]
            assert await get(store, key) == [CORRUPT]


@pytest.mark.parametrize("level", [-101, 23])
def test_a_level_that_is_none_is_named(level):
    with pytest.raises(ValueError, match=rf"level must be in .*, not {level}"):
        CompressedStore(MemoryStore(0), level=level)


# EncryptedStore.


async def test_a_wrong_key_finds_nothing_and_harms_nothing(tmp_path):
    keys = new_keys(5)
    async with encrypted(FileStore(tmp_path)) as store:
        await put(store, *keys)
        async with EncryptedStore(FileStore(tmp_path), key=OTHER_KEY) as other:
            assert await other.contains(keys) == [False] * 5
            assert await get(other, *keys) == [MISS] * 5
            assert await put(other, *keys) == [HIT] * 5
            await other.remove(keys)
        assert await get(store, *keys) == [HIT] * 5


async def test_nothing_of_a_page_or_its_name_is_stored_but_its_tag(tmp_path):
    keys = new_keys(3)
    async with encrypted(FileStore(tmp_path)) as store:
        await put(store, *keys)
    items = PageFiles(tmp_path)
    tags = sorted(path.rpartition("/")[2][:8] for path in items)
    assert tags == sorted(key.tag.hex() for key in keys)
    for key in keys:
        page, name = content(key), key.hash.hex()
        for path, item in items.items():
            assert page[:8] not in item
            assert name[8:16] not in path


def key_of(namespace):
    [key] = new_keys(1)
    return key._replace(hash=PageHash(namespace_tag(namespace) + key.hash[4:]))


async def test_a_namespace_has_a_key_of_its_own():
    memory = MemoryStore(ROOM)
    ours, theirs, nobodys = keys = [key_of(name) for name in ("a", ("b", "c"), None)]
    secrets_of = {"a": KEY, ("b", "c"): OTHER_KEY}
    async with EncryptedStore(memory, key=secrets_of) as store:
        assert await put(store, *keys) == [HIT, HIT, REJECTED]
        assert await get(store, *keys) == [HIT, HIT, MISS]
        assert await store.contains(keys) == [True, True, False]
        await store.remove([nobodys])
        # Each under its own key, as if there were no other.
        for key, secret in ((ours, KEY), (theirs, OTHER_KEY)):
            alone = EncryptedStore(memory, key=secret)
            assert await alone.contains(keys) == [one is key for one in keys]
        # A key that is dropped takes its pages along.
        without = EncryptedStore(memory, key={("b", "c"): OTHER_KEY})
        assert await without.contains(keys) == [False, True, False]


async def test_no_nonce_and_no_bytes_come_twice():
    memory = MemoryStore(ROOM)
    keys = new_keys(20)
    seen = Counter()
    async with encrypted(memory) as store:
        for _ in range(20):
            await put(store, *keys)
            for page in MemoryPages(memory).values():
                size = len(page) // SPACE.num_layers
                slots = [page[i : i + size] for i in range(0, len(page), size)]
                seen.update(slot[:12] for slot in slots)
                seen.update(slot[12:] for slot in slots)
            await store.remove(keys)
    assert len(seen) == 2 * 20 * 20 * SPACE.num_layers
    assert set(seen.values()) == {1}


async def test_a_page_in_the_place_of_another_is_corrupt():
    """Also where tags would be made under one key: the key's name is bound in."""
    from asyncache.stores._encrypted import _AesGcm, _AesGcmCoder

    one, other = new_keys(2)

    class OneKey(_AesGcm):
        def cipher(self, key):
            return super().cipher(one)

    coder = _AesGcmCoder(OneKey({}, KEY))
    [source] = new_source(one)
    page = memoryview(coder.encode(one, [source]))
    assert coder.decode(one, range(1), [page], new_target(one))
    assert not coder.decode(other, range(1), [page], new_target(other))
    assert not coder.decode(one, range(1, 2), [page], new_target(one))


async def test_what_it_keeps_is_found_by_other_releases():
    """Golden: pages that were written yesterday must be found tomorrow."""
    key = PageKey(PageHash(bytes(32)), SPACE)
    expected = {
        CompressedStore: (
            "zstd2-0of1-uint8-4x48",
            "000000007b6c59dc02c73dc89834a5c5809c3b4dda0feb8745ff857c25b12ede",
        ),
        encrypted: (
            "aesgcm2-0of1-uint8-4x156",
            "000000007677df6802449df136b39ec0604a76114311ac4066b53b56e82f4ada",
        ),
    }
    for codec, (space, page_hash) in expected.items():
        memory = MemoryStore(ROOM)
        async with codec(memory) as store:
            await store.put([key], [zeros(SPACE)])
            [name] = MemoryPages(memory)
        assert name == f"{page_hash}-{space}"


def test_the_key_is_not_shown():
    store = encrypted(MemoryStore(0))
    assert repr(store) == "<EncryptedStore of <MemoryStore 0 pages, 0 of 0 bytes>>"
    with pytest.raises(ValueError, match=r"^key must have 32 bytes, not 3$"):
        EncryptedStore(MemoryStore(0), key=b"abc")
    with pytest.raises(TypeError, match=r"^key must be bytes, not str$"):
        EncryptedStore(MemoryStore(0), key="x" * 32)
    with pytest.raises(ValueError, match=r"^key must have 32 bytes, not 3$"):
        EncryptedStore(MemoryStore(0), key={"a": KEY, "b": b"abc"})
    with pytest.raises(TypeError, match="a namespace is None, str, bytes or a tuple"):
        EncryptedStore(MemoryStore(0), key={7: KEY})


def test_namespaces_that_share_a_tag_are_refused(monkeypatch):
    monkeypatch.setattr(_namespaces, "namespace_tag", lambda _: b"same")
    with pytest.raises(ValueError, match=r"^'b' and 'a' have one tag: rename one$"):
        EncryptedStore(MemoryStore(0), key={"a": KEY, "b": KEY})


# Extras.


@pytest.mark.parametrize(
    ("module", "extra", "make"),
    [
        ("zstandard", "zstd", CompressedStore),
        ("cryptography.exceptions", "crypt", encrypted),
    ],
)
def test_an_extra_that_is_missing_is_named(module, extra, make, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StoreError, match=rf"pip install 'asyncache\[{extra}\]'"):
        make(MemoryStore(0))


def test_extras_are_not_imported_before_they_are_used():
    code = """
import sys
import asyncache.stores
assert not {"zstandard", "cryptography"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
