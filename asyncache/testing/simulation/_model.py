"""A model whose forwards read their pages at their begin and write at their end.

As in a real loop the batch is not its clients' own: one that hangs up while a forward
runs is written for all the same, to pages that it has given back by then.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING

import anyio

from asyncache.core import (
    AsyncacheError,
    ClosedError,
    Coverage,
    InvariantError,
    RequestState,
)
from asyncache.engine import Gates, KVCache, Request
from asyncache.testing.simulation._contents import Contents, Era, needed
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._laws import Laws, Place, Writing

if TYPE_CHECKING:
    from asyncache.testing.simulation._device import SimulatedDevice

_NONSENSE = 0xDD
"""What is computed from what was never there."""
EPSILON_S = 1e-9
"""Deadlines are sums of floats."""


@dataclass(eq=False, slots=True, kw_only=True)
class Row:
    """One request's part in the next forward.

    Args:
        request: Whose it is.
        era: What its pages mean.
        tokens: All tokens that will have pages, packed.
        start: Tokens that need no computing.
        gates: What its hit waits for; None if it has landed.
        has_state: Whether its slots are to hold the state after ``start`` tokens.
    """

    request: Request
    era: Era
    tokens: bytes
    start: int
    gates: Gates | None
    has_state: bool
    done: anyio.Event = field(default_factory=anyio.Event)
    error: AsyncacheError | None = None
    has_run: bool = False
    misread: str = ""
    """What a layer held that was read behind its gate, if it was not what it means."""


class Model:
    """Runs forwards over whoever waits.

    Args:
        cache: What its pages are of.
        device: Where they are.
        contents: What they mean.
        laws: Told which pages are being written.
        forward_s: Returns how long the next forward takes, in seconds.
        gate_s: How long a gate may stay shut.
    """

    def __init__(
        self,
        cache: KVCache,
        device: SimulatedDevice,
        contents: Contents,
        laws: Laws,
        *,
        forward_s: Callable[[], float],
        gate_s: float,
    ) -> None:
        self._cache = cache
        self._device = device
        self._contents = contents
        self._laws = laws
        self._forward_s = forward_s
        self._gate_s = gate_s
        pools = device.layout.pools
        is_paged = [pool.coverage is not Coverage.ENDPOINT for pool in pools]
        # States come last.
        self._pools = [pool.name for pool in compress(pools, is_paged)]
        self._states = [pool.name for pool in pools[len(self._pools) :]]
        self._layout = device.layout
        self._num_layers = device.layout.pools[0].num_layers
        self._page_tokens = device.layout.page_tokens
        self._rows: dict[Row, None] = {}
        self._joined = anyio.Event()

    async def compute(self, row: Row) -> None:
        """Take part in the next forward; raise what kept it from running."""
        self._rows[row] = None
        self._joined.set()
        try:
            await row.done.wait()
        finally:
            self._rows.pop(row, None)
        if row.error is not None:
            raise row.error

    async def run(self) -> None:
        """Run forwards until cancelled."""
        while True:
            await self._joined.wait()
            self._joined = anyio.Event()
            if rows := list(self._rows):
                # A forward that has begun cannot be recalled.
                with anyio.CancelScope(shield=True):
                    await self._step(rows)

    async def _step(self, rows: list[Row]) -> None:
        try:
            await self._forward(rows)
        except InvariantError:
            raise
        except AsyncacheError as error:
            for row in rows:
                row.error = error
        for row in rows:
            self._rows.pop(row, None)
            row.done.set()
        if self._rows:  # they came while it ran
            self._joined.set()

    async def _forward(self, rows: list[Row]) -> None:
        await self.begin(rows)

    def begin(self, rows: list[Row]) -> Coroutine[object, object, None]:
        """Open a bracket; return what runs the model in it, which must be awaited."""
        with ExitStack() as bracket:
            requests = [row.request for row in rows]
            bracket.enter_context(self._cache.forward(requests))
            # A hit may have sunk since they joined, and taken pages with it.
            rows = [row for row in rows if self._has_pages(row)]
            works = [self._work(row) for row in rows]
            writing = Writing()
            for work in works:
                for pool, position in self._written(work):
                    place = (pool, work.tables[pool][position])
                    writing.places[place] = work.state
                for index, slot in enumerate(work.slots):
                    writing.places[len(self._pools) + index, slot] = work.state
            self._laws.forwards[writing] = None
            bracket.callback(self._laws.forwards.pop, writing)
            return self._run(works, bracket.pop_all())

    async def _run(self, works: list[_Work], bracket: ExitStack) -> None:
        with bracket:
            await self._compute(works)

    async def _compute(self, works: list[_Work]) -> None:
        for work in works:
            self._read(work, "as it begins")
        for layer in range(self._num_layers):
            for work in works:
                if work.row.gates is not None:
                    await self._pass(work.row.gates, layer)
                    self._read_layer(work, layer)
        await anyio.sleep(self._forward_s())
        for work in works:
            self._read(work, "as it ends")
            for pool, position in self._written(work):
                view = self._device.page(self._pools[pool], work.tables[pool][position])
                wrong = bytes([_NONSENSE]) * len(view)
                right = self._meaning(work, pool, position)
                view[:] = wrong if work.row.misread else right
            self._write_states(work)

    async def _pass(self, gates: Gates, layer: int) -> None:
        began = anyio.current_time()
        await gates.wait(layer)
        if anyio.current_time() - began > self._gate_s + EPSILON_S:
            raise LawError(f"a gate stayed shut for {anyio.current_time() - began} s")

    # What a row reads and writes.

    def _work(self, row: Row) -> _Work:
        state = row.request._state  # noqa: SLF001 - the simulator looks inside
        assert state is not None
        slots = list(row.request.state_slot.values())
        return _Work(row, self._tables(row), row.request.settled, state, slots)

    def _write_states(self, work: _Work) -> None:
        """Bring a row's slots to the last boundary and keep that, then to its end."""
        end = len(work.row.tokens) // 4
        for num_tokens in (end - end % self._page_tokens, end):
            if num_tokens > work.row.start:
                self._bring(work, num_tokens)
                self._checkpoint(work, num_tokens)

    def _bring(self, work: _Work, num_tokens: int) -> None:
        for name, slot in zip(self._states, work.slots, strict=True):
            tokens = work.row.tokens[: 4 * num_tokens]
            page = self._contents.page(work.row.era, tokens, name)
            self._device.page(name, slot)[:] = page

    def _checkpoint(self, work: _Work, num_tokens: int) -> None:
        state, request = work.state, work.row.request
        # It may have given all back while this ran.
        is_its_own = bool(work.slots) and list(state.slots.own) == work.slots
        least = max(state.shared, state.hit) * self._page_tokens
        is_new = least < num_tokens and num_tokens % self._page_tokens == 0
        if is_its_own and is_new:
            with suppress(ClosedError):
                if not request.checkpoint(num_tokens):
                    prefix = work.row.tokens[: 4 * num_tokens]
                    self._contents.unkept.add((work.row.era, prefix))

    def _tables(self, row: Row) -> list[list[int]]:
        tables = row.request.page_table
        return [list(tables[name]) for name in self._pools]

    def _has_pages(self, row: Row) -> bool:
        num_pages = len(row.request.page_table[self._pools[0]])
        row.has_run = num_pages * 4 * self._page_tokens >= len(row.tokens)
        return row.has_run

    def _written(self, work: _Work) -> Iterator[Place]:
        """Yield (pool, position) of all that a row computes."""
        num_pages = -(-len(work.row.tokens) // (4 * self._page_tokens))
        for position in range(work.row.start // self._page_tokens, num_pages):
            for pool in range(len(self._pools)):
                yield pool, position

    def _stands_on(self, work: _Work, pool: int) -> range:
        """Return the whole pages that a row reads."""
        return needed(self._layout, self._layout.pools[pool], work.row.start)

    def _meaning(self, work: _Work, pool: int, position: int) -> bytes:
        end = (position + 1) * 4 * self._page_tokens
        return self._contents.page(
            work.row.era, work.row.tokens[:end], self._pools[pool]
        )

    def _read(self, work: _Work, when: str) -> None:
        """Read what a row stands on; all of it must be there, throughout."""
        if not work.is_settled:
            return
        for name, slot in zip(self._states, work.slots, strict=True):
            self._read_state(work, name, slot, when)
        for pool, name in enumerate(self._pools):
            for position in self._stands_on(work, pool):
                page = work.tables[pool][position]
                if page < 0 or self._device.page(name, page) != self._meaning(
                    work, pool, position
                ):
                    raise LawError(
                        f"a forward reads page {page} of {name!r} as position"
                        f" {position} of {work.row.request}, {when}: other bytes"
                    )

    def _read_state(self, work: _Work, name: str, slot: int, when: str) -> None:
        row, tokens = work.row, work.row.tokens[: 4 * work.row.start]
        wanted = self._contents.page(row.era, tokens, name)
        if row.has_state and row.start and self._device.page(name, slot) != wanted:
            raise LawError(
                f"a forward goes on from slot {slot} of {name!r} at token {row.start}"
                f" of {row.request}, {when}: another state"
            )

    def _read_layer(self, work: _Work, layer: int) -> None:
        """Read one layer behind its gate; who may use it is known only later."""
        for pool, name in enumerate(self._pools):
            for position in self._stands_on(work, pool):
                page = work.tables[pool][position]
                if page < 0:
                    continue
                found, wanted = (
                    self._device.page(name, page),
                    self._meaning(work, pool, position),
                )
                size = len(wanted) // self._num_layers
                part = slice(layer * size, (layer + 1) * size)
                if found[part] != wanted[part]:
                    work.row.misread = f"layer {layer} of page {page} of {name!r}"


@dataclass(frozen=True, slots=True)
class _Work:
    row: Row
    tables: list[list[int]]
    is_settled: bool
    state: RequestState
    slots: list[int]
