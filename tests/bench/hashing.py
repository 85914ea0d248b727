"""Page hashes beside a bare loop of hashlib."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from asyncache.core import hash_pages, root_hash
from tests.bench import inputs
from tests.bench.measure import Row, interleave, repeat

NUM_TOKENS = 32_768


def run(num_rounds: int) -> Iterator[Row]:
    """Hash 32k tokens with pages of 16 and of 64."""
    key, parent = inputs.packed(NUM_TOKENS), root_hash(inputs.layout())
    for page_tokens in (16, 64):

        def ours(page_tokens: int = page_tokens) -> list[bytes]:
            return list(hash_pages(key, page_tokens=page_tokens, parent=parent))

        def bare(stride: int = 4 * page_tokens) -> bytes:
            sha256 = hashlib.sha256
            digest: bytes = parent
            for start in range(0, len(key), stride):
                digest = sha256(digest + key[start : start + stride]).digest()
            return digest

        assert ours()[-1] == bare()
        us = interleave(repeat(ours, 3), repeat(bare, 3), num_rounds=num_rounds)
        yield Row(
            name=f"hash {NUM_TOKENS} tokens, page {page_tokens}",
            ours=1e6 * us[0],
            baseline=1e6 * us[1],
            against="bare hashlib loop",
            bound=1.15,
        )
