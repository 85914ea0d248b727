"""What must not share pages and does not: models, layouts, shards, namespaces.

Keys are made as the engine makes them, from layouts, namespaces and tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace

from asyncache.core import (
    AttentionPool,
    KVLayout,
    Namespace,
    PageKey,
    Pool,
    StatePool,
    WindowPool,
    hash_pages,
    root_hash,
)
from asyncache.stores import Status, Store
from asyncache.testing._samples import new_target
from asyncache.testing._store_asserts import Law, expect, expect_content, put

_POOL = AttentionPool(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float16")
_FULL = replace(_POOL, name="full")
_WINDOW = WindowPool(
    name="kv",
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    dtype="float16",
    window_tokens=4,
)
_LONG = "x" * 2**20
ODD_NAMESPACES: Sequence[Namespace] = (
    None,
    "",
    b"",
    (),
    ("",),
    ("", ""),
    "None",
    "a",
    b"a",
    ("a",),
    ("a", "b"),
    ("b", "a"),
    ("ab",),
    ("a", b"b"),
    "@",
    "%",
    "a@b",
    "a%40b",
    "/",
    "//",
    ".",
    "..",
    "../..",
    "/etc/passwd",
    "a/b",
    "\0",
    "a\0",
    "\n",
    "\ufffd",
    b"\xff",
    "é",
    "e\u0301",
    "%s{0}$HOME`:`",
    _LONG,
    _LONG + "x",
    _LONG[:-1] + "y",
    _LONG.encode(),
)
_NAME = re.compile(r"[0-9a-z_-]{1,255}")


def page_keys(
    layout: KVLayout,
    namespace: Namespace = None,
    *,
    tokens: Sequence[int] = range(8),
    shard: tuple[int, int] = (0, 1),
) -> list[PageKey]:
    """Return the keys of a prompt's pages in the first pool, as an engine does."""
    rank, num_ranks = shard
    space = layout.space(layout.pools[0], rank=rank, num_ranks=num_ranks)
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    root = root_hash(layout, namespace)
    hashes = hash_pages(packed, page_tokens=layout.page_tokens, parent=root)
    return [PageKey(page_hash, space) for page_hash in hashes]


def new_layout() -> KVLayout:
    """Return the layout of a model that nobody used before."""
    model = f"model-{secrets.token_hex(8)}"
    return KVLayout(model=model, revision="1", page_tokens=4, pools=(_POOL,))


async def _another_model_layout_or_shard_is_a_miss(store: Store) -> None:
    layout = new_layout()
    [own, _] = page_keys(layout)
    await _expect_strangers(store, own, list(_others(layout)))


async def _equal_hashes_in_other_spaces_are_a_miss(store: Store) -> None:
    [own, _] = page_keys(new_layout())
    space = own.space
    num_layers, *rest = space.shape
    others = [
        replace(space, dtype="bfloat16"),
        replace(space, pool="kv2"),
        replace(space, shard="all"),
        replace(space, shard="0of10"),
        replace(space, shape=(num_layers, *reversed(rest))),
        replace(space, shape=(num_layers, space.layer_bytes // 2)),
        replace(space, shape=(2 * num_layers, space.layer_bytes // 4)),
        replace(space, dtype="uint8", shape=(num_layers, space.layer_bytes)),
    ]
    await _expect_strangers(store, own, [PageKey(own.hash, other) for other in others])


async def _namespaces_never_share_however_odd(store: Store) -> None:
    layout = new_layout()
    keys = [page_keys(layout, namespace)[0] for namespace in ODD_NAMESPACES]
    for key in keys:
        # All that a store ever learns of a namespace is 32 bytes of the hash.
        assert _NAME.fullmatch(key.name), f"{key.name!r:.200} is no name for a file"
    for key in (keys[0], keys[1], keys[-1]):
        await _expect_strangers(store, key, [other for other in keys if other != key])
        await store.remove(keys)


IDENTITY_LAWS: Sequence[Law] = (
    _another_model_layout_or_shard_is_a_miss,
    _equal_hashes_in_other_spaces_are_a_miss,
    _namespaces_never_share_however_odd,
)


def _others(layout: KVLayout) -> Iterator[PageKey]:
    """Yield keys of pages that look like the first of a layout, and are others."""
    first: Sequence[Pool] = (
        replace(_POOL, dtype="bfloat16"),
        replace(_POOL, dtype="float8_e5m2", head_dim=16),
        replace(_POOL, num_layers=4, num_kv_heads=1),
        replace(_POOL, num_kv_heads=1, head_dim=16),
        replace(_POOL, num_parts=1, head_dim=16),
        replace(_POOL, name="other"),
        replace(_POOL, replicated=True),
        _WINDOW,
        replace(_WINDOW, window_tokens=8),
        StatePool(name="kv", num_layers=2, shape=(2, 4, 2, 8), dtype="float16"),
    )
    layouts = [replace(layout, pools=(pool, _FULL)) for pool in (_POOL, *first)]
    layouts += [
        replace(layout, model=layout.model + "1", revision=""),
        replace(layout, model=layout.model[:-1], revision=layout.model[-1] + "1"),
        replace(layout, revision=""),
        replace(layout, revision="2"),
        replace(layout, page_tokens=2),
    ]
    for other in layouts:
        yield page_keys(other)[0]
    for shard in ((0, 2), (1, 2), (0, 10), (1, 10)):
        yield page_keys(layout, shard=shard)[0]
    yield page_keys(layout)[1]
    yield page_keys(layout, tokens=[*range(4, 8), *range(4)])[1]


async def _expect_strangers(
    store: Store, own: PageKey, others: Sequence[PageKey]
) -> None:
    """Raise unless all these pages are different ones, stored and read."""
    assert len({own, *others}) == 1 + len(others), "two of these pages have one key"
    await put(store, [own])
    expect(await store.contains(others), [False] * len(others), "contains of others")
    targets = [new_target(key) for key in others]
    misses = [Status.MISS] * len(others)
    expect(await store.get_into(others, targets), misses, "get_into of others")
    await put(store, others)
    await expect_content(store, [own, *others])
    await store.remove([own])
    expect(await store.contains([own]), [False], "contains once removed")
    await expect_content(store, others)
