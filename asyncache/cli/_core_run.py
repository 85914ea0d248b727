"""Replays without a store: the core alone, called as its driver calls it.

A page is a token of its own here. The core never serves the last token, so one more is
added that stands for nothing; a prompt that fills the whole device has no room for it,
and what it would hit is asked for instead. Of a longer one the first pages are served.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable

from asyncache.cli._outcome import Job, Outcome, Stage, Tally
from asyncache.cli._traces import Prompt
from asyncache.core import (
    MAX_TOKEN,
    TOKEN_BYTES,
    AttentionPool,
    Bounds,
    Fact,
    FactKind,
    KVLayout,
    Replica,
    RequestState,
    Votes,
)

END = array("i", [MAX_TOKEN]).tobytes()
"""The token that stands for nothing: no page has this number."""


def replay_core(job: Job, prompts: Iterable[Prompt]) -> Outcome:
    """Replay a trace on the core.

    Args:
        job: What to replay.
        prompts: Those of its trace, to be taken one by one.
    """
    begin, run, tally = time.perf_counter(), _Run(job), Tally()
    for prompt, stage in zip(prompts, job.cancelled, strict=True):
        tally.longer_than_device += len(prompt.pages) > run.num_bytes
        if stage is not None:
            run.cancel(prompt.pages, stage)
            tally.cancelled += 1
        else:
            tally.serve(prompt, job.trace.page_tokens, run.serve(prompt.pages), 0)
    seconds = time.perf_counter() - begin
    run.replica.look.check_invariants()
    statistics = run.replica.look.statistics()
    pool = statistics.pools["kv"]
    return Outcome(
        num_pages=job.num_pages,
        tally=tally,
        evicted=run.evicted,
        resident=pool.tree,
        leaked=pool.request + pool.transit + pool.quarantine,
        left_open=statistics.num_open,
        seconds=seconds,
    )


class _Run:
    """A replica, and the votes of its only rank."""

    def __init__(self, job: Job) -> None:
        pool = AttentionPool(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8")
        layout = KVLayout(model="replay", page_tokens=1, pools=(pool,))
        bounds = Bounds(requests=1, slots=2, offloads=1)
        self.num_bytes = job.pool_pages * TOKEN_BYTES
        self.replica = Replica(layout, {"kv": job.pool_pages}, bounds, job.policy)
        self._votes = Votes()
        self.evicted = 0

    def serve(self, pages: bytes) -> int:
        """Serve a prompt; return how many leading pages were resident."""
        if not pages:
            return 0
        replica, key = self.replica, pages[: self.num_bytes]
        num_pages = len(key) // TOKEN_BYTES
        request = self._open(key)
        replica.calls.restore(request)
        is_filling = len(key) == self.num_bytes
        hit = replica.look.match(key + END) if is_filling else request.hit
        if hit < num_pages:
            replica.calls.extend(request, num_pages)
            replica.calls.commit(request, num_pages)
        self._votes.quiet(request.seq)
        self._settle(request)
        return hit

    def cancel(self, pages: bytes, stage: Stage) -> None:
        """Open a request and abort it."""
        key = pages[: self.num_bytes]
        if not key:
            return
        request = self._open(key)
        if stage is not Stage.OPENED:
            self.replica.calls.restore(request)
        if stage is Stage.EXTENDED:
            self.replica.calls.extend(request, len(key) // TOKEN_BYTES)
        self._votes.sink(request.seq, 0)
        self._settle(request)

    def _open(self, key: bytes) -> RequestState:
        return self.replica.calls.open(key + END if len(key) < self.num_bytes else key)

    def _settle(self, request: RequestState) -> None:
        """Apply the vote that ends a request, and take note of what happened."""
        ballot = self.replica.ballot()
        self.replica.apply(ballot, self._votes.fill(ballot))
        self._votes.forget(request.seq)
        for effect in self.replica.take_effects():
            if isinstance(effect, Fact) and effect.kind is FactKind.EVICTED:
                self.evicted += effect.num_pages
