"""A client hangs up: at once its request holds nothing, or nothing but quarantine.

Real sockets, real servers. Where it happens is decided by gates, never by a clock.
"""

from __future__ import annotations

import asyncio

import anyio
import pytest

from asyncache import Limits
from examples.serve.metrics import CacheCollector
from tests.serve import fronts
from tests.serve.fronts import serving
from tests.serve.scene import (
    MAX_TOKENS,
    PATIENCE_S,
    PROMPT,
    Room,
    ask,
    completed,
    expected,
    send,
    turns,
    until,
)
from tests.serve.stages import FRESH, NUM_PREFILLS, STAGES, Stage

# From the server's word to the request's end: some hops from task to task, of which
# each layer of middleware adds a few. No forward, no gate and no clock is among them.
FEW_TURNS = 8

CASES = [
    *((case, name) for case in fronts.THAT_LEARN for name in STAGES),
    *(
        (case, name)
        for case in fronts.AROUND_THEM
        for name in ("lookup", "load that cannot be stopped", "decode")
    ),
]


def name_of(value):
    if isinstance(value, str):
        return value.replace(" ", "_")
    open_front, stream = value
    return f"{open_front.__name__}{'-stream' if stream else '-plain'}"


def num_cancelled(here: Room, state: str) -> float:
    """Return how many requests the metrics say were cancelled in a state."""
    families = {family.name: family for family in CacheCollector(here.cache).collect()}
    samples = families["asyncache_cancelled"].samples
    return sum(s.value for s in samples if s.labels["state"] == state)


async def check_gone(here: Room, stage: Stage) -> None:
    """Raise unless a request that was aborted in a stage is gone, now and later."""
    here.check_only_quarantine()
    assert (here.pool.quarantine > 0) == stage.still_written
    counters = here.cache.statistics().counters
    assert (counters.closed, counters.aborted) == (0, 1)
    assert num_cancelled(here, stage.counted_as) == 1
    stage.let_go(here)
    await here.check_clean()
    # And nobody was given a page that something still wrote.
    assert await here.answer(stage.prompt) == expected(stage.prompt, MAX_TOKENS)
    await here.check_clean()


@pytest.mark.parametrize(("case", "name"), CASES, ids=name_of)
async def test_a_client_that_hangs_up_leaves_nothing(case, name, stored):
    (open_front, stream), stage = case, STAGES[name]
    async with serving(open_front, stored, gates=stage.gates) as front:
        here = front.room
        stage.arrange(here)
        client = await ask(front.port, prompt=stage.prompt, stream=stream)
        await stage.reached(here)
        client.hang_up()
        with anyio.fail_after(PATIENCE_S):
            await front.learnt.wait()
        await turns(FEW_TURNS)
        assert front.ended.is_set()
        await check_gone(here, stage)


@pytest.mark.parametrize("name", ["lookup", "load", "decode"])
@pytest.mark.parametrize("case", fronts.THAT_DO_NOT, ids=name_of)
async def test_a_handler_that_never_learns_ends_as_if_it_were_heard(case, name, stored):
    (open_front, stream), stage = case, STAGES[name]
    async with serving(open_front, stored) as front:
        here = front.room
        stage.arrange(here)
        client = await ask(front.port, prompt=stage.prompt, stream=stream)
        await stage.reached(here)
        client.hang_up()
        await until(lambda: not front.num_connections())
        await turns(FEW_TURNS)
        # The server knows, the handler does not: its request goes on.
        assert not front.ended.is_set()
        assert here.replica.num_requests == 1
        stage.let_go(here)
        with anyio.fail_after(PATIENCE_S):
            await front.ended.wait()
        assert front.errors == []
        here.check_only_quarantine()
        counters = here.cache.statistics().counters
        assert (counters.closed, counters.aborted) == (1, 0)
        await here.check_clean()
    assert not front.learnt.is_set()


async def test_a_handler_that_learns_by_writing_leaves_nothing(stored):
    stage = STAGES["decode"]
    async with serving(fronts.aiohttp_as_it_comes, stored) as front:
        here = front.room
        stage.arrange(here)
        client = await ask(front.port, prompt=stage.prompt, stream=True)
        await stage.reached(here)
        client.hang_up()
        await until(lambda: not front.num_connections())
        assert here.replica.num_requests == 1
        stage.let_go(here)
        with anyio.fail_after(PATIENCE_S):
            await front.ended.wait()
        assert isinstance(front.errors[0], ConnectionResetError)
        here.check_only_quarantine()
        await here.check_clean()


@pytest.mark.parametrize("name", ["load that cannot be stopped", "decode"])
@pytest.mark.parametrize("case", fronts.THAT_EXPIRE, ids=name_of)
async def test_a_handler_whose_time_is_up_leaves_nothing(case, name, stored):
    (open_front, stream), stage = case, STAGES[name]
    async with serving(open_front, stored, gates=stage.gates) as front:
        here = front.room
        stage.arrange(here)
        client = await ask(front.port, prompt=stage.prompt, stream=stream)
        await stage.reached(here)
        front.expire.set()
        with anyio.fail_after(PATIENCE_S):
            await front.ended.wait()
        assert [type(error) for error in front.errors] == [TimeoutError]
        await check_gone(here, stage)
        client.hang_up()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_in_line_leaves_nothing(stream, tmp_path):
    async with serving(fronts.app, tmp_path, num_pages=12) as front:
        here = front.room
        here.model.hold_at(1)
        first = await ask(front.port, stream=True)
        await here.model.held.wait()
        second = await ask(front.port, prompt=FRESH, stream=stream)
        await until(lambda: here.replica.num_waiting == 1)
        second.hang_up()
        with anyio.fail_after(PATIENCE_S):
            await front.learnt.wait()
        await turns(FEW_TURNS)
        assert front.ended.is_set()
        assert here.replica.num_requests == 1
        assert here.replica.num_waiting == 0
        assert num_cancelled(here, "waiting") == 1
        here.model.let_go()
        status, _ = await first.read()
        assert status == 200
        await here.check_clean()


async def test_a_client_that_hangs_up_in_the_middle_of_its_question_is_forgotten(
    tmp_path,
):
    async with serving(fronts.app, tmp_path) as front:
        here = front.room
        head = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"
        half = b'Content-Length: 99\r\n\r\n{"prompt": "What'
        client = await send(front.port, head + half)
        with anyio.fail_after(PATIENCE_S):
            await front.begun.wait()
        client.hang_up()
        with anyio.fail_after(PATIENCE_S):
            await front.learnt.wait()
        await turns(FEW_TURNS)
        assert front.ended.is_set()
        assert front.errors == []
        assert here.cache.statistics().counters.restores == 0


async def test_a_client_that_leaves_in_good_order_is_gone_as_well(stored):
    stage = STAGES["load"]
    async with serving(fronts.app, stored) as front:
        here = front.room
        stage.arrange(here)
        client = await ask(front.port, stream=True)
        await stage.reached(here)
        client.close()
        with anyio.fail_after(PATIENCE_S):
            await front.learnt.wait()
        await turns(FEW_TURNS)
        assert front.ended.is_set()
        await check_gone(here, stage)


async def test_a_client_that_does_not_read_holds_text_and_no_pages(tmp_path):
    # It stands in every chunk: a short answer is more than all buffers take.
    name = "a-model-of-many-names" * 400
    async with serving(fronts.app, tmp_path, name=name) as front:
        here = front.room
        client = await ask(front.port, receive_bytes=2048, stream=True, max_tokens=60)
        await until(lambda: here.cache.statistics().counters.closed == 1)
        await here.check_clean()
        await turns(FEW_TURNS)
        assert not front.ended.is_set()
        client.hang_up()
        with anyio.fail_after(PATIENCE_S):
            await front.ended.wait()
        assert front.errors == []


async def test_a_client_that_hangs_up_on_a_send_that_waits_leaves_nothing(tmp_path):
    async with serving(fronts.verbose_streaming_response, tmp_path) as front:
        here = front.room
        client = await ask(front.port, receive_bytes=2048, stream=True)
        # All is computed, and the handler waits in its send, at a yield.
        await until(lambda: here.model.num_forwards == NUM_PREFILLS + MAX_TOKENS - 1)
        await until(lambda: not here.service.engine._rows)
        await turns(FEW_TURNS)
        assert here.replica.num_requests == 1
        client.hang_up()
        with anyio.fail_after(PATIENCE_S):
            await front.ended.wait()
        # Nobody closes the generator: it is closed when it is lost.
        await until(lambda: here.replica.num_requests == 0)
        here.check_only_quarantine()
        assert here.pool.quarantine == 0
        await here.check_clean()


async def test_a_storm_of_clients_that_hang_up_leaves_nothing(stored):
    limits = Limits(requests=64)
    async with serving(fronts.app, stored, limits=limits) as front:
        here = front.room
        clients = [
            await ask(front.port, prompt=prompt, stream=bool(turn % 2), user=user)
            for turn in range(8)
            for prompt in (PROMPT, FRESH)
            for user in ("ann", "bob")
        ]
        for client in clients:
            await turns(10)
            client.hang_up()
        await until(lambda: len(front.at_end) == len(clients))
        await until(lambda: not here.replica.num_requests)
        await here.check_clean()
        assert await here.answer() == expected(PROMPT, MAX_TOKENS)
        status, answer = await completed(front.port, prompt=FRESH)
        assert (status, len(answer["choices"])) == (200, 1)
        await here.check_clean()


async def test_a_server_that_stops_lets_answers_end_and_leaves_nothing(tmp_path):
    stage, answers = STAGES["decode"], []

    async def read() -> None:
        answers.append(await client.read())

    async with anyio.create_task_group() as group:
        async with serving(fronts.app, tmp_path) as front:
            stage.arrange(front.room)
            client = await ask(front.port, prompt=stage.prompt, stream=True)
            await stage.reached(front.room)
            group.start_soon(read)
            stage.let_go(front.room)
        # It has stopped, and the client has all of its answer.
        statistics = front.room.cache.statistics()
    [(status, body)] = answers
    assert (status, body[-8:]) == (200, b"[DONE]\n\n")
    assert statistics.leaked_pages == 0
    # Its pages reached the store before the cache was closed.
    assert statistics.counters.stored_pages == statistics.counters.published_pages


async def test_a_server_out_of_patience_cancels_its_handlers_and_leaves_nothing(
    tmp_path,
):
    stage = STAGES["decode"]

    async def let_go_in_the_end() -> None:
        await front.ended.wait()
        client.hang_up()
        front.room.check_only_quarantine()
        assert front.room.pool.quarantine > 0
        stage.let_go(front.room)

    async with (
        anyio.create_task_group() as group,
        serving(fronts.app, tmp_path, patience_s=0) as front,
    ):
        stage.arrange(front.room)
        client = await ask(front.port, prompt=stage.prompt, stream=True)
        await stage.reached(front.room)
        group.start_soon(let_go_in_the_end)
    assert isinstance(front.errors[0], asyncio.CancelledError)
    assert front.room.cache.statistics().leaked_pages == 0
