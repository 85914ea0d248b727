"""Prompts and layouts that the benchmarks share."""

from __future__ import annotations

import os
import random
import struct

from asyncache.core import (
    HASH_BYTES,
    AttentionPool,
    KVLayout,
    PageHash,
    namespace_tag,
)

PAGE_TOKENS = 16
TAG = namespace_tag("bench")


def layout(page_bytes: int = 256, num_layers: int = 1) -> KVLayout:
    """Return a layout of one full-attention pool with pages of so many bytes."""
    page_items = page_bytes // 2  # of 16 bits
    pool = AttentionPool(
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=page_items // (num_layers * 2 * PAGE_TOKENS),
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


def new_hashes(count: int) -> list[PageHash]:
    """Return hashes of pages of one namespace that no store has."""
    return [PageHash(TAG + os.urandom(HASH_BYTES - len(TAG))) for _ in range(count)]
