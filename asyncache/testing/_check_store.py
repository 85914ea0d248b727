"""The contract of a store as checks that any store can be put to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from asyncache.stores import Store
from asyncache.testing._nth import noting
from asyncache.testing._store_identity import IDENTITY_LAWS
from asyncache.testing._store_laws import BASIC_LAWS
from asyncache.testing._store_listing import LISTING_LAWS
from asyncache.testing._store_processes import check_processes
from asyncache.testing._store_races import RACE_LAWS
from asyncache.testing._store_tampering import Stored, check_tampering

StoreMaker = Callable[[], AbstractAsyncContextManager[Store]]


async def check_store(
    make_store: StoreMaker,
    *,
    stored: Stored | None = None,
    reopen: StoreMaker | None = None,
) -> None:
    """Raise AssertionError unless a store keeps the contract.

    Needs no pytest::

        await check_store(lambda: FileStore(directory))

    Args:
        make_store: Returns a store as a context manager, once for each law. The
            stores may share what is behind them: each law uses pages of its own,
            different from run to run. 16 MiB must fit without eviction; a law puts
            more than that, to have pages evicted.
        stored: Returns what a store of yours keeps, by names of your choice: one item
            a page, all that the page is made of. Items are read, replaced and
            swapped, on another thread, while the store is open and idle: none of what
            becomes of them may be served. Without, nothing is tampered with.
        reopen: Does what ``make_store`` does, in another process, and so can be
            pickled: ``functools.partial(FileStore, directory)``. Two interpreters and
            this one, which hash a str differently, must find what the others put; one
            has it open at a time. Without, no process is started.

    Raises:
        AssertionError: If a law is broken; a note names the law. A store that raises
            StoreError "<its class> cannot list its pages" is asked for no keys.
    """
    laws = [*BASIC_LAWS, *RACE_LAWS, *IDENTITY_LAWS, *LISTING_LAWS]
    if stored is not None:
        laws.append(check_tampering(stored))
    for law in laws:
        async with make_store() as store:
            with noting(f"{store!r} breaks the law: {law.__name__.strip('_')}"):
                await law(store)
    if reopen is not None:
        with noting("it breaks the law: interpreters find each other's pages"):
            await check_processes(make_store, reopen)
