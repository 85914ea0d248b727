"""An event loop whose clock jumps to the next timer when nothing else can happen."""

from __future__ import annotations

import asyncio
import selectors


class JumpingSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("nothing can ever happen any more")
            self.now += max(timeout, 0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self.selector = JumpingSelector()
        super().__init__(self.selector)

    def time(self):
        return self.selector.now


def in_virtual_time(main):
    """Run an async function; seconds cost nothing, and a hang is an error."""
    # Not in debug mode: it keeps a stack of each handle, which is all that would cost.
    with asyncio.Runner(loop_factory=VirtualLoop, debug=False) as runner:
        return runner.run(main())
