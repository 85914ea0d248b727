"""What a replay found, and the rules by which it counts.

A hit is the leading run of a prompt's pages that are resident or stored. Tokens of a
hit are those of its whole pages, less the last token of the prompt, which is always
computed. A cancelled request counts as cancelled, and as nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from asyncache.cli._traces import Prompt, Trace
from asyncache.core import (
    TOKEN_BYTES,
    Policy,
    fifo,
    filo,
    lfu,
    lru,
    mru,
    slru,
)

POLICIES: dict[str, Policy] = {
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "filo": filo,
    "mru": mru,
    "slru": slru,
}
"""Eviction policies by their name on the command line."""


class Stage(Enum):
    """How far a request has come when it is cancelled."""

    OPENED = "opened"
    RESTORED = "restored"
    EXTENDED = "extended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One replay to run.

    Args:
        trace: What is replayed.
        num_pages: Pages of the device.
        policy: Which leaf is evicted first.
        cancelled: For each request, where it is cancelled; None if it is served.
    """

    trace: Trace
    num_pages: int
    policy: Policy
    cancelled: list[Stage | None]

    @property
    def pool_pages(self) -> int:
        """Pages that there must be: more than are distinct are never used."""
        return min(self.num_pages, max(1, self.trace.num_distinct))


def draw_cancelled(trace: Trace, *, rate: float, seed: int) -> list[Stage | None]:
    """Draw which requests are cancelled, and where; the same for the same seed."""
    chance, stages = random.Random(seed), list(Stage)
    return [
        chance.choice(stages) if chance.random() < rate else None for _ in trace.prompts
    ]


@dataclass(slots=True)
class Tally:
    """Sums over the requests that were served."""

    requests: int = 0
    cancelled: int = 0
    longer_than_device: int = 0
    pages: int = 0
    tokens: int = 0
    hit_pages: int = 0
    hit_tokens: int = 0
    store_hit_pages: int = 0
    fully_hit: int = 0

    def serve(self, prompt: Prompt, page_tokens: int, hit: int, stored: int) -> None:
        """Count a request with ``hit`` pages, the last ``stored`` from the store."""
        num_pages = len(prompt.pages) // TOKEN_BYTES
        limit = max(0, prompt.num_tokens - 1) // page_tokens
        self.requests += 1
        self.pages += num_pages
        self.tokens += prompt.num_tokens
        self.hit_pages += hit
        self.hit_tokens += min(hit, limit) * page_tokens
        self.store_hit_pages += stored
        self.fully_hit += hit == num_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One replay's result.

    Args:
        num_pages: Pages of the device.
        tally: What was asked and found.
        evicted: Pages evicted.
        resident: Pages resident in the end.
        leaked: Pages that nobody holds and nobody could have, in the end.
        left_open: Requests that are still open in the end.
        stored: Pages written to the store.
        failures: Transfers that failed.
        wrong_pages: Hit pages that held other bytes than theirs.
        seconds: How long it took.
    """

    num_pages: int
    tally: Tally
    evicted: int
    resident: int
    leaked: int
    left_open: int
    stored: int = 0
    failures: int = 0
    wrong_pages: int = 0
    seconds: float

    @property
    def page_ratio(self) -> float:
        """Hit pages of all pages."""
        return self.tally.hit_pages / max(1, self.tally.pages)

    @property
    def token_ratio(self) -> float:
        """Hit tokens of all tokens."""
        return self.tally.hit_tokens / max(1, self.tally.tokens)

    @property
    def is_clean(self) -> bool:
        """Whether nothing leaked and nothing was wrong."""
        return not (self.leaked or self.left_open or self.wrong_pages)


Advance = Callable[[], None]
"""Called after each request."""
