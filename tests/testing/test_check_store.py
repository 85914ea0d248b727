"""The kit passes stores that keep the contract, and finds what is wrong with others."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from asyncache.core import PageHash, PageKey, PageSpace
from asyncache.stores import FileStore, MemoryStore, Status
from asyncache.testing import check_store
from asyncache.testing._store_processes import check_processes
from tests.stores.behind import MemoryPages
from tests.testing.hashing_store import HashingStore

ROOM = 16 * 2**20


class Broken(MemoryStore):
    """A store that keeps the contract but for what a subclass overrides."""

    def __init__(self):
        super().__init__(ROOM)


class Merging(Broken):
    """Takes some keys for others."""

    def same(self, key):
        raise NotImplementedError

    async def contains(self, keys):
        return await super().contains([self.same(key) for key in keys])

    async def get_into(self, keys, targets, layers=None):
        same = [self.same(key) for key in keys]
        return await super().get_into(same, targets, layers)

    async def put(self, keys, sources):
        return await super().put([self.same(key) for key in keys], sources)

    async def remove(self, keys):
        await super().remove([self.same(key) for key in keys])


class ForgetsTheDtype(Merging):
    def same(self, key):
        space = key.space
        width = space.layer_bytes
        for extent in space.shape[1:]:
            width //= extent
        dtype = {1: "uint8", 2: "float16"}[width]
        space = PageSpace(space.pool, space.shard, dtype, space.shape)
        return PageKey(key.hash, space)


class ForgetsTheShape(Merging):
    def same(self, key):
        space = key.space
        num_items = 1
        for extent in space.shape[1:]:
            num_items *= extent
        shape = (space.num_layers, num_items)
        return PageKey(key.hash, PageSpace(space.pool, space.shard, space.dtype, shape))


class ForgetsThePool(Merging):
    def same(self, key):
        space = key.space
        space = PageSpace("any", space.shard, space.dtype, space.shape)
        return PageKey(key.hash, space)


class ForgetsTheShard(Merging):
    def same(self, key):
        space = key.space
        space = PageSpace(space.pool, "all", space.dtype, space.shape)
        return PageKey(key.hash, space)


class TruncatesTheHash(Merging):
    """To what every page has, here."""

    def same(self, key):
        return PageKey(PageHash(key.hash[:0]), key.space)


class SortsItsAnswers(Broken):
    async def get_into(self, keys, targets, layers=None):
        statuses = await super().get_into(keys, targets, layers)
        return statuses if len(keys) < 6 else sorted(statuses, key=lambda s: s.value)


class AnswersForHalf(Broken):
    async def contains(self, keys):
        return (await super().contains(keys))[:6]


class WritesInPlace(Broken):
    """Shows a page while it is being written, and writes over the one that is there."""

    async def put(self, keys, sources):
        if any(key.space.page_bytes < 2**16 for key in keys) or len(keys) != 1:
            return await super().put(keys, sources)
        [key], [source] = keys, sources
        whole = b"".join(source)
        half = len(whole) // 2
        old = bytes(self._pages[key]) if key in self._pages else bytes(len(whole))
        self._pages[key] = memoryview(whole[:half] + old[half:])
        await anyio.lowlevel.checkpoint()
        self._pages[key] = memoryview(whole)
        return [Status.HIT]


class FailsOnceClosed(Broken):
    async def get_into(self, keys, targets, layers=None):
        statuses = await super().get_into(keys, targets, layers)
        if self._is_closed:
            raise OSError("the connection is gone")
        return statuses


FAILS = AssertionError


@pytest.mark.parametrize(
    ("broken", "error", "match", "note"),
    [
        (ForgetsTheDtype, FAILS, "contains of others", "equal_hashes_in_other_spaces"),
        (ForgetsTheShape, FAILS, "contains of others", "equal_hashes_in_other_spaces"),
        (ForgetsThePool, FAILS, "contains of others", "equal_hashes_in_other_spaces"),
        (ForgetsTheShard, FAILS, "contains in another space", "spaces_do_not_share"),
        (TruncatesTheHash, FAILS, "bytes of a page", "what_is_put_is_read"),
        (
            SortsItsAnswers,
            FAILS,
            "get_into of some",
            "answers_come_in_the_order_of_the_keys",
        ),
        (AnswersForHalf, FAILS, "contains", "answers_come_in_the_order_of_the_keys"),
        (WritesInPlace, FAILS, "are torn", "a_page_is_whole_or_absent_whoever_hurries"),
        (
            FailsOnceClosed,
            OSError,
            "the connection is gone",
            "a_call_under_way_at_the_close_ends",
        ),
    ],
)
async def test_a_broken_store_is_found(broken, error, match, note):
    with pytest.raises(error, match=match) as caught:
        await check_store(broken)
    assert note in caught.value.__notes__[-1]


async def test_a_store_that_serves_what_was_tampered_with_is_found():
    with pytest.raises(AssertionError, match="get_into of what was tampered") as caught:
        await check_store(lambda: MemoryStore(ROOM), stored=MemoryPages)
    assert "what_was_tampered_with_is_not_served" in caught.value.__notes__[0]


async def test_what_is_stored_must_be_shown():
    with pytest.raises(AssertionError, match="items stored of 49 pages: expected 49"):
        await check_store(lambda: MemoryStore(ROOM), stored=lambda _: {})


@pytest.mark.slow
async def test_a_store_whose_names_depend_on_the_interpreter_is_found(tmp_path):
    make = partial(HashingStore, tmp_path)
    await check_store(make)
    with pytest.raises(AssertionError, match="get_into: expected") as caught:
        await check_store(make, reopen=make)
    assert "interpreters find each other" in caught.value.__notes__[-1]


@pytest.mark.slow
async def test_a_store_that_cannot_be_made_elsewhere_is_found():
    reopen = partial(FileStore, "/dev/null/nowhere")
    with pytest.raises(
        AssertionError, match=r"(?s)PYTHONHASHSEED=1 ended .*cannot keep"
    ):
        await check_processes(lambda: MemoryStore(ROOM), reopen)
