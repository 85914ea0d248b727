"""What the bytes of a page are: a function of all that must make them differ.

Namespace, weights, every token up to the page's end, pool, layer and shard: so a page
that was given to two, read before it landed, taken for another's or kept across new
weights shows as bytes that are not its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import NamedTuple

from asyncache.core import (
    KVLayout,
    Namespace,
    PageHash,
    PageKey,
    PageSpace,
    Pool,
    WindowPool,
    hash_pages,
    root_hash,
)
from asyncache.testing.simulation._errors import LawError


def needed(layout: KVLayout, pool: Pool, num_tokens: int) -> range:
    """Return the whole pages of a pool that the token after ``num_tokens`` reads."""
    first = 0
    if isinstance(pool, WindowPool):
        first = max(0, num_tokens - pool.window_tokens) // layout.page_tokens
    return range(first, num_tokens // layout.page_tokens)


class Era(NamedTuple):
    """Whose pages they are, and by which weights they were computed."""

    namespace: Namespace
    revision: str


class Contents:
    """The meaning of every page that a run may come to hold.

    Args:
        layout: The pools of the model.
        spaces: What the bytes of each pool are on this shard.
    """

    def __init__(self, layout: KVLayout, spaces: list[PageSpace]) -> None:
        self.unkept: set[tuple[Era, bytes]] = set()
        """Prefixes of whose states there was no room to keep a copy."""
        self._layout = layout
        self._stride = 4 * layout.page_tokens
        self._spaces = {space.pool: space for space in spaces}
        self._roots: dict[Era, PageHash] = {}
        self._meanings: dict[PageHash, tuple[Era, bytes]] = {}
        self._learnt: set[tuple[Era, bytes]] = set()
        self._pages: dict[tuple[Era, bytes, str], bytes] = {}
        self.eras: dict[PageHash, Era] = {}
        """By the root hash that a tree files them under."""

    def page(self, era: Era, tokens: bytes, pool: str) -> bytes:
        """Return the bytes of the page that ends with these tokens, all layers."""
        found = self._pages.get((era, tokens, pool))
        if found is None:
            found = self._make(era, tokens, self._spaces[pool])
            self._pages[era, tokens, pool] = found
        return found

    def learn(self, era: Era, tokens: bytes) -> None:
        """Take note of a prompt, so that the keys of its pages can be read.

        Raises:
            LawError: If two prompts, or two eras, have a page hash in common.
        """
        whole = tokens[: len(tokens) - len(tokens) % self._stride]
        if (era, whole) in self._learnt:
            return
        self._learnt.add((era, whole))
        hashes = hash_pages(
            whole, page_tokens=self._layout.page_tokens, parent=self._root(era)
        )
        for index, page_hash in enumerate(hashes):
            meaning = (era, whole[: (index + 1) * self._stride])
            known = self._meanings.setdefault(page_hash, meaning)
            if known != meaning:
                raise LawError(f"one hash for {known} and {meaning}")

    def keys(self, era: Era, tokens: bytes) -> list[PageKey]:
        """Return what a store calls the whole pages of a prompt, of all pools."""
        hashes = hash_pages(
            tokens, page_tokens=self._layout.page_tokens, parent=self._root(era)
        )
        return [PageKey(h, space) for h in hashes for space in self._spaces.values()]

    def under(self, key: PageKey) -> bytes | None:
        """Return the bytes that a store must have under a key; None if it is no key."""
        meaning = self._meanings.get(key.hash)
        if meaning is None or self._spaces.get(key.space.pool) != key.space:
            return None
        return self.page(*meaning, key.space.pool)

    def _root(self, era: Era) -> PageHash:
        root = self._roots.get(era)
        if root is None:
            layout = replace(self._layout, revision=era.revision)
            root = self._roots[era] = root_hash(layout, era.namespace)
            known = self.eras.setdefault(root, era)
            if known != era:
                raise LawError(f"one root for {known} and {era}")
        return root

    @staticmethod
    def _make(era: Era, tokens: bytes, space: PageSpace) -> bytes:
        meaning = f"{era!r} {space.pool} {space.shard}".encode() + tokens
        return b"".join(
            hashlib.blake2b(
                meaning, digest_size=space.layer_bytes, key=bytes([layer + 1])
            ).digest()
            for layer in range(space.num_layers)
        )
