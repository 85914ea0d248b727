"""Continuous batching around asyncache: the pattern to copy into a serving loop.

A request handler iterates over :meth:`Engine.generate`. Inside, it holds the request's
scope, awaits its restore, and joins the batch. One task steps the batch: it finds
pages, runs the model in a thread, commits, and hands out tokens. The two meet only in
synchronous code between awaits, so a handler may be cancelled at any moment: its row
leaves the batch, its scope ends, and the cache sees to pages that are still in use.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

import anyio.to_thread

from asyncache import KVCache, OutOfPagesError, Request
from examples.llm.model import Chunk, LlamaConfig

if TYPE_CHECKING:
    import torch


class Model(Protocol):
    """What the loop needs of a model."""

    @property
    def config(self) -> LlamaConfig:
        """Shape of the model."""

    def forward(self, chunks: Sequence[Chunk], pool: torch.Tensor) -> torch.Tensor:
        """Return logits of the last token of each chunk, [num_chunks, vocab_tokens]."""


class GenerateError(Exception):
    """The model failed on a batch with this request in it, or the engine stopped."""


class _Signal(Enum):
    """What a row is told beside its tokens."""

    SUSPENDED = auto()
    ENDED = auto()


@dataclass(eq=False, slots=True, kw_only=True)
class _Row:
    """A request in the batch. Only the step loop writes it while it is there."""

    arrival: int
    request: Request
    tokens: list[int]
    end: int
    num_computed: int = 0
    # At most one item a token, and two signals.
    outbox: asyncio.Queue[int | _Signal | GenerateError] = field(
        default_factory=asyncio.Queue
    )

    @property
    def num_pending(self) -> int:
        """Tokens that are known and not computed: 1 while decoding."""
        return len(self.tokens) - self.num_computed


class Engine:
    """A batch of requests on one model and one cache; :meth:`run` keeps it going.

    Args:
        model: The model.
        cache: An open cache.
        pool: The pages of the cache's device, as the model wants them.
        stop_tokens: Tokens that end an answer; they are handed out too.
        step_tokens: Tokens computed in one step at most; longer prompts are cut.
        reserve_tokens: Tokens beyond its prompt that a request is promised room for.
            A longer answer takes what room there is, or that of a younger request.
        restore_s: Seconds after which a request computes what has not landed.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        *,
        pool: torch.Tensor,
        stop_tokens: frozenset[int] = frozenset(),
        step_tokens: int = 512,
        reserve_tokens: int = 64,
        restore_s: float = 5.0,
    ) -> None:
        self._model = model
        self._cache = cache
        self._pool = pool
        self._stop_tokens = stop_tokens
        self._step_tokens = step_tokens
        self._reserve_tokens = reserve_tokens
        self._restore_s = restore_s
        self._rows: list[_Row] = []
        self._joined = asyncio.Event()
        self._arrivals = itertools.count()
        self._has_stopped = False

    # The handler's side.

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        namespace: str | None = None,
        on_hit: Callable[[int], object] | None = None,
    ) -> AsyncGenerator[int, None]:
        """Yield the answer to a prompt, token by token.

        Leaving early, by cancellation or by closing the iterator, ends the request.

        Args:
            prompt: Token ids, shape [num_tokens], at least one.
            max_tokens: Most tokens to yield, at least 1.
            namespace: Who may share cached pages with this request.
            on_hit: Called with how many leading tokens need no computing; again after
                the request was sent back to make room, with what it finds then.

        Raises:
            ValueError: If the prompt does not fit the model.
            OutOfPagesError: If the prompt can never fit the pool.
            GenerateError: If the model failed on a batch that this request was in.
        """
        self._check(prompt, max_tokens)
        reserve = min(max_tokens, self._reserve_tokens)
        with self._cache.request(
            prompt, namespace=namespace, reserve_tokens=reserve
        ) as request:
            row = _Row(
                arrival=next(self._arrivals),
                request=request,
                tokens=list(prompt),
                end=len(prompt) + max_tokens,
            )
            while True:
                # Here a request waits in line for room, then for its pages.
                hit = await request.restore(deadline_s=self._restore_s)
                await hit.wait()
                if not request.reserved:
                    continue
                if on_hit is not None:
                    on_hit(hit.num_tokens)
                with self._in_batch(row, hit.num_tokens):
                    while (item := await row.outbox.get()) is not _Signal.SUSPENDED:
                        if item is _Signal.ENDED:
                            return
                        if isinstance(item, GenerateError):
                            raise item
                        yield item

    def _check(self, prompt: Sequence[int], max_tokens: int) -> None:
        config = self._model.config
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        if len(prompt) + max_tokens > config.max_tokens:
            raise ValueError(
                f"{len(prompt)} tokens and {max_tokens} to come, but the model takes"
                f" {config.max_tokens}"
            )
        if max(prompt, default=0) >= config.vocab_tokens:
            raise ValueError(
                f"token ids must be below {config.vocab_tokens}, got {max(prompt)}"
            )

    @contextmanager
    def _in_batch(self, row: _Row, num_computed: int) -> Iterator[None]:
        if self._has_stopped:
            raise GenerateError("the engine has stopped")
        row.num_computed = num_computed
        self._rows.append(row)
        self._joined.set()
        try:
            yield
        finally:
            self._leave(row)

    # The step loop's side.

    async def run(self) -> None:
        """Step the batch until cancelled. Start this once, in a task group of yours."""
        try:
            while True:
                if not self._rows:
                    self._joined.clear()
                    await self._joined.wait()
                await self._step()
        finally:
            self._has_stopped = True
            self._fail(list(self._rows), "the engine has stopped")

    async def _step(self) -> None:
        batch = self._plan()
        if not batch:
            return  # all of them were suspended
        rows, chunks = list(batch), list(batch.values())
        try:
            with self._cache.forward([row.request for row in rows]):
                # Cancelled, this still waits for the thread: the bracket covers it.
                sampled = await anyio.to_thread.run_sync(self._compute, chunks)
        except Exception as error:  # noqa: BLE001 - a model may raise what it likes
            self._fail(rows, f"the model failed: {error!r}", cause=error)
            return
        for row, chunk, token in zip(rows, chunks, sampled, strict=True):
            if row in self._rows:  # else its handler left meanwhile
                self._advance(row, len(chunk.tokens), token)

    def _plan(self) -> dict[_Row, Chunk]:
        """Give the step's tokens to rows: those that decode first, then by age."""
        budget, planned = self._step_tokens, {}
        for row in sorted(self._rows, key=_decodes_first_then_by_age):
            num_tokens = min(row.num_pending, budget)
            end = row.num_computed + num_tokens
            if num_tokens and row in self._rows and self._make_room(row, end):
                tokens = row.tokens[row.num_computed : end]
                # A copy: the thread must not read what the loop may change.
                pages = tuple(row.request.page_table["kv"])
                planned[row] = Chunk(tokens, row.num_computed, pages)
                budget -= num_tokens
        # Making room for one row may have cost another its place.
        return {row: chunk for row, chunk in planned.items() if row in self._rows}

    def _make_room(self, row: _Row, num_tokens: int) -> bool:
        """Find pages for a row; while there are none, send the youngest row back."""
        while True:
            try:
                row.request.extend(num_tokens)
            except OutOfPagesError:
                youngest = max(self._rows, key=lambda row: row.arrival)
                youngest.request.suspend()
                self._dismiss(youngest, _Signal.SUSPENDED)
                if youngest is row:
                    return False
            else:
                return True

    def _compute(self, chunks: Sequence[Chunk]) -> list[int]:
        logits = self._model.forward(chunks, self._pool)
        sampled: list[int] = logits.argmax(dim=1).tolist()
        return sampled

    def _advance(self, row: _Row, num_tokens: int, token: int) -> None:
        row.num_computed += num_tokens
        row.request.commit(row.num_computed)
        if row.num_pending:
            return  # more of the prompt is to come; this token means nothing
        row.outbox.put_nowait(token)
        row.tokens.append(token)
        if token in self._stop_tokens or len(row.tokens) == row.end:
            self._dismiss(row, _Signal.ENDED)
        else:
            row.request.append([token])

    def _fail(
        self, rows: Sequence[_Row], why: str, *, cause: Exception | None = None
    ) -> None:
        for row in rows:
            failure = GenerateError(why)
            failure.__cause__ = cause
            self._dismiss(row, failure)

    def _dismiss(self, row: _Row, reason: _Signal | GenerateError) -> None:
        row.outbox.put_nowait(reason)
        self._leave(row)

    def _leave(self, row: _Row) -> None:
        if row in self._rows:
            self._rows.remove(row)


def _decodes_first_then_by_age(row: _Row) -> tuple[bool, int]:
    return row.num_pending > 1, row.arrival
