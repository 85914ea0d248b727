"""Whose turn it is: order, bounds and rates, whoever is cancelled meanwhile."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given, settings, strategies as st

from asyncache.core import AttentionPool, KVLayout
from asyncache.devices import CpuDevice
from asyncache.linkers import StoreLinker
from asyncache.linkers._turns import Ticket, Turn, Turns, Urgency
from asyncache.stores import MemoryStore

LOAD, PREFETCH, OFFLOAD = Urgency
KV = AttentionPool(num_layers=2, num_kv_heads=1, head_dim=4, dtype="uint8")
LAYOUT = KVLayout(model="turns", page_tokens=4, pools=(KV,))


class Line:
    """Those who stand in line, and in which order they got their turn."""

    def __init__(self, group, turns: Turns) -> None:
        self._group = group
        self._turns = turns
        self.served: list[str] = []
        self.turns: dict[str, Turn] = {}
        self.tickets: dict[str, Ticket] = {}
        self.tasks: dict[str, asyncio.Task] = {}

    async def join(self, name: str, urgency: Urgency, num_bytes: int = 4) -> None:
        self.tickets[name] = Ticket(urgency)
        self._group.start_soon(self._wait, name, num_bytes)
        await wait_all_tasks_blocked()

    async def _wait(self, name: str, num_bytes: int) -> None:
        self.tasks[name] = asyncio.current_task()
        try:
            turn = await self._turns.begin(self.tickets[name], num_bytes)
        except asyncio.CancelledError:
            return
        self.turns[name] = turn
        self.served.append(name)

    async def end(self, name: str) -> None:
        self.turns.pop(name).end()
        await wait_all_tasks_blocked()


async def test_loads_come_before_prefetches_and_those_before_offloads():
    async with anyio.create_task_group() as group:
        line = Line(group, Turns(4, 0, {}))
        await line.join("first", OFFLOAD)
        for number in range(2):
            for urgency in (OFFLOAD, PREFETCH, LOAD):
                await line.join(f"{urgency.name} {number}", urgency)
        await line.end("first")
        while line.turns:
            await line.end(next(iter(line.turns)))
        names = [f"{u.name} {n}" for u in (LOAD, PREFETCH, OFFLOAD) for n in range(2)]
        assert line.served == ["first", *names]


async def test_a_batch_is_left_to_loads():
    async with anyio.create_task_group() as group:
        line = Line(group, Turns(8, 4, {}))
        await line.join("offload", OFFLOAD)
        await line.join("prefetch", PREFETCH)
        assert line.served == ["offload"]
        await line.join("load", LOAD)
        assert line.served == ["offload", "load"]
        # What a load gives back is not for others while they have their share.
        await line.end("load")
        assert line.served == ["offload", "load"]
        await line.end("offload")
        assert line.served == ["offload", "load", "prefetch"]


async def test_a_prefetch_that_is_waited_for_comes_as_a_load():
    async with anyio.create_task_group() as group:
        turns = Turns(4, 0, {})
        line = Line(group, turns)
        await line.join("first", LOAD)
        await line.join("one", PREFETCH)
        await line.join("two", PREFETCH)
        turns.hurry(line.tickets["two"])
        await line.join("load", LOAD)
        for name in ("first", "two", "load"):
            await line.end(name)
        assert line.served == ["first", "two", "load", "one"]


async def test_a_prefetch_that_is_waited_for_may_have_what_is_left_to_loads():
    async with anyio.create_task_group() as group:
        turns = Turns(8, 4, {})
        line = Line(group, turns)
        await line.join("offload", OFFLOAD)
        await line.join("prefetch", PREFETCH)
        turns.hurry(line.tickets["prefetch"])
        await wait_all_tasks_blocked()
        assert line.served == ["offload", "prefetch"]


async def test_whoever_is_cancelled_leaves_the_line_and_nothing_is_lost():
    async with anyio.create_task_group() as group:
        line = Line(group, Turns(4, 0, {}))
        await line.join("first", LOAD)
        await line.join("second", LOAD)
        await line.join("third", LOAD)
        line.tasks["second"].cancel()
        await wait_all_tasks_blocked()
        # It is its turn and it is cancelled, at the same time.
        line.turns.pop("first").end()
        line.tasks["third"].cancel()
        await line.join("fourth", LOAD)
        assert line.served == ["first", "fourth"]


async def test_who_cannot_fit_yet_is_not_overtaken_by_its_like():
    async with anyio.create_task_group() as group:
        line = Line(group, Turns(8, 0, {}))
        await line.join("first", LOAD, 4)
        await line.join("large", LOAD, 8)
        await line.join("small", LOAD, 1)
        assert line.served == ["first"]
        await line.end("first")
        assert line.served == ["first", "large"]
        await line.end("large")
        assert line.served == ["first", "large", "small"]


async def test_a_rate_is_kept_and_binds_its_class_only():
    turns = Turns(100, 0, {OFFLOAD: 1000.0})
    start_s = anyio.current_time()
    for _ in range(3):
        (await turns.begin(Ticket(OFFLOAD), 50)).end()
    # The first at once, each later one when those before have had their time.
    assert anyio.current_time() - start_s >= 0.1
    blocked = anyio.Event()

    async def offload() -> None:
        blocked.set()
        (await turns.begin(Ticket(OFFLOAD), 100_000)).end()
        (await turns.begin(Ticket(OFFLOAD), 1)).end()

    async with anyio.create_task_group() as group:
        group.start_soon(offload)
        await blocked.wait()
        with anyio.fail_after(5):
            for _ in range(100):
                (await turns.begin(Ticket(LOAD), 100)).end()
        group.cancel_scope.cancel()


async def test_hurrying_ends_the_wait_for_a_prefetchs_rate():
    turns = Turns(100, 0, {PREFETCH: 1e-3})
    (await turns.begin(Ticket(PREFETCH), 1)).end()
    async with anyio.create_task_group() as group:
        line = Line(group, turns)
        await line.join("prefetch", PREFETCH, 1)
        assert line.served == []
        with anyio.fail_after(5):
            turns.hurry(line.tickets["prefetch"])
            await wait_all_tasks_blocked()
        assert line.served == ["prefetch"]


async def test_hurrying_does_not_end_the_wait_for_a_loads_rate():
    turns = Turns(100, 0, {LOAD: 1000.0, PREFETCH: 1e-3})
    for urgency in (LOAD, PREFETCH):
        (await turns.begin(Ticket(urgency), 100)).end()
    start_s = anyio.current_time()
    async with anyio.create_task_group() as group:
        line = Line(group, turns)
        await line.join("prefetch", PREFETCH, 1)
        turns.hurry(line.tickets["prefetch"])
    assert anyio.current_time() - start_s >= 0.09


async def test_what_a_cancelled_one_did_not_move_is_not_counted():
    turns = Turns(4, 0, {OFFLOAD: 1e-3})
    turn = await turns.begin(Ticket(LOAD), 4)
    with anyio.move_on_after(0):
        await turns.begin(Ticket(OFFLOAD), 4)
    turn.end()
    with anyio.fail_after(5):
        (await turns.begin(Ticket(OFFLOAD), 4)).end()


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["load", "prefetch", "offload"])
def test_rates_out_of_range_are_refused(name, rate):
    text = f"{name}_bytes_per_s must be positive and finite, not {rate}"
    with pytest.raises(ValueError, match=text):
        StoreLinker(
            MemoryStore(1), CpuDevice(LAYOUT, 4), **{f"{name}_bytes_per_s": rate}
        )


CAPACITY, SPARED = 12, 4
ACTIONS = st.one_of(
    st.tuples(st.just("join"), st.sampled_from(Urgency), st.integers(1, 4)),
    st.tuples(st.sampled_from(["hurry", "cancel", "end"]), st.integers(0, 99)),
)


def check_line(line: Line, order: dict[str, int], sizes: dict[str, int]) -> None:
    """Raise unless bounds hold, and whoever comes next does not fit yet."""
    moving = {name: turn.is_load for name, turn in line.turns.items()}
    free = CAPACITY - sum(sizes[name] for name in moving)
    others = sum(sizes[name] for name, is_load in moving.items() if not is_load)
    assert free >= 0
    assert others <= CAPACITY - SPARED
    in_line = [name for name in order if not line.tasks[name].done()]
    in_line = [name for name in in_line if name not in moving]
    if in_line:
        tickets = line.tickets
        first = min(in_line, key=lambda name: (tickets[name].urgency, order[name]))
        if tickets[first].urgency is not LOAD:
            free = min(free, CAPACITY - SPARED - others)
        assert sizes[first] > free


@settings(deadline=None, max_examples=40)
@given(st.lists(ACTIONS, max_size=30))
async def test_bounds_hold_and_nobody_waits_without_need(actions):
    order: dict[str, int] = {}
    sizes: dict[str, int] = {}
    async with anyio.create_task_group() as group:
        turns = Turns(CAPACITY, SPARED, {})
        line = Line(group, turns)
        for number, (action, *arguments) in enumerate(actions):
            if action == "join":
                name, (urgency, size) = str(number), arguments
                order[name], sizes[name] = number, size
                await line.join(name, urgency, size)
            elif action == "end":
                if line.turns:
                    names = list(line.turns)
                    await line.end(names[arguments[0] % len(names)])
            else:
                names = [n for n in order if not line.tasks[n].done()]
                if names and action == "hurry":
                    turns.hurry(line.tickets[names[arguments[0] % len(names)]])
                elif names:
                    line.tasks[names[arguments[0] % len(names)]].cancel()
                await wait_all_tasks_blocked()
            check_line(line, order, sizes)
        while line.turns:
            await line.end(next(iter(line.turns)))
    assert turns._free == CAPACITY
    assert turns._free_to_others == CAPACITY - SPARED
