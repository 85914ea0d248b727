"""What a cache of pages does, said as simply as it can be.

A page is its whole prefix; resident pages are a dict. The victim is found by looking
at all of them. Shares no code with the replay, and reads the traces by itself.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

BLOCK_TOKENS = 512


@dataclass
class Request:
    num_tokens: int
    prefixes: list[Hashable]


def mooncake(path: Path, page_tokens: int) -> Iterator[Request]:
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        length = fields["input_length"]
        pages = [
            (block, start)
            for block in fields["hash_ids"]
            for start in range(0, BLOCK_TOKENS, page_tokens)
        ]
        if page_tokens < BLOCK_TOKENS:
            pages = pages[: length // page_tokens]
        yield Request(length, [tuple(pages[: i + 1]) for i in range(len(pages))])


def texts(folder: Path, page_tokens: int) -> Iterator[Request]:
    lines = [
        json.loads(line)
        for path in sorted(folder.iterdir())
        for line in path.read_text().splitlines()
    ]
    for fields in sorted(lines, key=lambda fields: fields["timestamp"]):
        text = fields["input"].encode()
        ends = range(page_tokens, len(text) + 1, page_tokens)
        yield Request(len(text), [text[:end] for end in ends])


@dataclass
class Cache:
    """Evicts the leaf that was used least recently."""

    num_pages: int
    used: dict[Hashable, int] = field(default_factory=dict)
    parent: dict[Hashable, Hashable] = field(default_factory=dict)
    evicted: int = 0
    now: int = 0

    def serve(self, prefixes: list[Hashable]) -> int:
        """Return how many leading pages are resident; afterwards all of them are."""
        hit = 0
        while hit < len(prefixes) and prefixes[hit] in self.used:
            hit += 1
        self.now += 1
        fits = prefixes[: self.num_pages]
        for page in fits[:hit]:
            self.used[page] = self.now
        for index, page in enumerate(fits[hit:], start=hit):
            if len(self.used) == self.num_pages:
                self.evict()
            self.used[page] = self.now
            self.parent[page] = fits[index - 1] if index else None
        return hit

    def evict(self) -> None:
        parents = {self.parent[page] for page in self.used}
        leaves = [page for page in self.used if page not in parents]
        del self.used[min(leaves, key=self.used.__getitem__)]
        self.evicted += 1


@dataclass
class Found:
    pages: int = 0
    tokens: int = 0
    hit_pages: int = 0
    hit_tokens: int = 0
    fully_hit: int = 0


def replay(requests: Iterator[Request], cache: Cache, page_tokens: int) -> Found:
    found = Found()
    for request in requests:
        hit = cache.serve(request.prefixes)
        limit = max(0, request.num_tokens - 1) // page_tokens
        found.pages += len(request.prefixes)
        found.tokens += request.num_tokens
        found.hit_pages += hit
        found.hit_tokens += min(hit, limit) * page_tokens
        found.fully_hit += hit == len(request.prefixes)
    return found
