"""One model for all requests: whoever waits takes part in the next forward."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from asyncache import KVCache, Request
from examples.storm.toy import Text, ToyModel, Work


@dataclass(eq=False, slots=True)
class _Row:
    """One request's part in the next forward."""

    request: Request
    work: Work
    done: anyio.Event = field(default_factory=anyio.Event)


class Batch:
    """One model for all: whoever waits takes part in the next forward."""

    def __init__(self, cache: KVCache, model: ToyModel) -> None:
        self._cache = cache
        self._model = model
        self._rows: dict[_Row, None] = {}
        self._joined = anyio.Event()

    async def compute(
        self, request: Request, text: Text, *, start: int, num_read: int
    ) -> None:
        """Compute a text from a token on, after reading its first ``num_read``."""
        # Copies: the model's thread must not read what the loop may change.
        pages, digests = tuple(request.page_table["kv"]), tuple(text.digests)
        row = _Row(request, Work(pages, num_read, start, digests))
        self._rows[row] = None
        self._joined.set()
        try:
            await row.done.wait()
        finally:
            self._rows.pop(row, None)

    async def run(self) -> None:
        """Run forwards until cancelled."""
        while True:
            await self._joined.wait()
            self._joined = anyio.Event()
            rows = list(self._rows)
            if rows:
                await self._step(rows)

    async def _step(self, rows: list[_Row]) -> None:
        # Until the model has stopped, nobody gets a page that it may touch.
        with self._cache.forward([row.request for row in rows]):
            await self._model.run([row.work for row in rows])
        for row in rows:
            if row in self._rows:  # else its client hung up meanwhile
                del self._rows[row]
                row.done.set()
        if self._rows:  # they came while it ran
            self._joined.set()
