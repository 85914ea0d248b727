"""What a store must do when it is asked for all that it has, by whoever tidies up."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial, wraps

import anyio.lowlevel

from asyncache.core import ClosedError, PageKey, StoreError
from asyncache.stores import Store
from asyncache.testing._nth import cancel_nth
from asyncache.testing._samples import LARGE_SPACE, OTHER_SPACE, new_keys
from asyncache.testing._store_asserts import (
    Law,
    expect,
    expect_content,
    expect_error,
    put,
    put_new,
    together,
)

_NUM_ROUNDS = 8
_NO_LISTING = re.compile(r"\w+ cannot list its pages")


def _for_those_that_list(law: Callable[[Store], Awaitable[None]]) -> Law:
    """Excuse a store that says, by name, that it or one inside cannot list pages."""

    @wraps(law)
    async def excused(store: Store) -> None:
        try:
            await anext(store.keys())
        except StopAsyncIteration:
            pass
        except StoreError as error:
            if _NO_LISTING.match(str(error)):
                return
            raise
        await law(store)

    return excused


@_for_those_that_list
async def _what_is_put_is_listed_and_what_is_removed_is_not(store: Store) -> None:
    keys = await put_new(store, 3)
    twin = PageKey(keys[0].hash, OTHER_SPACE)
    large = await put_new(store, 2, LARGE_SPACE)
    await put(store, [twin])
    absent = new_keys(2)
    everything = [*keys, twin, *large, *absent]
    expect(await _listed(store, everything), {*keys, twin, *large}, "keys")
    await store.remove([keys[0], large[1]])
    expect(await _listed(store, everything), {*keys[1:], twin, large[0]}, "keys")


@_for_those_that_list
async def _pages_that_stay_are_listed_while_others_come_and_go(store: Store) -> None:
    staying = [*await put_new(store, 3), *await put_new(store, 3, OTHER_SPACE)]
    is_over = False

    async def come_and_go() -> None:
        while not is_over:
            await store.remove(await put_new(store, 4))
            await anyio.lowlevel.checkpoint()

    async def list_all() -> None:
        nonlocal is_over
        for _ in range(_NUM_ROUNDS):
            expect(await _listed(store, staying), {*staying}, "keys of those that stay")
        is_over = True

    await together(come_and_go, come_and_go, list_all)


@_for_those_that_list
async def _who_leaves_a_listing_leaves_nothing_behind(store: Store) -> None:
    keys = await put_new(store, 2)

    @asynccontextmanager
    async def fresh() -> AsyncIterator[Store]:
        yield store

    async def list_all(store: Store) -> None:
        expect(await _listed(store, keys), {*keys}, "keys")

    await anext(store.keys())
    await cancel_nth(list_all, fresh=fresh, check=list_all)


@_for_those_that_list
async def _a_closed_store_lists_nothing(store: Store) -> None:
    await put_new(store, 2)
    left = store.keys()
    await anext(left)
    await store.aclose()

    await expect_error(ClosedError, partial(_listed, store, []))


async def _collecting_garbage_costs_no_page(store: Store) -> None:
    keys = await put_new(store, 3)
    num_bytes = await store.collect_garbage()
    assert num_bytes >= 0, f"{num_bytes} bytes were freed"
    await expect_content(store, keys)


async def _listed(store: Store, asked: Iterable[PageKey]) -> set[PageKey]:
    """Return which of these are among the keys; others share what is behind it."""
    asked, found = {*asked}, set[PageKey]()
    async for key in store.keys():
        if key in asked:
            found.add(key)
    return found


LISTING_LAWS: Sequence[Law] = (
    _what_is_put_is_listed_and_what_is_removed_is_not,
    _pages_that_stay_are_listed_while_others_come_and_go,
    _who_leaves_a_listing_leaves_nothing_behind,
    _a_closed_store_lists_nothing,
    _collecting_garbage_costs_no_page,
)
