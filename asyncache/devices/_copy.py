"""A copy under way: it goes on by itself, whatever becomes of who began it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import anyio

from asyncache.threads import outlast


class Fence(Protocol):
    """The end of a copy, for streams: they wait for it where the host does not."""

    def hold(self, stream: int) -> None:
        """Make all that a stream is given from now on wait for the copy.

        Raises:
            DeviceError: If the stream could not be told.
        """

    def raise_word(self, word: Word, value: int) -> None:
        """Have a word hold ``value`` once the copy is over.

        Raises:
            DeviceError: If the copy's stream could not be told.
        """


class Word(Protocol):
    """A number that only rises, and that streams wait for.

    They can do so before what raises it has begun, as they cannot for a fence.
    """

    def hold(self, stream: int, value: int) -> None:
        """Make all that a stream is given from now on wait until it is ``value``.

        Raises:
            DeviceError: If the stream could not be told.
        """

    def set(self, value: int) -> None:
        """Raise it from the host, at once."""

    def release(self) -> None:
        """Give it back: no stream will be told to wait for it any more."""


class Copy(ABC):
    """A copy between pages and host memory that has begun, and cannot be recalled.

    Until it is over, it reads and writes what it was begun with. Used from the event
    loop that began it.

    Attributes:
        error: What it failed with, once it is over.
        fence: What streams may wait for; None where there are no streams.
    """

    fence: Fence | None = None

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._over = anyio.Event()
        self._calls: list[Callable[[], None]] = []

    @property
    def is_over(self) -> bool:
        """Whether it touches nothing any more."""
        return self._over.is_set()

    def when_over(self, call: Callable[[], None]) -> None:
        """Make a call on the event loop once it is over; at once if it is."""
        if self.is_over:
            call()
        else:
            self._calls.append(call)

    async def wait(self) -> None:
        """Wait until it is over; cancelled, raise only then.

        Raises:
            DeviceError: If it failed; which bytes were written is undefined.
        """
        await self.settle()
        if self.error is not None:
            raise self.error

    async def settle(self) -> None:
        """Wait as :meth:`wait` does, whatever came of it."""
        try:
            await outlast(self._over)
        finally:
            if not self.is_over:
                # The coroutine was thrown away, by close() or by a dead loop: nothing
                # can be awaited any more, and only blocking keeps the rule.
                self.block()

    @abstractmethod
    def block(self) -> None:
        """Block this thread until it is over: where nothing can be awaited any more."""

    def finish(self, error: BaseException | None = None) -> None:
        """Take note that it is over; for the device. A second time changes nothing."""
        if not self.is_over:
            self.error = error
            self._over.set()
            calls, self._calls = self._calls, []
            for call in calls:
                call()
