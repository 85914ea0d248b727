"""A toy model: each token's bytes are a function of it and of all tokens before it.

So a page that was given to two, read before it landed, or loaded into the wrong place
is seen by whoever reads it: :meth:`ToyModel.forward` reads before it writes, as
attention does, and counts the bytes that are not what they mean.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import anyio.to_thread
import torch

from asyncache import AttentionPool, KVLayout

PAGE_TOKENS = 16
VOCAB_TOKENS = 50_000
KV = AttentionPool(num_layers=4, num_kv_heads=1, head_dim=32, dtype="uint8")
LAYOUT = KVLayout(model="storm", page_tokens=PAGE_TOKENS, pools=(KV,))

# Layers, key and value, heads, and words of eight items.
_TOKEN_SHAPE = (4, 2, 1, 4)
_PRIME = 2**61 - 1
_FACTOR = 0x1F83_D9AB_FB41_BD6B % _PRIME
_SALTS = torch.randint(2**62, (32,), generator=torch.Generator().manual_seed(7))


class Text:
    """Tokens, and for each the digest of all tokens up to it."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self.digests: list[int] = []
        for token in tokens:
            self.add(token)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int) -> None:
        """Append a token."""
        before = self.digests[-1] if self.digests else 1
        self.tokens.append(token)
        self.digests.append((before * _FACTOR + token + 1) % _PRIME)

    @property
    def next_token(self) -> int:
        """The token that the model says next."""
        return self.digests[-1] % VOCAB_TOKENS


@dataclass(eq=False, slots=True)
class Work:
    """What a forward does for one request.

    Args:
        pages: Ids of its pages, position -> page.
        num_read: Leading tokens whose bytes are read, and must be right.
        start: First token to compute.
        digests: Of all its tokens, those to compute included.
    """

    pages: Sequence[int]
    num_read: int
    start: int
    digests: Sequence[int]


class ToyModel:
    """Computes the bytes of tokens into the pages of a pool.

    Args:
        pool: The pages, uint8, shape [num_pages, num_layers, 2, page_tokens, 1, 32].
        step_s: Seconds that a forward takes beyond its reading and writing.

    Attributes:
        read_bytes: Bytes that forwards have read.
        wrong_bytes: Those of them that were not what they mean.
    """

    def __init__(self, pool: torch.Tensor, *, step_s: float = 0.0) -> None:
        self._words = pool.view(torch.int64)
        self._step_s = step_s
        self.read_bytes = 0
        self.wrong_bytes = 0

    async def run(self, batch: Sequence[Work]) -> None:
        """Run a forward; returns, or is cancelled, when it touches no page any more."""
        await anyio.to_thread.run_sync(self.forward, batch)

    def forward(self, batch: Sequence[Work]) -> None:
        """Read what the tokens stand on, then compute them."""
        self.read(batch)
        time.sleep(self._step_s)  # in a thread: as long as an accelerator would take
        self.write(batch)

    def read(self, batch: Sequence[Work]) -> None:
        """Compare the bytes of tokens that were computed before, by whomever."""
        pages, offsets = _places((work, 0, work.num_read) for work in batch)
        found = self._words[pages, :, :, offsets]
        meant = _words_of(
            [digest for work in batch for digest in work.digests[: work.num_read]]
        )
        self.read_bytes += found.nbytes
        if not torch.equal(found, meant):
            wrong = found.view(torch.uint8) != meant.view(torch.uint8)
            self.wrong_bytes += int(wrong.sum())

    def write(self, batch: Sequence[Work]) -> None:
        """Compute the bytes of tokens."""
        pages, offsets = _places(
            (work, work.start, len(work.digests)) for work in batch
        )
        self._words[pages, :, :, offsets] = _words_of(
            [digest for work in batch for digest in work.digests[work.start :]]
        )


def _places(
    runs: Iterable[tuple[Work, int, int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return page and place in the page of each token of some runs."""
    slots = [
        work.pages[place // PAGE_TOKENS] * PAGE_TOKENS + place % PAGE_TOKENS
        for work, start, stop in runs
        for place in range(start, stop)
    ]
    flat = torch.tensor(slots, dtype=torch.int64)
    return flat // PAGE_TOKENS, flat % PAGE_TOKENS


def _words_of(digests: Sequence[int]) -> torch.Tensor:
    """Return what tokens look like, int64, shape [num_tokens, *_TOKEN_SHAPE]."""
    words = torch.tensor(digests, dtype=torch.int64)[:, None] ^ _SALTS
    for factor in (-0x61C8_8646_80B5_83EB, -0x3B31_4601_E57A_13AD):
        words *= factor
        words ^= words >> 31
    return words.view(len(digests), *_TOKEN_SHAPE)


class Prompts:
    """Prompts that branch: a few stems, each with branches, each with twigs.

    Args:
        dice: Where all chance comes from.
        num_stems: Beginnings that share nothing, such as system prompts.
    """

    def __init__(self, dice: Random, *, num_stems: int = 6) -> None:
        self._dice = dice
        self._stems = [list(self._tokens(64, 320)) for _ in range(num_stems)]
        self._branches = [list(self._grow(self._stems, 32, 160)) for _ in range(40)]
        self._twigs = [list(self._grow(self._branches, 16, 96)) for _ in range(400)]

    def draw(self) -> list[int]:
        """Return a prompt; some are asked for far more often than others."""
        grown = self._dice.choice((self._branches, self._twigs, self._twigs))
        return list(self._grow(grown, 1, 48))

    def _grow(self, texts: list[list[int]], least: int, most: int) -> Iterator[int]:
        place = int(len(texts) * self._dice.random() ** 1.5)
        yield from texts[place]
        yield from self._tokens(least, most)

    def _tokens(self, least: int, most: int) -> Iterator[int]:
        for _ in range(self._dice.randint(least, most)):
            yield self._dice.randrange(VOCAB_TOKENS)
