"""The serving loop: right tokens whatever happens to its requests, and no page left."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.from_thread
import pytest
import torch

from asyncache import AttentionPool, KVCache, KVLayout
from asyncache.devices import CpuDevice
from asyncache.stores import FileStore, MemoryStore, Store
from asyncache.testing import GateStore
from examples.llm.loop import Engine, GenerateError
from examples.llm.model import Chunk, LlamaConfig, PagedLlama, tiny_llama

PAGE_TOKENS = 16
MODEL = tiny_llama(seed=1)
LAYOUT = KVLayout(
    model="tiny",
    page_tokens=PAGE_TOKENS,
    pools=(
        AttentionPool(
            num_layers=MODEL.config.num_layers,
            num_kv_heads=MODEL.config.num_kv_heads,
            head_dim=MODEL.config.head_dim,
            dtype="float32",
        ),
    ),
)


def prompt_of(num_tokens: int, *, seed: int = 0) -> list[int]:
    """Return a prompt; prompts of different seeds share no page."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 512, (num_tokens,), generator=generator).tolist()


def expected(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the answer that the model gives without a cache."""
    shape = CpuDevice(LAYOUT, 1).tensor("kv").shape[1:]
    num_pages = -(-(len(prompt) + max_tokens) // PAGE_TOKENS)
    pool, start = torch.zeros(num_pages, *shape), 0
    pending, answer = list(prompt), []
    while len(answer) < max_tokens:
        logits = MODEL.forward([Chunk(pending, start, range(num_pages))], pool)
        start += len(pending)
        pending = [int(logits[0].argmax())]
        answer += pending
    return answer


class WatchedModel:
    """The tiny model; counts tokens, fails on demand, and can be held in its thread."""

    def __init__(self) -> None:
        self.num_computed = 0
        self.broken = False
        self.held = threading.Event()
        self.held.set()
        self.begun = anyio.Event()

    @property
    def config(self) -> LlamaConfig:
        return MODEL.config

    def hold(self) -> None:
        self.held.clear()
        self.begun = anyio.Event()

    def forward(self, chunks: Sequence[Chunk], pool: torch.Tensor) -> torch.Tensor:
        anyio.from_thread.run_sync(self.begun.set)
        assert self.held.wait(timeout=60)
        if self.broken:
            raise ArithmeticError("the model is broken")
        self.num_computed += sum(len(chunk.tokens) for chunk in chunks)
        return PagedLlama.forward(MODEL, chunks, pool)


@dataclass
class Serving:
    cache: KVCache
    engine: Engine
    model: WatchedModel

    async def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        answer = self.engine.generate(prompt, max_tokens=max_tokens)
        return [token async for token in answer]

    def used_pages(self) -> int:
        """Return how many pages are neither free nor cached."""
        return self.cache.statistics().leaked_pages


@asynccontextmanager
async def serving(
    store: Store | None = None,
    *,
    num_pages: int = 64,
    reserve_tokens: int = 64,
    step_tokens: int = 50,
) -> AsyncIterator[Serving]:
    device, model = CpuDevice(LAYOUT, num_pages), WatchedModel()
    pool = device.tensor("kv")
    pool.fill_(torch.nan)  # whoever reads what nobody wrote shall notice
    async with KVCache(LAYOUT, device=device, store=store) as cache:
        engine = Engine(
            model,
            cache,
            pool=pool,
            step_tokens=step_tokens,
            reserve_tokens=reserve_tokens,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            try:
                yield Serving(cache, engine, model)
            finally:
                model.held.set()
            tasks.cancel_scope.cancel()
        cache.check_invariants()


async def test_answers_are_those_of_a_run_without_a_cache():
    head = prompt_of(100)
    prompts = [head + prompt_of(n, seed=n) for n in (3, 30, 77)] + [prompt_of(1)]
    answers: dict[int, list[int]] = {}
    async with serving(MemoryStore(max_bytes=2**26)) as here:

        async def handle(index: int) -> None:
            answers[index] = await here.answer(prompts[index], 20)

        for _ in range(2):  # computed, then from the cache
            async with anyio.create_task_group() as handlers:
                for index in range(len(prompts)):
                    handlers.start_soon(handle, index)
            for index, prompt in enumerate(prompts):
                assert answers[index] == expected(prompt, 20)
        assert here.used_pages() == 0


async def test_an_answer_ends_with_its_stop_token():
    prompt = prompt_of(40)
    whole = expected(prompt, 12)
    stop = whole[7]
    async with serving() as here:
        here.engine._stop_tokens = frozenset({stop})
        answer = await here.answer(prompt, 12)
    assert answer == whole[: whole.index(stop) + 1]


async def test_a_restart_restores_and_answers_the_same(tmp_path):
    prompt = prompt_of(100)
    async with serving(FileStore(tmp_path)) as first:
        cold = await first.answer(prompt, 20)
        await first.cache.drain(deadline_s=60)
    async with serving(FileStore(tmp_path)) as second:
        restored = await second.answer(prompt, 20)
    assert cold == restored == expected(prompt, 20)
    # Six whole pages came from files; what is left of the prompt was computed.
    assert first.model.num_computed == 100 + 19
    assert second.model.num_computed == 100 - 6 * PAGE_TOKENS + 19


async def test_a_second_turn_finds_the_first_with_its_answer():
    prompt = prompt_of(40)
    async with serving() as here:
        turn = prompt + await here.answer(prompt, 30)
        before = here.model.num_computed
        assert await here.answer([*turn, 7], 5) == expected([*turn, 7], 5)
    # 69 tokens of the first turn were computed: four whole pages.
    assert here.model.num_computed - before == 71 - 4 * PAGE_TOKENS + 4


@pytest.mark.parametrize("num_tokens", [100, 40], ids=["first chunk", "last chunk"])
async def test_cancelled_while_the_forward_runs_a_prefill_leaves_no_page(num_tokens):
    other = prompt_of(30, seed=2)
    async with serving() as here:
        here.model.hold()
        async with anyio.create_task_group() as handlers:
            handlers.start_soon(here.answer, prompt_of(num_tokens), 20)
            await here.model.begun.wait()
            handlers.cancel_scope.cancel()
        # Its thread may still write those pages, so they are nobody's yet.
        assert here.cache.statistics().replica.pools["kv"].quarantine > 0
        here.model.held.set()
        assert await here.answer(other, 20) == expected(other, 20)
        assert here.used_pages() == 0


async def test_cancelled_while_it_decodes_a_request_leaves_no_page():
    prompt, other = prompt_of(40), prompt_of(30, seed=2)
    answers = []
    async with serving() as here, anyio.create_task_group() as survivors:

        async def survive() -> None:
            answers.append(await here.answer(other, 40))

        survivors.start_soon(survive)
        with anyio.CancelScope() as handler:
            answer = here.engine.generate(prompt, max_tokens=30)
            received = []
            async with aclosing(answer):
                async for token in answer:
                    received.append(token)
                    if len(received) == 5:
                        here.model.hold()
                        await here.model.begun.wait()
                        handler.cancel()
        here.model.held.set()
        assert received == expected(prompt, 5)
        assert await here.answer(other, 40) == expected(other, 40)
    assert answers == [expected(other, 40)]
    assert here.used_pages() == 0


async def test_cancelled_while_it_restores_a_request_leaves_no_page(tmp_path):
    prompt = prompt_of(100)
    async with serving(FileStore(tmp_path)) as first:
        await first.answer(prompt, 1)
        await first.cache.drain(deadline_s=60)
    store = GateStore(FileStore(tmp_path), is_open=True)
    store.get_gate.close()
    async with serving(store) as second:
        async with anyio.create_task_group() as handlers:
            handlers.start_soon(second.answer, prompt, 20)
            await store.get_gate.wait_arrived()
            handlers.cancel_scope.cancel()
        store.get_gate.open()
        assert await second.answer(prompt, 20) == expected(prompt, 20)
        assert second.used_pages() == 0


async def test_a_handler_that_just_stops_leaves_no_page():
    async with serving() as here:
        async with aclosing(here.engine.generate(prompt_of(40), max_tokens=9)) as it:
            assert [await anext(it)] == expected(prompt_of(40), 1)
        await here.answer(prompt_of(10), 1)
        assert here.used_pages() == 0


@pytest.mark.parametrize("has_store", [True, False])
@pytest.mark.parametrize(
    ("prompt_pages", "answer_tokens", "outgrows"),
    [(8, 5, False), (3, 5 * PAGE_TOKENS, True)],
    ids=["prompts of two thirds of the pool", "answers that outgrow the pool"],
)
async def test_in_a_small_pool_all_requests_get_their_answer(
    prompt_pages, answer_tokens, outgrows, has_store
):
    answers: dict[int, list[int]] = {}
    prompts = [prompt_of(prompt_pages * PAGE_TOKENS - 3, seed=i) for i in range(8)]
    store = MemoryStore(max_bytes=2**26) if has_store else None
    async with serving(store, num_pages=12, reserve_tokens=1) as here:

        async def handle(index: int) -> None:
            answers[index] = await here.answer(prompts[index], answer_tokens)

        async with anyio.create_task_group() as handlers:
            for index in range(len(prompts)):
                handlers.start_soon(handle, index)
        assert here.used_pages() == 0
    once = sum(len(prompt) + answer_tokens - 1 for prompt in prompts)
    # Who is sent back to make room may have to compute something twice.
    assert (here.model.num_computed > once) == outgrows
    assert answers == {
        index: expected(prompt, answer_tokens) for index, prompt in enumerate(prompts)
    }


async def test_a_failing_model_fails_its_requests_and_not_the_server():
    prompt = prompt_of(40)
    async with serving() as here:
        here.model.broken = True
        with pytest.raises(GenerateError, match=r"failed: ArithmeticError\('the model"):
            await here.answer(prompt, 5)
        here.model.broken = False
        assert await here.answer(prompt, 5) == expected(prompt, 5)
        assert here.used_pages() == 0


async def test_whoever_waits_is_told_when_the_engine_stops():
    async with KVCache(LAYOUT, device=CpuDevice(LAYOUT, 8)) as cache:
        model = WatchedModel()
        engine = Engine(model, cache, pool=CpuDevice(LAYOUT, 8).tensor("kv"))
        model.hold()

        async def handle() -> None:
            with pytest.raises(GenerateError, match="the engine has stopped"):
                async for _ in engine.generate(prompt_of(40), max_tokens=5):
                    pass

        async with anyio.create_task_group() as handlers:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.run)
                handlers.start_soon(handle)
                await model.begun.wait()
                tasks.cancel_scope.cancel()
                model.held.set()
            handlers.start_soon(handle)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([1, 2], 0, "max_tokens must be at least 1, not 0"),
        ([1] * 2000, 49, "2000 tokens and 49 to come, but the model takes 2048"),
        ([1, 512], 5, "token ids must be below 512, got 512"),
        ([], 5, "tokens are empty"),
    ],
)
async def test_a_prompt_that_the_model_cannot_take_is_refused(
    prompt, max_tokens, message
):
    async with serving() as here:
        with pytest.raises(ValueError, match=message):
            await here.answer(prompt, max_tokens)
