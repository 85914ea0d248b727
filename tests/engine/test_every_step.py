"""Whatever breaks, at whatever step: nothing is left, and no page is wrong."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from enum import Enum
from functools import partial
from types import FunctionType

import anyio
import pytest

from asyncache.core import ClosedError, DeviceError, StoreError
from asyncache.devices import CpuDevice, Device
from asyncache.engine import KVCache
from asyncache.stores import Store
from asyncache.testing import (
    CancelStyle,
    FailPoint,
    Fault,
    FaultyStore,
    GateDevice,
    cancel_nth,
    fail_nth,
)
from asyncache.testing._cancel import Cancellation, cancel_after
from asyncache.testing._gate_device import TaskCopy, halves
from asyncache.testing._nth import noting
from tests.engine.scenarios import ATTACHES, DETACHES_AND_ATTACHES, SCENARIOS
from tests.engine.scene import LAYOUT, PAGE, scene, turns
from tests.engine.stage import (
    PLAIN,
    STORED,
    TOKENS,
    Fuse,
    KeptStore,
    Place,
    Scenario,
    Stage,
    check,
    check_stored,
    kept_store,
    staged,
    unless_closed,
)

each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=str)


def by_turns(
    name: str, ways: Iterable[object], *more: tuple[Scenario, object]
) -> pytest.MarkDecorator:
    """Have a test run once a scenario, and with each of several ways now and then."""
    pairs = [*zip(SCENARIOS, itertools.cycle(ways), strict=False), *more]
    return pytest.mark.parametrize(("scenario", name), pairs, ids=named)


def named(value: object) -> str:
    match value:
        case Enum():
            return value.name
        case FunctionType():
            return value.__name__
        case _:
            return str(value)


# Cancelled, closed, reset, detached.


@pytest.mark.parametrize("style", CancelStyle, ids=named)
@each_scenario
async def test_it_may_be_cancelled_at_each_await(scenario, style):
    await cancel_at_each_await(scenario, Place.LAYERED, style)


@by_turns("style", CancelStyle)
async def test_it_may_be_cancelled_where_the_store_works_in_place(scenario, style):
    await cancel_at_each_await(scenario, Place.IN_PLACE, style)


async def cancel_at_each_await(
    scenario: Scenario, place: Place, style: CancelStyle
) -> None:
    def fresh():
        return staged(scenario, place)

    num = await cancel_nth(
        scenario.play, fresh=fresh, check=check_stored, styles=[style]
    )
    assert num >= 1


@by_turns("how", Cancellation)
async def test_it_may_be_cancelled_in_each_turn_of_the_loop(scenario, how):
    for turn in itertools.count(1):  # it begins in the first
        async with staged(scenario, Place.LAYERED) as stage:
            with noting(f"cancelled in turn {turn}"):
                play = partial(scenario.play, stage)
                was_cancelled = await cancel_after(turn, play, how)
                await check_stored(stage)
        if not was_cancelled:
            break
    assert turn > 1


async def close(stage: Stage) -> None:
    await stage.cache.aclose()


async def reset(stage: Stage) -> None:
    stage.cache.reset()


async def reset_weights(stage: Stage) -> None:
    stage.cache.reset(revision="v3")


async def detach(stage: Stage) -> None:
    await stage.cache.detach()


@by_turns(
    "act",
    [reset, close, reset_weights, detach],
    (ATTACHES, detach),
    (DETACHES_AND_ATTACHES, detach),
)
async def test_anything_may_happen_to_the_cache_in_each_turn(scenario, act):
    for turn in itertools.count():
        async with staged(scenario, Place.LAYERED) as stage:
            with noting(f"{act.__name__} in turn {turn}"):
                was_in_time = await meanwhile(scenario, stage, turn, act)
                await check_stored(stage)
        if not was_in_time:
            break
    assert turn > 1


async def meanwhile(
    scenario: Scenario,
    stage: Stage,
    turn: int,
    act: Callable[[Stage], Awaitable[None]],
) -> bool:
    """Do something to the cache in a turn of the loop; return whether it came first."""
    has_ended = False

    async def play() -> None:
        nonlocal has_ended
        with unless_closed(stage):
            await scenario.play(stage)
        has_ended = True

    async with anyio.create_task_group() as group:
        group.start_soon(play)
        await turns(turn)
        was_in_time = not has_ended
        if not stage.cache._is_closed:
            await act(stage)
    return was_in_time


# Failed.


class CancelledStore(FaultyStore):
    """Awaits, in one call of all, what a third party has cancelled."""

    def _next_call(self, keys):
        if self._point.trips():
            raise asyncio.CancelledError
        return None, frozenset()


Around = Callable[[Store, Fuse], Store]


def faulty(fault: Fault) -> Around:
    return lambda store, fuse: FaultyStore(store, fault, point=fuse)


def cancelled(store: Store, fuse: Fuse) -> Store:
    return CancelledStore(store, point=fuse)


FAILURES = {
    Fault.RAISES.name: (faulty(Fault.RAISES), Place.LAYERED),
    Fault.TORN.name: (faulty(Fault.TORN), Place.LAYERED),
    Fault.CORRUPT.name: (faulty(Fault.CORRUPT), Place.LAYERED),
    "CANCELLED": (cancelled, Place.LAYERED),
    Fault.LOST.name: (faulty(Fault.LOST), Place.IN_PLACE),
    Fault.MISSING.name: (faulty(Fault.MISSING), Place.IN_PLACE),
    Fault.UNAVAILABLE.name: (faulty(Fault.UNAVAILABLE), Place.IN_PLACE),
    Fault.REJECTED.name: (faulty(Fault.REJECTED), Place.IN_PLACE),
    Fault.UNREPORTED.name: (faulty(Fault.UNREPORTED), Place.IN_PLACE),
}

REMOVING = {fault.name for fault in (Fault.TORN, Fault.CORRUPT, Fault.LOST)}


@pytest.mark.parametrize("failure", FAILURES)
@each_scenario
async def test_each_call_of_the_store_may_fail(scenario, failure):
    around, place = FAILURES[failure]

    def fresh(point: FailPoint):
        fuse = Fuse(point)
        return staged(
            scenario, place, fuse=fuse, around=lambda store: around(store, fuse)
        )

    then = check if failure in REMOVING else check_stored
    assert await fail_nth(scenario.play, fresh=fresh, check=then) >= 1


class Break(Enum):
    """How a copy fails."""

    AT_ONCE = "before it touched anything"
    HALF_WAY = "with half of its bytes there"
    CANCELLED = "half-way, for a third party cancelled what it awaited"


class FaultyDevice(GateDevice):
    """Fails in one copy of all, before it touches anything or with half of it done."""

    def __init__(self, inner: Device, how: Break, fuse: Fuse) -> None:
        super().__init__(inner, is_open=True)
        self._how = how
        self._fuse = fuse

    def start_write(self, pool, pages, source, layers=None):
        if not self._fuse.trips():
            return super().start_write(pool, pages, source, layers)
        if self._how is Break.AT_ONCE:
            raise DeviceError("injected")
        torn = halves(source, self._contents(pool, pages, layers), len(pages))
        self._inner.start_write(pool, pages, memoryview(torn), layers).block()
        return TaskCopy(self._break)

    def start_read(self, pool, pages, target, layers=None):
        if not self._fuse.trips():
            return super().start_read(pool, pages, target, layers)
        if self._how is Break.AT_ONCE:
            raise DeviceError("injected")
        old = bytes(target)
        self._inner.start_read(pool, pages, target, layers).block()
        target[:] = halves(target, old, len(pages))
        return TaskCopy(self._break)

    async def _break(self) -> None:
        if self._how is Break.CANCELLED:
            raise asyncio.CancelledError
        raise DeviceError("injected")


@pytest.mark.parametrize("how", Break, ids=named)
@each_scenario
async def test_each_copy_of_the_device_may_fail(scenario, how):
    def fresh(point: FailPoint):
        fuse = Fuse(point)
        device = FaultyDevice(CpuDevice(LAYOUT, scenario.num_pages), how, fuse)
        return staged(scenario, Place.LAYERED, fuse=fuse, device=device)

    assert await fail_nth(scenario.play, fresh=fresh, check=check_stored) >= 1


# Opened.


class Opening(Enum):
    """What comes of opening the store."""

    WORKS = "nothing but what should"
    STORE_ERROR = "it can never work"
    OS_ERROR = "an error of its own"
    CANCELLED = "a third party cancels what it awaits"


class SlowStore(KeptStore):
    """Takes a while to open, and to close."""

    def __init__(self, opening: Opening) -> None:
        super().__init__()
        self._opening = opening

    async def open(self) -> None:
        await turns(2)
        match self._opening:
            case Opening.STORE_ERROR:
                raise StoreError("injected")
            case Opening.OS_ERROR:
                raise OSError("injected")
            case Opening.CANCELLED:
                raise asyncio.CancelledError
        await super().open()

    async def aclose(self) -> None:
        await turns(2)
        await super().aclose()


Life = tuple[KVCache, SlowStore, set[asyncio.Task[object]]]


@asynccontextmanager
async def unopened(opening: Opening = Opening.WORKS) -> AsyncIterator[Life]:
    tasks, store = asyncio.all_tasks(), SlowStore(opening)
    await store.put(list(STORED), [[memoryview(page)] for page in STORED.values()])
    yield KVCache(LAYOUT, device=CpuDevice(LAYOUT, 8), store=store), store, tasks


async def live_through(life: Life) -> None:
    cache, _, _ = life
    await cache.open()
    with cache.request(TOKENS) as request:
        await request.restore()
    await cache.aclose()


async def check_gone(life: Life) -> None:
    """Raise unless all that was opened is closed, and a cache can be had again."""
    cache, store, tasks = life
    await cache.aclose()
    assert store.num_closed >= store.num_opened
    assert asyncio.all_tasks() == tasks
    async with scene(await kept_store()) as view:
        assert await view.serve(PLAIN) == 3 * PAGE


@pytest.mark.parametrize("style", CancelStyle, ids=named)
async def test_opening_and_closing_may_be_cancelled_at_each_await(style):
    num = await cancel_nth(
        live_through, fresh=unopened, check=check_gone, styles=[style]
    )
    assert num >= 3


@pytest.mark.parametrize("how", Cancellation, ids=named)
async def test_opening_and_closing_may_be_cancelled_in_each_turn(how):
    was_cancelled, turn = True, 0
    while was_cancelled:
        turn += 1
        async with unopened() as life:
            with noting(f"cancelled in turn {turn}"):
                was_cancelled = await cancel_after(
                    turn, partial(live_through, life), how
                )
                await check_gone(life)
    assert turn > 5


@pytest.mark.parametrize("opening", list(Opening)[1:], ids=named)
async def test_a_store_that_cannot_be_opened_leaves_nothing(opening):
    async with unopened(opening) as life:
        with pytest.raises((StoreError, OSError, ClosedError)):
            await live_through(life)
        assert life[1].num_closed >= 1
        await check_gone(life)


@pytest.mark.parametrize("opening", list(Opening)[1:], ids=named)
async def test_a_store_that_cannot_be_opened_is_not_attached(opening):
    async with staged(ATTACHES, Place.IN_PLACE) as stage:
        store = SlowStore(opening)
        with pytest.raises((StoreError, OSError, ClosedError)):
            await stage.cache.attach(store)
        assert store.num_closed == 1
        await check_stored(stage)
        await ATTACHES.play(stage)
        await check_stored(stage)
