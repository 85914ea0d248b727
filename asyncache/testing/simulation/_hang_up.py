"""Clients that hang up, in each way in which a task can be cancelled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

from asyncache.testing._nth import Canceller, CancelStyle
from asyncache.testing.simulation._case import Case
from asyncache.testing.simulation._mishaps import Mishap

_STYLES = {
    Mishap.SCOPE: CancelStyle.LEVEL,
    Mishap.TASK: CancelStyle.EDGE,
    Mishap.LATE: CancelStyle.LATE_EDGE,
}


async def hanging_up(
    live: Callable[[], Awaitable[None]],
    case: Case,
    dice: Random,
    note: Callable[[Mishap], object],
) -> None:
    """Live, or be cancelled at some await, if dice and the case say so."""
    for mishap, style in _STYLES.items():
        if dice.random() < case.rates.get(mishap, 0.0):
            nth = dice.choice([1, 1, 2, 2, 3, 4, 6, 9])

            def on_cancel(mishap: Mishap = mishap) -> None:
                note(mishap)

            await Canceller(live(), nth, style, on_cancel=on_cancel).run()
            return
    await live()
