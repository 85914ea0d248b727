"""Whose turn it is to move bytes: loads before prefetches before offloads.

A turn is a batch. The batches on their way have a bound in bytes, of which a batch is
left to loads: a store that takes its time to write must not keep anyone from reading.
What nobody waits for gets what is left only while no load is in line. Each class may
have a bound in bytes a second as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import anyio


class Urgency(IntEnum):
    """What comes first."""

    LOAD = 0
    PREFETCH = 1
    OFFLOAD = 2


class Ticket:
    """What a transfer asks for turns with."""

    def __init__(self, urgency: Urgency) -> None:
        self.urgency = urgency
        self.hurried = anyio.Event()
        """Set when it has become more urgent."""


class Turn:
    """A batch on its way, until :meth:`end`."""

    def __init__(self, turns: Turns, num_bytes: int, *, is_load: bool) -> None:
        self._turns = turns
        self.num_bytes = num_bytes
        self.is_load = is_load

    def end(self) -> None:
        """Let others have their turn; once."""
        self._turns._end(self)  # noqa: SLF001 - one of them is of no use alone


@dataclass(slots=True)
class _Waiter:
    ticket: Ticket
    num_bytes: int
    order: int
    granted: anyio.Event = field(default_factory=anyio.Event)
    turn: Turn | None = None


class _Rate:
    """Bytes a second: who is too early for the next batch is told how much."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def delay_s(self) -> float:
        return self._free_at - anyio.current_time()

    def take(self, num_bytes: int) -> None:
        start = max(self._free_at, anyio.current_time())
        self._free_at = start + num_bytes / self._bytes_per_s

    def give_back(self, num_bytes: int) -> None:
        self._free_at -= num_bytes / self._bytes_per_s


class Turns:
    """The turns of one linker.

    Args:
        num_bytes: What all batches on their way may have.
        spared: What of it only loads may have; a batch, where there is room for two.
        bytes_per_s: Bounds of some classes.
    """

    def __init__(
        self, num_bytes: int, spared: int, bytes_per_s: Mapping[Urgency, float]
    ) -> None:
        self._free = num_bytes
        self._free_to_others = num_bytes - spared
        self._rates = {urgency: _Rate(rate) for urgency, rate in bytes_per_s.items()}
        self._waiting: list[_Waiter] = []
        self._order = itertools.count()

    async def begin(self, ticket: Ticket, num_bytes: int) -> Turn:
        """Wait for a turn to move so many bytes."""
        rate = await self._pass_rate(ticket, num_bytes)
        waiter = _Waiter(ticket, num_bytes, next(self._order))
        self._waiting.append(waiter)
        self._grant()
        try:
            await waiter.granted.wait()
        except BaseException:
            # It moved nothing, whether it was its turn by now or not.
            if rate is not None:
                rate.give_back(num_bytes)
            if waiter.turn is not None:
                waiter.turn.end()
            else:
                self._waiting.remove(waiter)
                self._grant()
            raise
        assert waiter.turn is not None
        return waiter.turn

    def hurry(self, ticket: Ticket) -> None:
        """Have a prefetch come as a load from now on."""
        ticket.urgency = Urgency.LOAD
        ticket.hurried.set()
        self._grant()

    async def _pass_rate(self, ticket: Ticket, num_bytes: int) -> _Rate | None:
        while True:
            rate = self._rates.get(ticket.urgency)
            if rate is None or (delay_s := rate.delay_s()) <= 0:
                break
            with anyio.move_on_after(delay_s):
                await (
                    anyio.Event() if ticket.hurried.is_set() else ticket.hurried
                ).wait()
        if rate is not None:
            rate.take(num_bytes)
        return rate

    def _grant(self) -> None:
        self._waiting.sort(key=lambda waiter: (waiter.ticket.urgency, waiter.order))
        while self._waiting and self._fits(self._waiting[0]):
            waiter = self._waiting.pop(0)
            is_load = waiter.ticket.urgency is Urgency.LOAD
            self._free -= waiter.num_bytes
            self._free_to_others -= 0 if is_load else waiter.num_bytes
            waiter.turn = Turn(self, waiter.num_bytes, is_load=is_load)
            waiter.granted.set()

    def _fits(self, waiter: _Waiter) -> bool:
        is_load = waiter.ticket.urgency is Urgency.LOAD
        room = self._free if is_load else min(self._free, self._free_to_others)
        return waiter.num_bytes <= room

    def _end(self, turn: Turn) -> None:
        self._free += turn.num_bytes
        self._free_to_others += 0 if turn.is_load else turn.num_bytes
        self._grant()
