"""Playing a case to its end."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from random import Random

from asyncache.engine import WriteThrough
from asyncache.testing.simulation._case import Case
from asyncache.testing.simulation._epoch import Epoch
from asyncache.testing.simulation._loop import run, torn_down_quietly
from asyncache.testing.simulation._team import Odd, Team
from asyncache.testing.simulation._team_epoch import TeamEpoch
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
    result = Result()
    worlds = [
        World(case, result, is_logged=is_logged, rank=rank)
        for rank in range(case.num_ranks)
    ]
    dice = Random(f"order {case.seed}") if case.is_shuffled else None
    try:
        with torn_down_quietly():
            run(
                lambda: _play(worlds, case),
                dice=dice,
                after=worlds[0].check if len(worlds) == 1 else lambda: _check(worlds),
                max_s=MAX_S,
            )
    except (Exception, asyncio.CancelledError, BaseExceptionGroup) as error:  # noqa: BLE001 - whatever it is, it is the finding
        # A cancellation that escaped is one too.
        result.error = error
    return result


def _check(worlds: list[World]) -> None:
    for world in worlds:
        world.check()


async def _play(worlds: list[World], case: Case) -> None:
    for world in worlds:
        world.fill()
    if case.team is not None:
        await _play_team(worlds, case, case.team)
        return
    [world] = worlds
    for actors in case.epochs:
        await Epoch(world, case, actors).run()
    with world.weather.paused():
        await Epoch(world, case, ()).run_in_peace(is_stored=False)
        # What was served in peace was stored, and is found by another cache.
        is_stored = isinstance(case.writes, WriteThrough)
        await Epoch(world, case, ()).run_in_peace(is_stored=is_stored)


async def _play_team(worlds: list[World], case: Case, team: Team) -> None:
    is_odd = team.odd is not Odd.NOTHING
    for actors in case.epochs:
        await TeamEpoch(worlds, case, team, actors, is_odd=is_odd).run()
        is_odd = False
    with ExitStack() as peace:
        for world in worlds:
            peace.enter_context(world.weather.paused())
        is_stored = isinstance(case.writes, WriteThrough)
        for was_stored in (False, is_stored):
            epoch = TeamEpoch(worlds, case, team)
            await epoch.run_in_peace(is_stored=was_stored)
