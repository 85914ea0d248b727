"""All that an embedder can do with a cache, in scenarios that may be broken anywhere.

Each does the right thing whatever its hits come to, as embedders must: it computes what
is not there, and shares nothing that it computed over bytes that never came.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from asyncache.engine import Hit, ReadOnly, Request, WriteBack
from asyncache.stores import MemoryStore, Store, TieredStore
from tests.engine.scene import (
    KV,
    LAYOUT,
    NAMESPACES,
    PAGE,
    compute,
    content,
    read,
    turns,
)
from tests.engine.stage import (
    NEW,
    NEWER,
    OTHER,
    PAGE_BYTES,
    PLAIN,
    STORED,
    TOKENS,
    Scenario,
    Stage,
    longer,
    unless_closed,
)


async def compute_over(stage: Stage, request: Request, tokens, hit: Hit) -> None:
    """Compute and share while the hit is on its way; do it again if it falls short."""
    num_hit = hit.num_tokens
    request.extend(len(tokens))
    with stage.cache.forward([request]):
        await turns(1)
        compute(stage.view.device, request, tokens, num_hit // PAGE)
    if hit.num_tokens == num_hit:
        request.commit(len(tokens))
    await hit.wait()
    if hit.num_tokens < num_hit:
        await stage.finish(request, tokens, hit)


# One request.


async def hits_the_device(stage: Stage) -> None:
    await stage.serve(NEW)
    await stage.serve(longer(NEW))


async def restores(stage: Stage) -> None:
    await stage.serve(TOKENS)


async def reads_layer_by_layer(stage: Stage) -> None:
    seen, device = [], stage.view.device
    with stage.request(TOKENS) as request:
        hit = await request.restore()
        pages = array("i", request.page_table["kv"])
        request.extend(len(TOKENS))
        with stage.cache.forward([request]):
            for layer in range(KV.num_layers):
                await hit.gates.wait(layer)
                whole = LAYOUT.space(KV).layer_bytes
                here = slice(layer * whole, (layer + 1) * whole)
                seen.append((here, [read(device, page)[here] for page in pages]))
        await hit.wait()
        for here, slices in seen:
            for position in range(hit.num_tokens // PAGE):
                assert slices[position] == content(TOKENS, position)[here]
        stage.view.finish(request, TOKENS, hit.num_tokens)


async def commits_over_a_load(stage: Stage) -> None:
    with stage.request(TOKENS, reserve_tokens=PAGE) as request:
        hit = await request.restore()
        request.append(longer(TOKENS)[len(TOKENS) :])
        await compute_over(stage, request, longer(TOKENS), hit)


async def ends_over_a_load(stage: Stage) -> None:
    tokens = longer(TOKENS)
    with stage.request(TOKENS, reserve_tokens=PAGE) as request:
        hit = await request.restore()
        request.append(tokens[len(TOKENS) :])
        request.extend(len(tokens))
        compute(stage.view.device, request, tokens, hit.num_tokens // PAGE)
        request.commit(len(tokens))
    await stage.cache.step()
    await stage.cache.drain()


async def decodes(stage: Stage) -> None:
    tokens = longer(TOKENS)
    with stage.request(TOKENS, reserve_tokens=2 * PAGE) as request:
        await stage.finish(request, TOKENS, await request.restore())
        for token in tokens[len(TOKENS) :]:
            request.append([token])
            request.extend(request.num_tokens)
            await stage.cache.step()
        request.append([1, 2, 3])  # guessed, and wrong
        request.extend(request.num_tokens)
        await stage.cache.step()
        request.truncate(len(tokens))
        stage.view.finish(request, tokens, len(TOKENS) // PAGE * PAGE)


async def suspends(stage: Stage) -> None:
    with stage.request(TOKENS) as request:
        await stage.finish(request, TOKENS, await request.restore())
        request.suspend()
        await stage.cache.step()
        await stage.finish(request, TOKENS, await request.restore())


async def suspends_a_load(stage: Stage) -> None:
    with stage.request(TOKENS) as request:
        await request.restore()
        await turns(2)
        request.suspend()
        hit = await request.restore()
        await compute_over(stage, request, TOKENS, hit)


async def gives_up_a_restore(stage: Stage) -> None:
    with stage.request(TOKENS) as request:
        with anyio.move_on_after(0):
            await request.restore()
        stage.view.finish(request, TOKENS, 0)


async def is_aborted_and_comes_again(stage: Stage) -> None:
    with suppress(EOFError), stage.request(TOKENS) as request:
        await request.restore()
        await turns(2)
        raise EOFError
    await stage.serve(TOKENS)


async def is_late(stage: Stage) -> None:
    with stage.request(TOKENS) as request:
        hit = await request.restore()
        await turns(2)
        if not hit.settled:
            stage.view.expire(request._state)
        await stage.finish(request, TOKENS, hit)
    await stage.view.serve(OTHER, deadline_s=0)


# Several requests.


async def share_a_load(stage: Stage) -> None:
    with stage.request(TOKENS) as one, stage.request(TOKENS) as two:
        hits = [await request.restore() for request in (one, two)]
        for request, hit in zip((one, two), hits, strict=True):
            await stage.finish(request, TOKENS, hit)


async def share_a_load_in_tasks(stage: Stage) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(stage.serve, TOKENS)
        group.start_soon(stage.serve, longer(TOKENS))
        await stage.serve(TOKENS)


async def load_one_below_another(stage: Stage) -> None:
    short = TOKENS[: 2 * PAGE + 1]
    with stage.request(short) as one, stage.request(TOKENS) as two:
        hits = [await request.restore() for request in (one, two)]
        await compute_over(stage, one, short, hits[0])
        await compute_over(stage, two, TOKENS, hits[1])


async def are_siblings(stage: Stage) -> None:
    with stage.request(NEW) as one:
        await stage.finish(one, NEW, await one.restore())
        with stage.request(NEW, reserve_tokens=PAGE) as two:
            hit = await two.restore()
            two.append(longer(NEW)[len(NEW) :])
            await compute_over(stage, two, longer(NEW), hit)


async def wait_for_room(stage: Stage) -> None:
    async def hold() -> None:
        with stage.request(NEW) as request:
            hit = await request.restore()
            await turns(6)
            await stage.finish(request, NEW, hit)

    async with anyio.create_task_group() as group:
        group.start_soon(hold)
        await turns(2)
        await stage.serve(TOKENS)


async def leave_their_bracket_open(stage: Stage) -> None:
    with stage.request(NEW) as request:
        request.extend(len(NEW))
        bracket = stage.cache.forward([request])
        with bracket:
            request.suspend()
            await stage.serve(TOKENS)


async def of_tenants(stage: Stage) -> None:
    for namespace in (*NAMESPACES, "tenant-1"):
        await stage.serve(TOKENS, namespace)


async def evict_each_other(stage: Stage) -> None:
    for tokens in (TOKENS, NEW, TOKENS):
        await stage.serve(tokens)
        await stage.cache.step()


# The cache as a whole.


async def prefetches(stage: Stage) -> None:
    await stage.cache.prefetch(TOKENS)
    await stage.serve(TOKENS)


async def drains(stage: Stage) -> None:
    await stage.serve(NEW)
    await stage.cache.drain()
    await stage.serve(longer(NEW))
    await stage.cache.drain()


async def steps(stage: Stage) -> None:
    served = anyio.Event()

    async def handle() -> None:
        try:
            await stage.serve(TOKENS)
        finally:
            served.set()

    async with anyio.create_task_group() as group:
        group.start_soon(handle)
        while not served.is_set():
            await stage.cache.step()


async def launches(stage: Stage) -> None:
    with (
        stage.request(TOKENS) as one,
        stage.request(OTHER) as two,
    ):
        with stage.request(PLAIN[: PAGE + 1]) as never_launched:
            await never_launched.restore()
            hits = [await request.restore() for request in (one, two)]
        batch = stage.cache.launch()
        with stage.cache.forward([one, two]):
            await batch.gates.wait(0)
            await batch.gates.wait(1)
        for request, tokens, hit in zip((one, two), (TOKENS, OTHER), hits, strict=True):
            await stage.finish(request, tokens, hit)


async def reads_only(stage: Stage) -> None:
    await stage.serve(NEW)
    await stage.serve(longer(TOKENS))
    assert stage.store.pages.keys() <= STORED.keys()


async def write_back(stage: Stage) -> None:
    for tokens in (NEW, NEWER, NEW):
        await stage.serve(tokens)
        await stage.cache.drain()


async def with_all_open(stage: Stage, act: Callable[[], Awaitable[None]]) -> None:
    """Do something while a load, an offload and a lookup run."""

    async def serve_unless_closed() -> None:
        with unless_closed(stage):
            await stage.serve(OTHER)

    async with anyio.create_task_group() as group:
        with (
            stage.request(TOKENS) as loading,
            stage.request(NEW) as computing,
        ):
            reserved = await computing.restore()
            hit = await loading.restore()
            await stage.finish(computing, NEW, reserved)
            group.start_soon(serve_unless_closed)
            await turns(1)
            await act()
            with unless_closed(stage):
                await stage.finish(loading, TOKENS, hit)


def resets(revision: str | None) -> Callable[[Stage], Awaitable[None]]:
    async def play(stage: Stage) -> None:
        async def act() -> None:
            stage.cache.reset(revision=revision)

        await with_all_open(stage, act)
        await stage.serve(TOKENS)

    return play


async def detaches_and_attaches(stage: Stage) -> None:
    await with_all_open(stage, stage.cache.detach)
    await stage.attach(stage.spare)
    await stage.cache.drain()
    await stage.serve(OTHER)


async def attaches(stage: Stage) -> None:
    await stage.serve(NEW)
    await stage.attach(stage.spare)
    await stage.cache.drain()
    await stage.serve(TOKENS)


async def closes(stage: Stage) -> None:
    async def act() -> None:
        await turns(2)  # copies have begun
        await stage.cache.aclose()

    await with_all_open(stage, act)


async def closes_while_all_wait_for_room(stage: Stage) -> None:
    async def act() -> None:
        await turns(1)
        await stage.cache.aclose()

    with stage.request(NEWER) as computing, stage.cache.forward([computing]):
        computing.extend(len(NEWER))
        await with_all_open(stage, act)


# The table.


def behind_memory(store: Store) -> Store:
    """Return the store with a faster one in front, too small for a prompt."""
    return TieredStore([MemoryStore(2 * PAGE_BYTES), store])


ATTACHES = Scenario(attaches, has_store=False)
DETACHES_AND_ATTACHES = Scenario(detaches_and_attaches)
SCENARIOS = [
    Scenario(hits_the_device),
    Scenario(restores),
    Scenario(reads_layer_by_layer),
    Scenario(commits_over_a_load),
    Scenario(ends_over_a_load),
    Scenario(decodes),
    Scenario(suspends),
    Scenario(suspends_a_load),
    Scenario(gives_up_a_restore),
    Scenario(is_aborted_and_comes_again),
    Scenario(is_late),
    Scenario(share_a_load),
    Scenario(share_a_load_in_tasks),
    Scenario(load_one_below_another),
    Scenario(are_siblings),
    Scenario(wait_for_room, num_pages=5),
    Scenario(leave_their_bracket_open),
    Scenario(of_tenants),
    Scenario(evict_each_other, num_pages=5),
    Scenario(prefetches),
    Scenario(drains),
    Scenario(steps),
    Scenario(launches, arguments={"launch": "batch"}),
    Scenario(write_back, arguments={"writes": WriteBack(low_water=5)}, num_pages=6),
    Scenario(reads_only, arguments={"writes": ReadOnly()}),
    Scenario(evict_each_other, around=behind_memory, num_pages=5, name="tiers"),
    Scenario(resets(None), name="resets"),
    Scenario(resets("v2"), name="resets_for_new_weights"),
    DETACHES_AND_ATTACHES,
    ATTACHES,
    Scenario(closes),
    Scenario(closes_while_all_wait_for_room, num_pages=12),
]
