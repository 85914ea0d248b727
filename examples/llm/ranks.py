"""A serving loop on each of several ranks: the pattern to copy where a model is shared.

Handlers are on the first rank, in whatever tasks: they hold scopes. Each rank has one
loop task: the first one's gathers what its handlers want and sends it to all, then all
make the same calls in the same order, run their share of the model, and step. What one
of them learns by itself, of its store, its clients or its clock, the step tells all.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import anyio.to_thread
import torch.distributed as dist

from asyncache import CpuDevice, Hit, KVCache, Prompt, RankError, Request
from asyncache.testing import Fault, FaultyStore
from examples.llm.model import Chunk, PagedLlama

ANSWER = 12
"""Tokens that each client wants."""
Pages = list[dict[str, int]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the first rank's loop tells all of them, once a step."""

    prompts: list[Prompt] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)
    """Sampled from the forward before, by request."""
    order: str = ""
    """What else to do: look, reset, lose, mend, die or stop."""


@dataclass(eq=False, slots=True)
class Row:
    """A request in the batch; the same on every rank."""

    request: Request
    hit: Hit
    tokens: list[int]
    end: int
    num_computed: int = 0

    def chunk(self) -> Chunk:
        """Return what the next forward computes of it."""
        start = max(self.num_computed, self.hit.num_tokens)
        pages = tuple(self.request.page_table["kv"])
        return Chunk(self.tokens[start:], start, pages)


class Loop:
    """A serving loop on one rank."""

    def __init__(
        self, cache: KVCache, model: PagedLlama, device: CpuDevice, store: FaultyStore
    ) -> None:
        self.cache = cache
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._model = model
        self._pool = device.tensor("kv")
        self._store = store
        # What the loops tell each other meets neither the model's sums nor the votes.
        self._wire = dist.new_group(timeout=timedelta(seconds=60))
        self._rows: dict[int, Row] = {}
        self._sampled: dict[int, int] = {}
        self.orders: asyncio.Queue[str] = asyncio.Queue()
        self.done: asyncio.Queue[Pages] = asyncio.Queue()
        self.outboxes: dict[int, asyncio.Queue[int | None]] = {}
        self.hits: list[int] = []
        self.died_at = 0.0
        """When a rank was told to die."""

    # The first rank's clients.

    async def generate(self, prompt: Sequence[int]) -> AsyncIterator[int]:
        """Yield the answer to a prompt; whoever leaves early ends it everywhere."""
        with self.cache.request(prompt, reserve_tokens=ANSWER) as request:
            await request.admitted()
            outbox = self.outboxes.setdefault(request.id, asyncio.Queue())
            for _ in range(ANSWER):
                token = await outbox.get()
                if token is None:
                    raise RankError("the ranks failed in the middle of an answer")
                yield token

    async def answer(self, prompt: Sequence[int]) -> list[int]:
        """Return a whole answer."""
        return [token async for token in self.generate(prompt)]

    async def tell(self, order: str) -> Pages:
        """Have all ranks do something, and return what they tell."""
        self.orders.put_nowait(order)
        return await self.done.get()

    # Every rank's loop.

    async def run(self) -> RankError | None:
        """Step until told to stop; return what ended the ranks, on each of them."""
        try:
            await self._run()
        except RankError as error:
            for outbox in self.outboxes.values():
                outbox.put_nowait(None)
            return error
        return None

    async def _run(self) -> None:
        while True:
            plan = await self._share(self._plan() if self.rank == 0 else None)
            self._advance(plan.tokens)
            self._admit(plan.prompts)
            if plan.order:
                outcome = await self._obey(plan.order)
                if self.rank == 0 and plan.order != "die":
                    self.done.put_nowait(outcome)
                if plan.order == "stop":
                    return
            if plan.order != "die":
                await self._forward()
            await self.cache.step(timeout_s=0.0 if self._rows else 0.01)
            self._rows = {i: r for i, r in self._rows.items() if r.request.is_open}

    def _plan(self) -> Plan:
        order = "" if self.orders.empty() else self.orders.get_nowait()
        sampled, self._sampled = self._sampled, {}
        return Plan(self.cache.waiting(), sampled, order)

    async def _share(self, plan: Plan | None) -> Plan:
        """Return what the first rank has planned, on every rank."""
        box: list[Any] = [plan]
        await anyio.to_thread.run_sync(
            lambda: dist.broadcast_object_list(box, src=0, group=self._wire)
        )
        shared: Plan = box[0]
        return shared

    def _admit(self, prompts: Sequence[Prompt]) -> None:
        for prompt, request in zip(prompts, self.cache.admit(prompts), strict=True):
            if request.is_open:
                tokens = memoryview(prompt.tokens).cast("i").tolist()
                hit = request.restore_nowait(deadline_s=5.0)
                end = len(tokens) + prompt.num_reserve_tokens
                self._rows[request.id] = Row(request, hit, tokens, end)

    async def _forward(self) -> None:
        rows = [
            row
            for row in self._rows.values()
            if row.request.is_open and row.hit.settled
            if row.num_computed < len(row.tokens) < row.end
        ]
        if not rows:
            return
        for row in rows:
            row.request.extend(len(row.tokens))
        chunks = [row.chunk() for row in rows]
        with self.cache.forward([row.request for row in rows]):
            logits = await anyio.to_thread.run_sync(
                self._model.forward, chunks, self._pool
            )
        for row, token in zip(rows, logits.argmax(dim=1).tolist(), strict=True):
            if not row.num_computed:
                self.hits.append(row.hit.num_tokens)
            row.num_computed = len(row.tokens)
            row.request.commit(row.num_computed)
            self._sampled[row.request.id] = token

    def _advance(self, tokens: dict[int, int]) -> None:
        """Take the first rank's samples: another rank's may differ by a rounding."""
        for seq, token in tokens.items():
            if (row := self._rows.get(seq)) is not None and row.request.is_open:
                row.request.append([token])
                row.tokens.append(token)
            if self.rank == 0:
                self.outboxes.setdefault(seq, asyncio.Queue()).put_nowait(token)

    async def _obey(self, order: str) -> Pages:
        match order:
            case "look":
                return await self._look()
            case "reset":
                await self.cache.drain()
                self.cache.reset()
            case "lose" if self.rank == self.num_ranks - 1:
                self._store.fault = Fault.CORRUPT
            case "mend":
                self._store.fault = None
            case "die":
                self.died_at = time.monotonic()
                if self.rank == self.num_ranks - 1:
                    _die()
            case _:
                pass
        return []

    async def _look(self) -> Pages:
        """Return how many pages are where, rank by rank."""
        await self.cache.drain()
        pool = self.cache.statistics().replica.pools["kv"]
        found: list[Any] = [None] * self.num_ranks
        here = {"free": pool.free, "request": pool.request, "tree": pool.tree}
        await anyio.to_thread.run_sync(
            lambda: dist.all_gather_object(found, here, group=self._wire)
        )
        return found


def _die() -> None:
    sys.stdout.flush()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os._exit(0)  # another status, and torchrun would end the ranks that are to tell
    os.kill(os.getpid(), signal.SIGKILL)
