"""What a store must do for whoever is alone with it, and whoever is cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from asyncache.core import ClosedError, PageKey
from asyncache.stores import PageBuffers, Status, Store
from asyncache.testing._cancel import Cancellation, cancel_after
from asyncache.testing._nth import cancel_nth
from asyncache.testing._samples import (
    CUTS,
    LARGE_SPACE,
    OTHER_SPACE,
    content,
    fill,
    new_keys,
    new_source,
    new_target,
    views,
)
from asyncache.testing._store_asserts import (
    PATTERN,
    Law,
    expect,
    expect_content,
    expect_error,
    expect_pattern,
    expect_whole_or_absent,
    put,
    put_new,
    together,
)

_NUM_LARGE = 16


async def _what_is_put_is_read_whatever_the_buffers(store: Store) -> None:
    for cut_source in CUTS:
        keys = new_keys(3)
        sources = [views(content(key), cut_source(key.space)) for key in keys]
        expect(await store.put(keys, sources), [Status.HIT] * 3, "put")
        expect(await store.contains(keys), [True] * 3, "contains")
        for cut_target in CUTS:
            await expect_content(store, keys, cut_target)


async def _layers_are_read_by_range(store: Store) -> None:
    [key] = await put_new(store, 1)
    num_layers, layer_bytes = key.space.num_layers, key.space.layer_bytes
    for start in range(num_layers):
        for stop in range(start + 1, num_layers + 1):
            for sizes in ([stop - start], [1] * (stop - start)):
                target = views(
                    bytearray((stop - start) * layer_bytes),
                    [size * layer_bytes for size in sizes],
                )
                layers = range(start, stop)
                expect(
                    await store.get_into([key], [target], layers),
                    [Status.HIT],
                    f"get_into of {layers}",
                )
                expected = content(key)[start * layer_bytes : stop * layer_bytes]
                expect(b"".join(target), expected, f"bytes of {layers}")


async def _a_page_is_written_once(store: Store) -> None:
    keys = await put_new(store, 2)
    other = [[memoryview(bytes(key.space.page_bytes))] for key in keys]
    expect(await store.put(keys, other), [Status.HIT] * 2, "put again")
    await expect_content(store, keys)


async def _a_missing_page_is_a_miss_and_costs_the_others_nothing(store: Store) -> None:
    keys = new_keys(5)
    there = [keys[index] for index in (0, 2, 4)]
    await put(store, there)
    expect(
        await store.contains(keys), [True, False, True, False, True], "contains of some"
    )
    for layers in (None, range(1, 3)):
        targets = [new_target(key, layers) for key in keys]
        expect(
            await store.get_into(keys, targets, layers),
            [Status.HIT, Status.MISS, Status.HIT, Status.MISS, Status.HIT],
            f"get_into of some, layers {layers}",
        )
    await expect_content(store, there)


async def _a_page_may_be_named_twice_in_a_batch(store: Store) -> None:
    [key] = new_keys(1)
    await put(store, [key, key])
    await expect_content(store, [key, key])
    expect(await store.contains([key, key]), [True, True], "contains")
    await store.remove([key, key])
    expect(await store.contains([key]), [False], "contains once removed")


async def _an_empty_batch_is_answered_emptily(store: Store) -> None:
    expect(await store.contains([]), [], "contains")
    expect(await store.get_into([], []), [], "get_into")
    expect(await store.put([], []), [], "put")
    await store.remove([])


async def _wrong_lengths_are_refused_and_change_nothing(store: Store) -> None:
    [key] = new_keys(1)
    size, layer = key.space.page_bytes, key.space.layer_bytes
    for sizes in ([], [size - 1], [size + 1], [size - layer], [1, size - 1], [size, 0]):
        page = views(bytearray(sum(sizes)), sizes)
        await expect_error(ValueError, partial(store.put, [key], [page]))
        await expect_error(ValueError, partial(store.get_into, [key], [page]))
    await expect_error(ValueError, partial(store.put, [key], []))
    await expect_error(ValueError, partial(store.get_into, [], [new_target(key)]))
    for layers in (range(0), range(5), range(-1, 3), range(0, 4, 2), range(2, 1)):
        page = [memoryview(bytearray(len(layers) * layer))]
        await expect_error(ValueError, partial(store.get_into, [key], [page], layers))
    expect(await store.contains([key]), [False], "contains")


async def _calls_may_overlap(store: Store) -> None:
    shared = new_keys(4)

    async def use() -> None:
        own = new_keys(4)
        await put(store, own + shared)
        await expect_content(store, shared + own)
        await store.remove(own)
        expect(await store.contains(own), [False] * 4, "contains once removed")

    await together(*[use] * 8)
    await expect_content(store, shared)


async def _spaces_do_not_share(store: Store) -> None:
    [key] = await put_new(store, 1)
    twin = PageKey(key.hash, OTHER_SPACE)
    expect(await store.contains([twin]), [False], "contains in another space")
    await put(store, [twin])
    await expect_content(store, [key, twin])
    await store.remove([key])
    expect(await store.contains([key, twin]), [False, True], "contains once removed")


async def _a_removed_page_is_gone_and_may_be_put_again(store: Store) -> None:
    keys = await put_new(store, 2)
    await store.remove([keys[0], *new_keys(1)])
    expect(await store.contains(keys), [False, True], "contains")
    expect(
        await store.get_into(keys, [new_target(key) for key in keys]),
        [Status.MISS, Status.HIT],
        "get_into",
    )
    await put(store, keys)
    await expect_content(store, keys)


async def _opening_and_closing_twice_is_harmless(store: Store) -> None:
    await store.open()
    [key] = await put_new(store, 1)
    await store.open()
    await expect_content(store, [key])
    await store.aclose()
    await store.aclose()
    page = new_target(key)
    await expect_error(ClosedError, partial(store.contains, [key]))
    await expect_error(ClosedError, partial(store.get_into, [key], [page]))
    await expect_error(ClosedError, partial(store.put, [key], [page]))
    await expect_error(ClosedError, partial(store.remove, [key]))


async def _a_cancelled_put_leaves_pages_whole_or_absent(store: Store) -> None:
    for how in Cancellation:
        num_turns, was_cancelled = 0, True
        while was_cancelled:
            keys = new_keys(_NUM_LARGE, LARGE_SPACE)
            sources = [new_source(key) for key in keys]
            call = partial(store.put, keys, sources)
            was_cancelled = await cancel_after(num_turns, call, how)
            # The sources are ours again: what is in them from now on must not matter.
            fill(sources, PATTERN)
            await expect_whole_or_absent(store, keys)
            await store.remove(keys)
            num_turns = 2 * num_turns + 1


async def _a_cancelled_read_lets_go_of_its_targets(store: Store) -> None:
    keys = await put_new(store, _NUM_LARGE, LARGE_SPACE)
    for how in Cancellation:
        num_turns, was_cancelled = 0, True
        while was_cancelled:
            targets = [new_target(key) for key in keys]
            get_into = partial(store.get_into, keys, targets)
            was_cancelled = await cancel_after(num_turns, get_into, how)
            fill(targets, PATTERN)
            await expect_content(store, keys)
            expect_pattern(targets)
            num_turns = 2 * num_turns + 1
    await store.remove(keys)


async def _any_await_may_be_the_last(store: Store) -> None:
    @asynccontextmanager
    async def fresh() -> AsyncIterator[tuple[list[PageKey], list[PageBuffers]]]:
        keys = new_keys(2)
        yield keys, [new_source(key) for key in keys]

    async def use(state: tuple[list[PageKey], list[PageBuffers]]) -> None:
        keys, pages = state
        await store.put(keys, pages)
        await store.contains(keys)
        await store.get_into(keys, pages)
        await store.remove(keys[:1])

    async def check(state: tuple[list[PageKey], list[PageBuffers]]) -> None:
        keys, pages = state
        fill(pages, PATTERN)
        await expect_whole_or_absent(store, keys)
        expect_pattern(pages)

    await cancel_nth(use, fresh=fresh, check=check)


BASIC_LAWS: Sequence[Law] = (
    _what_is_put_is_read_whatever_the_buffers,
    _layers_are_read_by_range,
    _a_page_is_written_once,
    _a_missing_page_is_a_miss_and_costs_the_others_nothing,
    _a_page_may_be_named_twice_in_a_batch,
    _an_empty_batch_is_answered_emptily,
    _wrong_lengths_are_refused_and_change_nothing,
    _calls_may_overlap,
    _spaces_do_not_share,
    _a_removed_page_is_gone_and_may_be_put_again,
    _opening_and_closing_twice_is_harmless,
    _a_cancelled_put_leaves_pages_whole_or_absent,
    _a_cancelled_read_lets_go_of_its_targets,
    _any_await_may_be_the_last,
)
