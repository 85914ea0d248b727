"""A copy on a CUDA stream, told to the event loop that began it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from asyncache.core import DeviceError
from asyncache.devices._copy import Copy, Word
from asyncache.devices._cuda_api import SUCCESS, Context, code_of, cuda
from asyncache.devices._cuda_lane import Mark
from asyncache.devices._cuda_words import CudaWord
from asyncache.devices._pooled import Buffer


class CudaCopy(Copy):
    """A copy on a stream, which other streams may wait for.

    Attributes:
        refused: Why not all of it was begun; None if it was.
    """

    def __init__(self, context: Context, buffer: Buffer) -> None:
        super().__init__()
        self.refused: DeviceError | None = None
        self._context = context
        self._event: int | None = None
        self._buffer: Buffer | None = buffer
        self._loop = asyncio.get_running_loop()
        # Held until the stream has passed it; an event would cost ten times as much.
        self._running = threading.Lock()
        self._running.acquire()
        self._lost: DeviceError | None = None

    def passed(self, error: DeviceError | None) -> None:
        """Take note that the stream has passed it; in a thread of the device."""
        self._lost = error
        self._running.release()
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._finish)

    def marked(self, mark: Mark) -> None:
        """Take note of where it ends in its stream's order."""
        self._event = mark.event
        if mark.event is not None and self.refused is None:
            self.fence = self

    def block(self) -> None:
        with self._running:
            self._finish()

    def hold(self, stream: int) -> None:
        """Make all that a stream is given from now on wait for the copy.

        At worst it waits for a later copy too: the event may be another's by now.
        """
        if not self._running.locked() or self._event is None:
            return
        with self._context:
            code = code_of(cuda.cuStreamWaitEvent(stream, self._event, 0))
            if code != SUCCESS:
                what = "a stream could not be told to wait for a copy"
                raise self._context.judge_refusal(code, stream, what)

    def raise_word(self, word: Word, value: int) -> None:
        """Have a word hold ``value`` once the copy is over."""
        assert isinstance(word, CudaWord)
        word.raise_behind(value)

    def _finish(self) -> None:
        self._buffer = None
        self.finish(self._lost or self.refused)
