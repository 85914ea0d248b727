"""A server that measures: when the first token came, and where its prompt came from."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from asyncache import AttentionPool, KVCache, KVLayout
from asyncache.core import PageKey, PoolStatistics
from asyncache.devices import CpuDevice
from asyncache.stores import FileStore, PageBuffers, Status, Store
from examples.llm.loop import Engine, Model
from examples.llm.weights import MODEL_NAME, ChatTokenizer

if TYPE_CHECKING:
    from pathlib import Path

PAGE_TOKENS = 64
NUM_PAGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, how long its first token took, and where its prompt came from."""

    tokens: list[int]
    ttft_s: float
    num_computed: int
    num_from_device: int
    num_from_store: int
    loaded_bytes: int


class TimedFileStore(FileStore):
    """A file store that knows from when to when it read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._began_s: float | None = None
        self._ended_s = 0.0

    async def get_into(
        self,
        keys: Sequence[PageKey],
        targets: Sequence[PageBuffers],
        layers: range | None = None,
    ) -> list[Status]:
        """Read pages; reads overlap, so only the first start counts."""
        if self._began_s is None:
            self._began_s = time.perf_counter()
        statuses = await super().get_into(keys, targets, layers)
        self._ended_s = time.perf_counter()
        return statuses

    @property
    def read_s(self) -> float:
        """Seconds from the first read's start to the last one's end."""
        return 0.0 if self._began_s is None else self._ended_s - self._began_s


class Server:
    """An engine on a cache of its own, and what it takes to ask it."""

    def __init__(self, cache: KVCache, engine: Engine) -> None:
        self.cache = cache
        self.engine = engine

    async def warm_up(self, prompt: Sequence[int], *, namespace: str) -> None:
        """Answer something that nobody will ask: a model's first forward is slow."""
        await self.ask(prompt, max_tokens=2, namespace=namespace)

    async def ask(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 32,
        namespace: str | None = None,
    ) -> Answer:
        """Answer a prompt, and measure."""
        before, started = self.cache.statistics().counters, time.perf_counter()
        tokens: list[int] = []
        ttft_s = 0.0
        async for token in self.engine.generate(
            prompt, max_tokens=max_tokens, namespace=namespace
        ):
            if not tokens:
                ttft_s = time.perf_counter() - started
            tokens.append(token)
        after = self.cache.statistics().counters
        num_from_device = after.device_tokens - before.device_tokens
        # What landed; what was found and then did not come is not of the hit.
        num_from_store = (after.loaded_pages - before.loaded_pages) * PAGE_TOKENS
        return Answer(
            tokens=tokens,
            ttft_s=ttft_s,
            num_computed=len(prompt) - num_from_device - num_from_store,
            num_from_device=num_from_device,
            num_from_store=num_from_store,
            loaded_bytes=after.loaded_bytes - before.loaded_bytes,
        )

    def ledger(self) -> PoolStatistics:
        """Return where the pages are."""
        return self.cache.statistics().replica.pools["kv"]

    async def leaked_pages(self) -> int:
        """Return how many pages are neither free nor cached once all is still."""
        await self.cache.drain(deadline_s=60.0)
        self.cache.check_invariants()
        return self.cache.statistics().leaked_pages


@asynccontextmanager
async def serving(
    model: Model, tokenizer: ChatTokenizer, store: Store
) -> AsyncIterator[Server]:
    """Serve from an empty pool until the block is left."""
    config = model.config
    pool = AttentionPool(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype="float32",
    )
    layout = KVLayout(model=MODEL_NAME, page_tokens=PAGE_TOKENS, pools=(pool,))
    device = CpuDevice(layout, NUM_PAGES)
    async with KVCache(layout, device=device, store=store) as cache:
        engine = Engine(
            model,
            cache,
            pool=device.tensor("kv"),
            stop_tokens=frozenset({tokenizer.stop_token}),
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            yield Server(cache, engine)
            tasks.cancel_scope.cancel()
