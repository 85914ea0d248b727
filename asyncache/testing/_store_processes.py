"""Whether interpreters that hash a str differently find each other's pages."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import anyio

from asyncache.core import KVLayout, Namespace, PageKey
from asyncache.stores import Store
from asyncache.testing._store_asserts import expect_content, put
from asyncache.testing._store_identity import new_layout, page_keys

Maker = Callable[[], AbstractAsyncContextManager[Store]]

_NAMESPACES: tuple[Namespace, ...] = (None, "", "tenant-a", b"\xff", ("a", b"b"))
# The path first: what is pickled behind it may be anywhere on it.
_CHILD = """\
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
pickle.load(sys.stdin.buffer)()
"""


async def check_processes(make_store: Maker, reopen: Maker) -> None:
    """Raise AssertionError unless three interpreters find each other's pages.

    Args:
        make_store: Makes the store here.
        reopen: Makes the same store elsewhere; goes there pickled.
    """
    theirs, ours = new_layout(), new_layout()
    await _run_child(1, partial(_put, reopen, theirs))
    async with make_store() as store:
        await expect_content(store, _keys(theirs))
        await put(store, _keys(ours))
    await _run_child(2, partial(_read, reopen, theirs, ours))


def _put(make: Maker, layout: KVLayout) -> None:
    async def main() -> None:
        async with make() as store:
            await put(store, _keys(layout))

    asyncio.run(main())


def _read(make: Maker, *layouts: KVLayout) -> None:
    async def main() -> None:
        async with make() as store:
            for layout in layouts:
                await expect_content(store, _keys(layout))

    asyncio.run(main())


def _keys(layout: KVLayout) -> list[PageKey]:
    """Return keys of pages, made here and now, from nothing that was hashed before."""
    return [key for name in _NAMESPACES for key in page_keys(layout, name)]


async def _run_child(hash_seed: int, job: Callable[[], None]) -> None:
    # env, so that the rest of our environment goes along unread.
    seed = f"PYTHONHASHSEED={hash_seed}"
    done = await anyio.run_process(
        ["env", seed, sys.executable, "-c", _CHILD],
        input=pickle.dumps(sys.path) + pickle.dumps(job),
        stderr=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip()
        raise AssertionError(f"a process with {seed} ended with {told[-1000:]}")
