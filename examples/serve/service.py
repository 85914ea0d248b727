"""Model, cache and batch: what outlives a request, from a server's start to its end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from asyncache import (
    AsyncacheError,
    AttentionPool,
    CpuDevice,
    KVCache,
    KVLayout,
    Limits,
    OutOfPagesError,
    Store,
    TooManyRequestsError,
)
from examples.llm.loop import Engine, GenerateError
from examples.serve.models import Served, TextStream
from examples.serve.wire import ApiError, Ask, Finish

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectSendStream

Item = str | Finish | ApiError

logger = logging.getLogger("uvicorn.error")


class Service:
    """Everything that a server's requests share.

    Args:
        served: The model.
        num_pages: Pages of its pool.
        store: Where pages outlive the process, if anywhere.
        limits: Bounds of the cache.
        step_tokens: Tokens computed in one step at most.
        drain_s: Seconds that the last offloads may take at the end.
    """

    def __init__(
        self,
        served: Served,
        *,
        num_pages: int,
        store: Store | None = None,
        limits: Limits | None = None,
        step_tokens: int = 512,
        drain_s: float = 10.0,
    ) -> None:
        self.served = served
        self.device = CpuDevice(_layout(served), num_pages)
        self.cache = KVCache(
            self.device.layout, device=self.device, store=store, limits=limits
        )
        self.engine = Engine(
            served.model,
            self.cache,
            pool=self.device.tensor("kv"),
            stop_tokens=served.stop_tokens,
            step_tokens=step_tokens,
        )
        self._drain_s = drain_s
        self._failure: str | None = None
        # The model's thread must not stand in line behind everyone's text.
        self._readers = anyio.CapacityLimiter(1)

    @property
    def failure(self) -> str | None:
        """Why nothing is served, or None."""
        if self._failure is not None:
            return self._failure
        try:
            self.cache.match_nowait([0])
        except AsyncacheError as error:
            return str(error)
        return None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve until the block is left; then let the last offloads reach the store."""
        async with self.cache, anyio.create_task_group() as tasks:
            tasks.start_soon(self._run_engine)
            yield
            if self.failure is None:
                await self._drain()
            tasks.cancel_scope.cancel()

    async def _run_engine(self) -> None:
        try:
            await self.engine.run()
        except Exception as error:
            # Whoever asks for the health is told, and whoever asks for tokens.
            self._failure = f"the engine stopped: {error!r}"
            logger.exception("the engine stopped")

    async def _drain(self) -> None:
        num_left = await self.cache.drain(deadline_s=self._drain_s)
        if num_left:
            logger.warning(
                "%d offloads were not over after %s s", num_left, self._drain_s
            )

    async def answer(self, ask: Ask, sink: MemoryObjectSendStream[Item]) -> None:
        """Put the pieces of an answer into a sink, then how it ended.

        Does not wait for whoever takes them out: a client that reads slowly holds
        text, and no pages. Cancelled, it gives back at once what it holds.

        Args:
            ask: What is asked for.
            sink: Has room for ``ask.max_tokens`` pieces and two items; closed at the
                end.
        """
        with sink:
            try:
                await self._generate(ask, sink)
            except ApiError as error:
                sink.send_nowait(error)
            except _EXPECTED as error:
                sink.send_nowait(_told(error))

    async def _generate(self, ask: Ask, sink: MemoryObjectSendStream[Item]) -> None:
        if (failure := self.failure) is not None:
            raise ApiError(503, failure)
        prompt, text = await self._tokens(ask.prompt), TextStream(self.served.text)
        hits: list[int] = []
        answer: list[int] = []
        tokens = self.engine.generate(
            prompt,
            max_tokens=ask.max_tokens,
            namespace=ask.namespace,
            on_hit=hits.append,
        )
        async with aclosing(tokens):
            async for token in tokens:
                answer.append(token)
                if piece := text.push(token):
                    sink.send_nowait(piece)
        if piece := text.end():
            sink.send_nowait(piece)
        has_stopped = answer[-1] in self.served.stop_tokens
        finish = Finish(
            reason="stop" if has_stopped else "length",
            prompt_tokens=len(prompt),
            # Later ones have tokens of its own in them.
            cached_tokens=hits[0],
            completion_tokens=len(answer),
        )
        sink.send_nowait(finish)

    async def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        encode = self.served.text.encode
        return await anyio.to_thread.run_sync(encode, prompt, limiter=self._readers)


_EXPECTED = (AsyncacheError, GenerateError, ValueError)


def _told(error: Exception) -> ApiError:
    """Return what to tell a client of an error."""
    status = 503  # the cache is closed or has failed, or the engine has stopped
    if isinstance(error, TooManyRequestsError):
        status = 429
    elif isinstance(error, OutOfPagesError | ValueError):
        status = 400  # a prompt that can never fit the pool, or the model
    elif isinstance(error, GenerateError) and error.__cause__ is not None:
        status = 500  # the model failed
    return ApiError(status, str(error))


def _layout(served: Served) -> KVLayout:
    config = served.model.config
    pool = AttentionPool(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype="float32",
    )
    return KVLayout(model=served.name, page_tokens=served.page_tokens, pools=(pool,))
