"""What a store must do when what it keeps was changed behind its back: not serve it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial

import anyio.to_thread

from asyncache.stores import Status, Store
from asyncache.testing._samples import new_keys, new_target
from asyncache.testing._store_asserts import (
    Law,
    expect,
    expect_content,
    expect_in,
    put,
    put_new,
)

Stored = Callable[[Store], MutableMapping[str, bytes]]
"""Returns what a store keeps, one item a page."""

_NUM_FLIPS = 40
_NUM_CUTS = 7


def check_tampering(stored: Stored) -> Law:
    """Return the law that nothing tampered with is served."""

    async def what_was_tampered_with_is_not_served(store: Store) -> None:
        keys = await put_new(store, 4)
        items = stored(store)
        before = await anyio.to_thread.run_sync(set, items)
        bad = new_keys(_NUM_FLIPS + _NUM_CUTS + 2)
        await put(store, bad)
        tamper = partial(_tamper, items, before)
        num_items = await anyio.to_thread.run_sync(tamper)
        expect(num_items, len(bad), f"items stored of {len(bad)} pages")
        for layers in (range(1, 2), None):
            targets = [new_target(key, layers) for key in bad]
            statuses = await store.get_into(bad, targets, layers)
            allowed = {Status.MISS, Status.CORRUPT}
            if layers is not None:
                allowed.add(Status.HIT)  # of a layer that is as it was
            expect_in(statuses, allowed, "get_into of what was tampered with")
        await expect_content(store, keys)
        # What was found corrupt is gone, and in nobody's way.
        expect(await store.contains(bad), [False] * len(bad), "contains of it")
        await put(store, bad)
        await expect_content(store, [*keys, *bad])

    return what_was_tampered_with_is_not_served


def _tamper(items: MutableMapping[str, bytes], before: set[str]) -> int:
    """Change each new item, one in each way; return how many are new."""
    names = [name for name in items if name not in before]
    flipped, cut = names[:_NUM_FLIPS], names[_NUM_FLIPS : _NUM_FLIPS + _NUM_CUTS]
    for number, name in enumerate(flipped):
        items[name] = _flip(items[name], number / (_NUM_FLIPS - 1))
    for number, name in enumerate(cut):
        items[name] = _cuts(items[name])[number]
    swapped = names[_NUM_FLIPS + _NUM_CUTS :]
    for name, item in zip(swapped, [items[n] for n in reversed(swapped)], strict=True):
        items[name] = item
    return len(names)


def _flip(item: bytes, where: float) -> bytes:
    """Return an item with one bit changed, from the first at 0 to the last at 1."""
    place, bit = divmod(round(where * (8 * len(item) - 1)), 8)
    return item[:place] + bytes([item[place] ^ 1 << bit]) + item[place + 1 :]


def _cuts(item: bytes) -> list[bytes]:
    """Return an item cut short in several ways, and too long in two."""
    ends = [0, 1, len(item) // 4, len(item) // 2, len(item) - 1]
    return [*(item[:end] for end in ends), item + b"\0", item + item]
