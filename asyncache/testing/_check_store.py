"""The contract of a store as checks that any store can be put to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import anyio

from asyncache.core import ClosedError, PageKey, PageSpace
from asyncache.stores import PageBuffers, Status, Store
from asyncache.testing._cancel import Cancellation, cancel_after
from asyncache.testing._nth import cancel_nth, noting
from asyncache.testing._samples import (
    CUTS,
    LARGE_SPACE,
    OTHER_SPACE,
    SPACE,
    Cut,
    content,
    fill,
    new_keys,
    new_source,
    new_target,
    one_buffer,
    views,
)

StoreMaker = Callable[[], AbstractAsyncContextManager[Store]]

_NUM_LARGE = 16
_PATTERN = b"\x5a"


async def check_store(make_store: StoreMaker) -> None:
    """Raise AssertionError unless a store keeps the contract.

    Needs no pytest::

        await check_store(lambda: FileStore(directory))

    Args:
        make_store: Returns a store as a context manager, once for each law. The
            stores may share what is behind them: each law uses pages of its own,
            different from run to run. 16 MiB must fit without eviction.

    Raises:
        AssertionError: If a law is broken; a note names the law.
    """
    for law in _LAWS:
        async with make_store() as store:
            with noting(f"{store!r} breaks the law: {law.__name__.strip('_')}"):
                await law(store)


async def _what_is_put_is_read_whatever_the_buffers(store: Store) -> None:
    for cut_source in CUTS:
        keys = new_keys(3)
        sources = [views(content(key), cut_source(key.space)) for key in keys]
        _expect(await store.put(keys, sources), [Status.HIT] * 3, "put")
        _expect(await store.contains(keys), [True] * 3, "contains")
        for cut_target in CUTS:
            await _expect_content(store, keys, cut_target)


async def _layers_are_read_by_range(store: Store) -> None:
    [key] = await _put_new(store, 1)
    num_layers, layer_bytes = key.space.num_layers, key.space.layer_bytes
    for start in range(num_layers):
        for stop in range(start + 1, num_layers + 1):
            for sizes in ([stop - start], [1] * (stop - start)):
                target = views(
                    bytearray((stop - start) * layer_bytes),
                    [size * layer_bytes for size in sizes],
                )
                layers = range(start, stop)
                _expect(
                    await store.get_into([key], [target], layers),
                    [Status.HIT],
                    f"get_into of {layers}",
                )
                expected = content(key)[start * layer_bytes : stop * layer_bytes]
                _expect(b"".join(target), expected, f"bytes of {layers}")


async def _a_page_is_written_once(store: Store) -> None:
    keys = await _put_new(store, 2)
    other = [[memoryview(bytes(key.space.page_bytes))] for key in keys]
    _expect(await store.put(keys, other), [Status.HIT] * 2, "put again")
    await _expect_content(store, keys)


async def _a_missing_page_is_a_miss_and_costs_the_others_nothing(store: Store) -> None:
    keys = new_keys(5)
    there = [keys[index] for index in (0, 2, 4)]
    await _put(store, there)
    _expect(
        await store.contains(keys), [True, False, True, False, True], "contains of some"
    )
    for layers in (None, range(1, 3)):
        targets = [new_target(key, layers) for key in keys]
        _expect(
            await store.get_into(keys, targets, layers),
            [Status.HIT, Status.MISS, Status.HIT, Status.MISS, Status.HIT],
            f"get_into of some, layers {layers}",
        )
    await _expect_content(store, there)


async def _a_page_may_be_named_twice_in_a_batch(store: Store) -> None:
    [key] = new_keys(1)
    await _put(store, [key, key])
    await _expect_content(store, [key, key])
    _expect(await store.contains([key, key]), [True, True], "contains")
    await store.remove([key, key])
    _expect(await store.contains([key]), [False], "contains once removed")


async def _an_empty_batch_is_answered_emptily(store: Store) -> None:
    _expect(await store.contains([]), [], "contains")
    _expect(await store.get_into([], []), [], "get_into")
    _expect(await store.put([], []), [], "put")
    await store.remove([])


async def _wrong_lengths_are_refused_and_change_nothing(store: Store) -> None:
    [key] = new_keys(1)
    size, layer = key.space.page_bytes, key.space.layer_bytes
    for sizes in ([], [size - 1], [size + 1], [size - layer], [1, size - 1], [size, 0]):
        page = views(bytearray(sum(sizes)), sizes)
        await _expect_error(ValueError, partial(store.put, [key], [page]))
        await _expect_error(ValueError, partial(store.get_into, [key], [page]))
    await _expect_error(ValueError, partial(store.put, [key], []))
    await _expect_error(ValueError, partial(store.get_into, [], [new_target(key)]))
    for layers in (range(0), range(5), range(-1, 3), range(0, 4, 2), range(2, 1)):
        page = [memoryview(bytearray(len(layers) * layer))]
        await _expect_error(ValueError, partial(store.get_into, [key], [page], layers))
    _expect(await store.contains([key]), [False], "contains")


async def _calls_may_overlap(store: Store) -> None:
    shared = new_keys(4)

    async def use() -> None:
        own = new_keys(4)
        await _put(store, own + shared)
        await _expect_content(store, shared + own)
        await store.remove(own)
        _expect(await store.contains(own), [False] * 4, "contains once removed")

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(use)
    await _expect_content(store, shared)


async def _spaces_do_not_share(store: Store) -> None:
    [key] = await _put_new(store, 1)
    twin = PageKey(key.hash, OTHER_SPACE)
    _expect(await store.contains([twin]), [False], "contains in another space")
    await _put(store, [twin])
    await _expect_content(store, [key, twin])
    await store.remove([key])
    _expect(await store.contains([key, twin]), [False, True], "contains once removed")


async def _a_removed_page_is_gone_and_may_be_put_again(store: Store) -> None:
    keys = await _put_new(store, 2)
    await store.remove([keys[0], *new_keys(1)])
    _expect(await store.contains(keys), [False, True], "contains")
    _expect(
        await store.get_into(keys, [new_target(key) for key in keys]),
        [Status.MISS, Status.HIT],
        "get_into",
    )
    await _put(store, keys)
    await _expect_content(store, keys)


async def _opening_and_closing_twice_is_harmless(store: Store) -> None:
    await store.open()
    [key] = await _put_new(store, 1)
    await store.open()
    await _expect_content(store, [key])
    await store.aclose()
    await store.aclose()
    page = new_target(key)
    await _expect_error(ClosedError, partial(store.contains, [key]))
    await _expect_error(ClosedError, partial(store.get_into, [key], [page]))
    await _expect_error(ClosedError, partial(store.put, [key], [page]))
    await _expect_error(ClosedError, partial(store.remove, [key]))


async def _a_cancelled_put_leaves_pages_whole_or_absent(store: Store) -> None:
    for how in Cancellation:
        num_turns, was_cancelled = 0, True
        while was_cancelled:
            keys = new_keys(_NUM_LARGE, LARGE_SPACE)
            sources = [new_source(key) for key in keys]
            put = partial(store.put, keys, sources)
            was_cancelled = await cancel_after(num_turns, put, how)
            # The sources are ours again: what is in them from now on must not matter.
            fill(sources, _PATTERN)
            await _expect_whole_or_absent(store, keys)
            await store.remove(keys)
            num_turns = 2 * num_turns + 1


async def _a_cancelled_read_lets_go_of_its_targets(store: Store) -> None:
    keys = await _put_new(store, _NUM_LARGE, LARGE_SPACE)
    for how in Cancellation:
        num_turns, was_cancelled = 0, True
        while was_cancelled:
            targets = [new_target(key) for key in keys]
            get_into = partial(store.get_into, keys, targets)
            was_cancelled = await cancel_after(num_turns, get_into, how)
            fill(targets, _PATTERN)
            await _expect_content(store, keys)
            _expect_pattern(targets)
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
        fill(pages, _PATTERN)
        await _expect_whole_or_absent(store, keys)
        _expect_pattern(pages)

    await cancel_nth(use, fresh=fresh, check=check)


_LAWS: Sequence[Callable[[Store], Awaitable[None]]] = (
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


async def _put(store: Store, keys: Sequence[PageKey]) -> None:
    sources = [new_source(key) for key in keys]
    _expect(await store.put(keys, sources), [Status.HIT] * len(keys), "put")


async def _put_new(store: Store, count: int, space: PageSpace = SPACE) -> list[PageKey]:
    keys = new_keys(count, space)
    await _put(store, keys)
    return keys


async def _expect_content(
    store: Store,
    keys: Sequence[PageKey],
    cut: Cut = one_buffer,
) -> None:
    targets = [views(bytearray(key.space.page_bytes), cut(key.space)) for key in keys]
    statuses = await store.get_into(keys, targets)
    _expect(statuses, [Status.HIT] * len(keys), "get_into")
    for key, target in zip(keys, targets, strict=True):
        _expect(b"".join(target), content(key), "bytes of a page")


async def _expect_whole_or_absent(store: Store, keys: Sequence[PageKey]) -> None:
    targets = [new_target(key) for key in keys]
    statuses = await store.get_into(keys, targets)
    for key, status, target in zip(keys, statuses, targets, strict=True):
        if status is Status.HIT:
            _expect(b"".join(target), content(key), "bytes of a page")
        else:
            _expect(status, Status.MISS, "get_into of a page that is not there")


def _expect_pattern(pages: Sequence[PageBuffers]) -> None:
    for page in pages:
        untouched = _PATTERN * sum(map(len, page))
        _expect(b"".join(page), untouched, "a buffer after the call that borrowed it")


async def _expect_error(
    kind: type[Exception], call: Callable[[], Awaitable[object]]
) -> None:
    try:
        answer = await call()
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}, got the answer {answer!r}")


def _expect(actual: object, expected: object, what: str) -> None:
    if actual != expected:
        raise AssertionError(f"{what}: expected {expected!r:.200}, got {actual!r:.200}")
