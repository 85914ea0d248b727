"""Prompts and layouts that the benchmarks share."""

from __future__ import annotations

import random
import struct

from asyncache.core import AttentionPool, KVLayout

PAGE_TOKENS = 16

# Layers, heads and head size of 16-bit pages with 16 tokens.
_SHAPES = {
    256: (1, 1, 4),
    16 * 2**10: (4, 1, 64),
    64 * 2**10: (4, 2, 128),
    256 * 2**10: (8, 4, 128),
    2 * 2**20: (32, 8, 128),
}


def layout(page_bytes: int = 256) -> KVLayout:
    """Return a layout of one full-attention pool with pages of so many bytes."""
    num_layers, num_kv_heads, head_dim = _SHAPES[page_bytes]
    pool = AttentionPool(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype="float16",
    )
    made = KVLayout(model="bench", page_tokens=PAGE_TOKENS, pools=(pool,))
    assert made.space(pool).page_bytes == page_bytes
    return made


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    """Return random token ids."""
    dice = random.Random(seed)
    return [dice.randrange(100_000) for _ in range(num_tokens)]


def packed(num_tokens: int, seed: int = 0) -> bytes:
    """Return random token ids as packed int32."""
    return struct.pack(f"<{num_tokens}i", *tokens(num_tokens, seed))
