"""How a cache must come to rest, and to its end."""

from __future__ import annotations

import asyncio

import anyio

from asyncache.core import OrderError
from asyncache.testing._leftovers import leftovers
from asyncache.testing.simulation._case import Case
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._model import EPSILON_S
from asyncache.testing.simulation._scene import Scene
from asyncache.testing.simulation._world import World

PATIENCE_S = 60.0
"""Longer than any chain of deadlines, back-offs and stalls."""


def check_rest(scene: Scene, world: World) -> None:
    """Raise LawError unless a cache at rest keeps nothing, and has counted right."""
    statistics = scene.cache.statistics()
    replica = statistics.replica
    is_clean = not (
        statistics.leaked_pages
        or statistics.transfers
        or replica.num_open
        or replica.promised_pages
    )
    if not is_clean:
        raise LawError(f"left behind: {statistics}, {open_stages(world)}")
    if kept := leftovers(scene.cache):
        raise LawError(f"kept for nobody: {kept}")
    ended = statistics.counters.closed + statistics.counters.aborted
    # A prefetch is a request too, if it found a place.
    if not 0 <= ended - scene.num_opened <= len(scene.prefetches):
        raise LawError(f"{scene.num_opened} requests were opened, {ended} ended")


def open_stages(world: World) -> list[str]:
    """Return what is open, in words."""
    replica = world.replica
    assert replica is not None
    return [f"{seq} {stage}" for seq, stage in replica.look.stages().items()]


async def close(scene: Scene, world: World, case: Case) -> None:
    """Close a cache, within its time, and again until all is still."""
    limit_s, until = case.limits.close_s, anyio.current_time() + PATIENCE_S
    while True:
        began = anyio.current_time()
        is_over = True
        try:
            await scene.cache.aclose()
        except OrderError as error:
            world.log(f"close: {error}")
            is_over = False
            if anyio.current_time() > until:
                raise LawError(f"it never closes: {error}") from error
        took_s = anyio.current_time() - began
        if took_s > limit_s + EPSILON_S:
            raise LawError(f"aclose() took {took_s} s, more than {limit_s}")
        if is_over:
            break
    world.log("closed")
    if world.copies.running:
        raise LawError("something still copies after aclose()")


def check_no_tasks() -> None:
    """Raise LawError if a task of a cache goes on; to be called once all are closed."""
    tasks = [task.get_name() for task in asyncio.all_tasks()]
    if left := [name for name in tasks if name.split()[0] == "asyncache"]:
        raise LawError(f"{left} go on after aclose()")
