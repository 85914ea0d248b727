"""Playing a case to its end."""

from __future__ import annotations

import asyncio
from random import Random

from asyncache.engine import WriteThrough
from asyncache.testing.simulation._case import Case
from asyncache.testing.simulation._epoch import Epoch
from asyncache.testing.simulation._loop import run, torn_down_quietly
from asyncache.testing.simulation._world import Result, World

MAX_S = 10_000.0
"""Longer than all waits of a case together."""


def simulate(case: Case, *, is_logged: bool = False) -> Result:
    """Run a case; the same case makes the same run, in any process.

    Args:
        case: What happens, from :func:`draw`.
        is_logged: Whether to write down what happens.

    Returns:
        What came of it; what was wrong is in it too.
    """
    world = World(case, is_logged=is_logged)
    dice = Random(f"order {case.seed}") if case.is_shuffled else None
    try:
        with torn_down_quietly():
            run(
                lambda: _play(world, case),
                dice=dice,
                after=world.check,
                max_s=MAX_S,
            )
    except (Exception, asyncio.CancelledError, BaseExceptionGroup) as error:  # noqa: BLE001 - whatever it is, it is the finding
        # A cancellation that escaped is one too.
        world.result.error = error
    return world.result


async def _play(world: World, case: Case) -> None:
    world.fill()
    for actors in case.epochs:
        await Epoch(world, case, actors).run()
    with world.weather.paused():
        await Epoch(world, case, ()).run_in_peace(is_stored=False)
        # What was served in peace was stored, and is found by another cache.
        is_stored = isinstance(case.writes, WriteThrough)
        await Epoch(world, case, ()).run_in_peace(is_stored=is_stored)
