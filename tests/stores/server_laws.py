"""What holds for every store on a server, whatever becomes of that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import anyio
import anyio.lowlevel
import anyio.to_thread

from asyncache.core import PageKey, PageSpace
from asyncache.stores import PageBuffers, Status, Store
from asyncache.testing import CancelStyle, cancel_nth
from asyncache.testing._cancel import Cancellation, cancel_after
from asyncache.testing._samples import (
    LARGE_SPACE,
    fill,
    new_keys,
    new_source,
    new_target,
)
from tests.engine.scene import PAGE, prompt, scene
from tests.servers import ServerProcess
from tests.stores.proxy import Proxy
from tests.stores.segments import get, put

HIT, MISS = Status.HIT, Status.MISS
PATTERN = b"\x5a"
# By when what should end has ended, on the busiest machine; what would end only with
# the time of its call takes longer.
GRACE_S = 20.0


def expect_untouched(pages: Sequence[PageBuffers]) -> None:
    for page in pages:
        for buffer in page:
            assert buffer == PATTERN * len(buffer)


async def returns(store: Store, *keys: PageKey) -> None:
    """Wait until pages are hits again, as they must without any help."""
    good = [HIT] * len(keys)
    with anyio.fail_after(60):
        while await put(store, keys) != good or await get(store, keys) != good:
            await anyio.lowlevel.checkpoint()


async def cancel(
    task: asyncio.Future[object], scope: anyio.CancelScope, how: Cancellation
) -> None:
    """Cancel a task that waits in a scope, in one of the ways there are."""
    by_scope = how in {Cancellation.SCOPE, Cancellation.SCOPE_AND_TASK}
    scope.cancel() if by_scope else task.cancel()
    if how in {Cancellation.TASK_TWICE, Cancellation.SCOPE_AND_TASK}:
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        task.cancel()


async def a_read_that_is_cancelled_under_a_held_answer_lets_go(
    store: Store, proxy: Proxy, left: int, how: Cancellation
) -> None:
    """``left`` bytes of the answer have come when it is held."""
    keys, scope = new_keys(4, LARGE_SPACE), anyio.CancelScope()
    await put(store, keys)
    targets = [new_target(key) for key in keys]
    proxy.left, proxy.holds = left, True
    answers: list[Status] = []

    async def read() -> None:
        with scope:
            answers.extend(await store.get_into(keys, targets))

    task = asyncio.ensure_future(read())
    await proxy.is_held.wait()
    await cancel(task, scope, how)
    await asyncio.wait([task])
    assert task.cancelled() or scope.cancelled_caught
    assert answers == []
    fill(targets, PATTERN)
    proxy.release()
    for _ in range(20):
        await anyio.lowlevel.checkpoint()
    proxy.calm()
    assert await get(store, keys) == [HIT] * 4
    expect_untouched(targets)


async def an_answer_that_comes_byte_by_byte_ends_with_the_time(
    patient: Store, hasty: Store, proxy: Proxy
) -> None:
    """``hasty`` has less time than a page takes, so."""
    keys = new_keys(2, LARGE_SPACE)
    async with patient:
        await put(patient, keys)
    async with hasty:
        await returns(hasty, *keys)
        proxy.drips = True
        targets = [new_target(key) for key in keys]
        with anyio.fail_after(GRACE_S):
            statuses = await hasty.get_into(keys, targets)
        assert statuses == [Status.UNAVAILABLE] * 2
        fill(targets, PATTERN)
        proxy.calm()
        await returns(hasty, *new_keys(1))
        expect_untouched(targets)


async def opening_may_be_cancelled_and_tried_again(
    make: Callable[[], Store], style: CancelStyle
) -> None:
    class Fresh:
        async def __aenter__(self) -> Store:
            self.store = make()
            return self.store

        async def __aexit__(self, *_: object) -> None:
            await self.store.aclose()

    async def opens(store: Store) -> None:
        await store.open()

    async def check(store: Store) -> None:
        await store.open()
        assert await put(store, new_keys(1)) == [HIT]

    await cancel_nth(opens, fresh=Fresh, check=check, styles=[style])


async def calls_may_be_cancelled_at_any_turn(
    store: Store, spaces: Sequence[PageSpace], how: Cancellation
) -> None:
    """Pages of these spaces are put and read, and cut short later each time."""
    num_turns, was_cancelled = 0, True
    while was_cancelled:
        keys = [key for space in spaces for key in new_keys(1, space)]
        pages = [new_source(key) for key in keys]

        async def use(keys=keys, pages=pages) -> None:
            await store.put(keys, pages)
            await store.get_into(keys, pages)

        was_cancelled = await cancel_after(num_turns, use, how)
        fill(pages, PATTERN)
        assert set(await get(store, keys)) <= {HIT, MISS}
        expect_untouched(pages)
        await store.remove(keys)
        num_turns = 2 * num_turns + 1


async def a_cache_serves_on_while_its_server_dies_and_hits_return(
    store: Store, server: ServerProcess, *, num_deaths: int = 3
) -> None:
    prompts = [prompt(3, seed=seed) for seed in range(4)]
    # Room for two of four prompts: what is found again comes from the store.
    async with scene(store, num_pages=8, check=False) as view:

        async def serve_all() -> int:
            return sum([await view.serve(tokens) for tokens in prompts])

        async def hits() -> None:
            with anyio.fail_after(60):
                while await serve_all() < 4 * 2 * PAGE:
                    await view.cache.drain()

        await hits()
        for _ in range(num_deaths):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve_all)
                await anyio.lowlevel.checkpoint()
                server.kill()
            for _ in range(3):
                await serve_all()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.to_thread.run_sync, server.start)
                tasks.start_soon(serve_all)
            await hits()
        await view.rest()
