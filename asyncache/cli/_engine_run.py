"""Replays with a store: a whole cache, whose pages hold their own numbers.

As in :mod:`asyncache.cli._core_run` a page is a token. It has four bytes, its number,
so that a page that holds other bytes than it should is found out. After each request
all transfers end, so that the same trace always has the same outcome.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable

import anyio
import anyio.lowlevel
import torch

from asyncache.cli._core_run import END
from asyncache.cli._outcome import Job, Outcome, Stage, Tally
from asyncache.cli._traces import Prompt
from asyncache.core import (
    TOKEN_BYTES,
    AttentionPool,
    Fact,
    KVLayout,
    PagesCached,
    PagesDropped,
    StoreError,
)
from asyncache.devices import CpuDevice
from asyncache.engine import Event, KVCache, Limits, Request
from asyncache.stores import Store

DRAIN_S = 60.0
LIMITS = Limits(requests=2, slots=64, offloads=32)


def replay_engine(job: Job, prompts: Iterable[Prompt], store: Store) -> Outcome:
    """Replay a trace on a cache with a store.

    Args:
        job: What to replay.
        prompts: Those of its trace, to be taken one by one.
        store: Opened and closed here.

    Raises:
        StoreError: If the store cannot be used, or stops taking pages.
    """
    return anyio.run(_replay, job, prompts, store)


async def _replay(job: Job, prompts: Iterable[Prompt], store: Store) -> Outcome:
    begin, run, tally = time.perf_counter(), _Run(job, store), Tally()
    async with run.cache:
        for prompt, stage in zip(prompts, job.cancelled, strict=True):
            tally.longer_than_device += len(prompt.pages) > run.num_bytes
            if stage is not None:
                await run.cancel(prompt.pages, stage)
                tally.cancelled += 1
            else:
                hit, stored = await run.serve(prompt.pages)
                tally.serve(prompt, job.trace.page_tokens, hit, stored)
        seconds = time.perf_counter() - begin
        run.cache.check_invariants()
        return run.outcome(tally, seconds)


class _Failures:
    """Counts transfers that failed; observes a cache."""

    def __init__(self) -> None:
        self.count = 0

    def on_event(self, event: Event) -> None:
        self.count += not isinstance(event, Fact | PagesCached | PagesDropped)


class _Run:
    """A cache over memory that we can look into."""

    def __init__(self, job: Job, store: Store) -> None:
        pool = AttentionPool(
            num_layers=1,
            num_kv_heads=1,
            head_dim=TOKEN_BYTES,
            dtype="uint8",
            num_parts=1,
        )
        layout = KVLayout(
            model="replay", revision=job.trace.digest, page_tokens=1, pools=(pool,)
        )
        memory = torch.zeros(job.pool_pages, 1, TOKEN_BYTES, dtype=torch.uint8)
        self._words = memory.view(torch.int32).flatten()
        self._failures = _Failures()
        self._num_wrong = 0
        self._job = job
        self._num_pages = job.pool_pages
        self.num_bytes = job.pool_pages * TOKEN_BYTES
        self.cache = KVCache(
            layout,
            device=CpuDevice.adopt(layout, {"kv": memory}),
            store=store,
            limits=LIMITS,
            policy=job.policy,
            observer=self._failures,
        )

    async def serve(self, pages: bytes) -> tuple[int, int]:
        """Serve a prompt; return the pages that hit, and those from the store."""
        key = self._ints(pages)
        if not key:
            return 0, 0
        with self._request(key) as request:
            hit = await (await request.restore()).wait()
            num_hit = hit.num_tokens
            stored = num_hit - hit.device_tokens
            self._check(request, key[:num_hit])
            if len(key) == self._num_pages:
                # The last page of the device, too, may have been there.
                known = self.cache.match_nowait(key + array("i", END))
                num_hit = max(num_hit, known)
            if num_hit < len(key):
                self._compute(request, key)
                request.commit(len(key))
        await self._drain()
        return num_hit, stored

    async def cancel(self, pages: bytes, stage: Stage) -> None:
        """Serve a prompt until its task is cancelled."""
        key = self._ints(pages)
        if not key:
            return
        with anyio.CancelScope() as scope, self._request(key) as request:
            if stage is Stage.OPENED:
                scope.cancel()
            hit = await request.restore()
            if stage is Stage.RESTORED:
                scope.cancel()
            await hit.wait()
            self._compute(request, key)
            scope.cancel()
            await anyio.lowlevel.checkpoint()
        await self._drain()

    def outcome(self, tally: Tally, seconds: float) -> Outcome:
        """Return what was found."""
        statistics = self.cache.statistics()
        counters = statistics.counters
        return Outcome(
            num_pages=self._job.num_pages,
            tally=tally,
            evicted=counters.evicted_pages + counters.evicted_unsaved_pages,
            resident=statistics.replica.pools["kv"].tree,
            leaked=statistics.leaked_pages,
            left_open=statistics.replica.num_open,
            stored=counters.stored_pages,
            failures=self._failures.count,
            wrong_pages=self._num_wrong,
            seconds=seconds,
        )

    def _ints(self, pages: bytes) -> array[int]:
        return array("i", pages[: self.num_bytes])

    def _request(self, key: array[int]) -> Request:
        fits = len(key) < self._num_pages
        return self.cache.request(key + array("i", END) if fits else key)

    def _check(self, request: Request, numbers: array[int]) -> None:
        """Count pages of a hit that do not hold their own numbers."""
        if numbers:
            found = self._words[_index(request)[: len(numbers)]]
            self._num_wrong += int((found != torch.tensor(numbers)).sum())

    def _compute(self, request: Request, key: array[int]) -> None:
        """Write each page that is not a hit, as a model would."""
        start = len(request.page_table["kv"])
        request.extend(len(key))
        with self.cache.forward([request]):
            numbers = torch.tensor(key[start:], dtype=torch.int32)
            self._words[_index(request)[start:]] = numbers

    async def _drain(self) -> None:
        if left := await self.cache.drain(deadline_s=DRAIN_S):
            raise StoreError(f"{left} transfers did not end within {DRAIN_S} s")


def _index(request: Request) -> torch.Tensor:
    return torch.tensor(request.page_table["kv"], dtype=torch.int64)
