"""What the laws of a store are told with: puts that must hit, bytes that must be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any

import anyio

from asyncache.core import PageKey, PageSpace
from asyncache.stores import PageBuffers, Status, Store
from asyncache.testing._samples import (
    SPACE,
    Cut,
    content,
    new_keys,
    new_source,
    new_target,
    one_buffer,
    views,
)

Law = Callable[[Store], Awaitable[None]]
"""Raises AssertionError if a store that is open breaks it."""

PATTERN = b"\x5a"
"""What a caller writes into a buffer that is its own again."""


async def put(store: Store, keys: Sequence[PageKey]) -> None:
    sources = [new_source(key) for key in keys]
    expect(await store.put(keys, sources), [Status.HIT] * len(keys), "put")


async def put_new(store: Store, count: int, space: PageSpace = SPACE) -> list[PageKey]:
    keys = new_keys(count, space)
    await put(store, keys)
    return keys


async def expect_content(
    store: Store,
    keys: Sequence[PageKey],
    cut: Cut = one_buffer,
) -> None:
    targets = [views(bytearray(key.space.page_bytes), cut(key.space)) for key in keys]
    statuses = await store.get_into(keys, targets)
    expect(statuses, [Status.HIT] * len(keys), "get_into")
    for key, target in zip(keys, targets, strict=True):
        expect(b"".join(target), content(key), "bytes of a page")


async def expect_whole_or_absent(store: Store, keys: Sequence[PageKey]) -> None:
    targets = [new_target(key) for key in keys]
    statuses = await store.get_into(keys, targets)
    for key, status, target in zip(keys, statuses, targets, strict=True):
        if status is Status.HIT:
            expect(b"".join(target), content(key), "bytes of a page")
        else:
            expect(status, Status.MISS, "get_into of a page that is not there")


def expect_pattern(pages: Sequence[PageBuffers]) -> None:
    for page in pages:
        untouched = PATTERN * sum(map(len, page))
        expect(b"".join(page), untouched, "a buffer after the call that borrowed it")


async def expect_error(
    kind: type[Exception], call: Callable[[], Awaitable[object]]
) -> None:
    try:
        answer = await call()
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}, got the answer {answer!r}")


def expect(actual: object, expected: object, what: str) -> None:
    if actual != expected:
        raise AssertionError(f"{what}: expected {expected!r:.200}, got {actual!r:.200}")


def expect_in(
    actual: Collection[object], allowed: Collection[object], what: str
) -> None:
    """Raise unless nothing but what is allowed was answered."""
    odd = [answer for answer in actual if answer not in allowed]
    if odd:
        raise AssertionError(f"{what}: got {odd!r:.200}, none of {allowed!r}")


async def together(*calls: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run calls at the same time; the first failure ends all, and is raised."""
    try:
        async with anyio.create_task_group() as tasks:
            for call in calls:
                tasks.start_soon(call)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
