"""Numbers in place of addresses, and no collector, while a simulated loop runs.

Both are the process's, and other loops may run in other threads: so they are put back
when the last simulated loop has ended, and touch nothing of anyone else's meanwhile.
"""

from __future__ import annotations

import gc
import threading
from asyncio import events
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from weakref import ref

_LOCK = threading.Lock()


class _Shared:
    """Something that the first of several begins, and the last of them ends."""

    def __init__(self) -> None:
        self.num_users = 0
        self.was: Any = None


_COLLECTOR, _SCOPES = _Shared(), _Shared()


@contextmanager
def collector_off() -> Generator[None]:
    """Keep the collector from running."""
    with _LOCK:
        if not _COLLECTOR.num_users:
            _COLLECTOR.was = gc.isenabled()
            gc.disable()
        _COLLECTOR.num_users += 1
    try:
        yield
    finally:
        with _LOCK:
            _COLLECTOR.num_users -= 1
            if not _COLLECTOR.num_users and _COLLECTOR.was:
                gc.enable()


@contextmanager
def numbered_scopes(kind: type) -> Generator[None]:
    """Hash anyio's cancel scopes by the order in which they come to be hashed.

    It keeps them in sets, by address, and cancels what is in them in that order. A
    scope that was hashed in another kind of loop keeps the hash that it had.

    Args:
        kind: The class of a scope.
    """
    with _LOCK:
        if not _SCOPES.num_users:
            _SCOPES.was = kind.__hash__
            kind.__hash__ = _hash_by(kind.__hash__)  # type: ignore[method-assign]
        _SCOPES.num_users += 1
    try:
        yield
    finally:
        with _LOCK:
            _SCOPES.num_users -= 1
            if not _SCOPES.num_users:
                kind.__hash__ = _SCOPES.was  # type: ignore[method-assign]


def _hash_by(was: Any) -> Any:  # noqa: ANN401 - a method of any class
    numbers: dict[int, tuple[int, ref[Any]]] = {}

    def number(self: object) -> int:
        key = id(self)
        known = numbers.get(key)
        if known is None:
            loop: Any = events._get_running_loop()  # noqa: SLF001 - asks and never raises
            next_number = getattr(loop, "next_number", None)
            if next_number is None:
                found: int = was(self)
                return found
            gone = ref(self, lambda _: numbers.pop(key, None))
            numbers[key] = known = (next_number(), gone)
        return known[0]

    return number
