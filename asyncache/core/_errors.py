"""Every error asyncache raises on purpose, and what its reader can do about it.

::

    AsyncacheError
      ClosedError            used after its end: open another
      AbortedError           this request was aborted: open another
      OrderError             a call at the wrong time, from the wrong task or thread
      OutOfPagesError        wait for room, suspend a request, or ask for less
      TooManyRequestsError   wait until one ends, or raise Limits.requests
      StoreError             the store cannot be opened or is misused
      DeviceError            a copy failed: the cache is over, build a new one
      RankError              ranks disagree, or one is silent: the group is done
      InvariantError         a bug in asyncache: please report it

Bad arguments are plain ValueError and TypeError. Cancellation is never wrapped. A
page that is missing, late or corrupt is never an error: it makes a hit shorter.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn


class AsyncacheError(Exception):
    """Base of every error that asyncache raises on purpose."""


class ClosedError(AsyncacheError):
    """The cache or the request was used after its end."""


class AbortedError(ClosedError):
    """The request was aborted, by its scope's end or by another rank."""


class OrderError(AsyncacheError):
    """A call came at the wrong time, from the wrong task or from another thread."""


class OutOfPagesError(AsyncacheError):
    """There are not enough pages now; nothing was changed.

    Attributes:
        needed: Pages that the call had to add, a pool.
        available: Pages that could be had, once what is promised to others is left.
    """

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle and copy with the numbers: a process may tell it to another."""
        make = partial(type(self), needed=self.needed, available=self.available)
        return (make, self.args)


class TooManyRequestsError(AsyncacheError):
    """More requests are open than ``Limits.requests`` allows."""


class StoreError(AsyncacheError):
    """The store cannot be opened, or was asked for something that it cannot mean."""


class DeviceError(AsyncacheError):
    """A device refused a tensor or a copy."""


class RankError(AsyncacheError):
    """Ranks disagree, or one of them is silent."""


class InvariantError(AsyncacheError):
    """A bug in asyncache: its own state is not what its laws say."""


def require(holds: bool, law: str, *facts: object) -> None:  # noqa: FBT001 - a law's truth
    """Raise :class:`InvariantError` naming the law and the facts unless it holds."""
    if not holds:
        broken(law, *facts)


def broken(law: str, *facts: object) -> NoReturn:
    """Raise :class:`InvariantError` naming a law that is broken, and the facts."""
    raise InvariantError(" ".join([law, *map(repr, facts)]))
