"""A request's scope for a step loop in a thread: it blocks, or asks again later."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Self

from asyncache.engine._base_hit import BaseHit, Landing
from asyncache.engine._base_request import BaseRequest
from asyncache.engine._gates import Gates, Progress
from asyncache.engine._limits import check_deadline
from asyncache.engine._prompt import Prompt
from asyncache.engine._runtime import Runtime
from asyncache.engine._two_threads import TwoThreads


class BlockingHit(BaseHit[threading.Event]):
    """The leading tokens of a prompt that need no computing."""

    def __init__(
        self,
        landing: Landing[threading.Event],
        *,
        num_tokens: Callable[[Landing[threading.Event]], int],
        gates: Callable[[list[Progress]], Gates],
        check_open: Callable[[], object],
        queues: TwoThreads,
    ) -> None:
        super().__init__(
            landing, num_tokens=num_tokens, gates=gates, check_open=check_open
        )
        self._queues = queues

    def wait(self, *, timeout_s: float | None = None) -> Self:
        """Do as :meth:`BaseHit.wait`, for so many seconds: :attr:`settled` tells more.

        Args:
            timeout_s: Seconds to wait at most; until the restore's deadline if None.

        Raises:
            OrderError: If called from another thread, or by an observer.
        """
        after_s = check_deadline("timeout_s", timeout_s, math.inf)
        self._queues.wait(self._landing.settled.is_set, time.monotonic() + after_s)
        self._check()
        return self


class BlockingRequest(BaseRequest[threading.Event]):
    """One prompt and its pages, for as long as the scope lasts.

    Made by :meth:`BlockingCache.request` and used in a ``with`` block, once. All calls
    come from the thread that opened the cache. A call after the end raises ClosedError,
    or AbortedError if it was aborted.
    """

    def __init__(
        self,
        runtime: Runtime[BlockingRequest],
        prompt: Prompt,
        *,
        queues: TwoThreads,
    ) -> None:
        super().__init__(runtime, prompt)
        self._queues = queues

    def restore(self, *, deadline_s: float | None = None) -> BlockingHit:
        """Do as :meth:`BaseRequest.restore`, and block meanwhile.

        Where the same thread holds what this request waits for, that is a wait until
        the deadline: :meth:`restore_nowait` is for loops with several requests.
        """
        self._queues.check_may_wait()
        landing = self._begin_restore(deadline_s)
        try:
            self._queues.wait(landing.agreed.is_set, math.inf)
        except BaseException:
            # Interrupted, and the scope may go on: then it goes on with what is there.
            self._give_up(landing)
            raise
        self._open_state()
        return self._hit(landing)

    def restore_nowait(self, *, deadline_s: float | None = None) -> BlockingHit:
        """Do as :meth:`BaseRequest.restore_nowait`."""
        return self._hit(self._begin_restore(deadline_s))

    def _hit(self, landing: Landing[threading.Event]) -> BlockingHit:
        return BlockingHit(
            landing,
            num_tokens=self._hit_tokens,
            gates=partial(Gates, self._runtime.board),
            check_open=self._open_state,
            queues=self._queues,
        )

    def _signal(self) -> threading.Event:
        return threading.Event()
