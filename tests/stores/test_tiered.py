"""TieredStore: the contract, who answers, and that nothing is lost or brought back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, strategies as st

import asyncache
from asyncache.core import ClosedError, OrderError, PageKey, PageSpace, StoreError
from asyncache.stores import FileStore, MemoryStore, Status, Store, TieredStore
from asyncache.testing import (
    CancelStyle,
    Fault,
    FaultyStore,
    Gate,
    GateStore,
    cancel_nth,
    check_store,
)
from asyncache.testing._samples import (
    SPACE,
    content,
    fill,
    new_keys,
    new_source,
    new_target,
)

ROOM = 16 * 2**20
PAGE = SPACE.page_bytes
THIN = PageSpace("thin", "all", "uint8", (2, 1, 1, 1, 8))
HIT, MISS, CORRUPT = Status.HIT, Status.MISS, Status.CORRUPT
UNAVAILABLE, REJECTED = Status.UNAVAILABLE, Status.REJECTED


class Tier(GateStore):
    """A gated tier that can be looked into while its gates are shut.

    Attributes:
        answer_gate: Where :meth:`get_into` waits when it has read.
        remove_gate: Where :meth:`remove` waits.
    """

    def __init__(self, max_bytes: int = ROOM, *, fault: Fault | None = None) -> None:
        self.pages = MemoryStore(max_bytes)
        self.faulty = FaultyStore(self.pages, fault)
        self.answer_gate = Gate(is_open=True)
        self.remove_gate = Gate(is_open=True)
        super().__init__(self.faulty, is_open=True)

    async def open(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def get_into(self, keys, targets, layers=None) -> list[Status]:
        statuses = await super().get_into(keys, targets, layers)
        await self.answer_gate.pass_through()
        return statuses

    async def remove(self, keys: Sequence[PageKey]) -> None:
        await self.remove_gate.pass_through()
        await super().remove(keys)

    def has(self, key: PageKey) -> bool:
        return key in self.pages._pages


async def put(store: Store, *keys: PageKey) -> list[Status]:
    return await store.put(keys, [new_source(key) for key in keys])


async def get(
    store: Store, *keys: PageKey, layers: range | None = None
) -> list[Status]:
    """Read pages, and check the bytes of those that are hits."""
    targets = [new_target(key, layers) for key in keys]
    statuses = await store.get_into(keys, targets, layers)
    for key, status, [target] in zip(keys, statuses, targets, strict=True):
        size = key.space.layer_bytes
        span = slice(0, None) if layers is None else slice(*_ends(layers, size))
        assert status is not HIT or target == content(key)[span]
    return statuses


def _ends(layers: range, size: int) -> tuple[int, int]:
    return layers.start * size, layers.stop * size


@asynccontextmanager
async def tiers_of(*tiers: Store) -> AsyncIterator[TieredStore]:
    async with TieredStore(tiers) as store:
        yield store


async def test_two_memories_keep_the_contract():
    await check_store(lambda: TieredStore([MemoryStore(ROOM), MemoryStore(ROOM)]))


@pytest.mark.slow
async def test_memory_over_files_keeps_the_contract(tmp_path):
    await check_store(lambda: TieredStore([MemoryStore(ROOM), FileStore(tmp_path)]))


@pytest.mark.slow
async def test_memory_without_room_over_files_keeps_the_contract(tmp_path):
    await check_store(lambda: TieredStore([MemoryStore(0), FileStore(tmp_path)]))


async def test_tiers_of_tiers_keep_the_contract():
    await check_store(
        lambda: TieredStore(
            [MemoryStore(4 * PAGE), TieredStore([Tier(4 * PAGE), Tier()])]
        )
    )


async def test_everything_is_found_after_memory_evicted_it(tmp_path):
    memory, keys = MemoryStore(2 * PAGE), new_keys(7)
    async with tiers_of(memory, FileStore(tmp_path)) as store:
        for key in keys:
            assert await put(store, key) == [HIT]
        assert memory.num_pages == 2
        for _ in range(2):
            assert await store.contains(keys) == [True] * 7
            assert await get(store, *keys, *keys) == [HIT] * 14
        assert memory.num_pages == 2


async def test_a_restart_finds_in_files_what_memory_held(tmp_path):
    keys = new_keys(3)
    async with tiers_of(MemoryStore(ROOM), FileStore(tmp_path)) as store:
        assert await put(store, *keys) == [HIT] * 3
    memory = MemoryStore(ROOM)
    async with tiers_of(memory, FileStore(tmp_path)) as store:
        assert await get(store, *keys) == [HIT] * 3
        assert await memory.contains(keys) == [True] * 3
        assert await get(store, *new_keys(1), *keys) == [MISS] + [HIT] * 3


async def test_a_page_can_be_read_while_the_last_tier_still_writes_it():
    [key], last = new_keys(1), Tier()
    last.put_gate.close()
    async with tiers_of(Tier(), last) as store, anyio.create_task_group() as tasks:
        tasks.start_soon(put, store, key)
        await last.put_gate.wait_arrived()
        assert await store.contains([key]) == [True]
        assert await get(store, key) == [HIT]
        last.put_gate.open()


@pytest.mark.parametrize(
    ("fast", "last", "answer", "read"),
    [
        (None, None, HIT, HIT),
        (Fault.REJECTED, None, HIT, HIT),
        (Fault.UNAVAILABLE, None, HIT, HIT),
        (None, Fault.REJECTED, REJECTED, HIT),
        (None, Fault.UNAVAILABLE, UNAVAILABLE, HIT),
        (Fault.REJECTED, Fault.UNAVAILABLE, UNAVAILABLE, UNAVAILABLE),
        (Fault.UNAVAILABLE, Fault.REJECTED, REJECTED, UNAVAILABLE),
    ],
)
async def test_the_last_tier_says_what_became_of_a_put(fast, last, answer, read):
    [key] = new_keys(1)
    async with tiers_of(Tier(fault=fast), Tier(fault=last)) as store:
        assert await put(store, key) == [answer]
        assert await get(store, key) == [read]


async def test_a_page_that_the_last_tier_refused_can_be_put_there_later():
    [key], last = new_keys(1), Tier(fault=Fault.REJECTED)
    async with tiers_of(Tier(), last) as store:
        assert await put(store, key) == [REJECTED]
        last.faulty.fault = None
        assert await put(store, key) == [HIT]
        assert last.has(key)


async def test_a_page_found_below_is_promoted_into_every_tier_above():
    [key], [a, b, c] = new_keys(1), [Tier(), Tier(), Tier()]
    await put(c, key)
    async with tiers_of(a, b, c) as store:
        targets = [new_target(key)]
        assert await store.get_into([key], targets) == [HIT]
        fill(targets, b"\0")  # lent until the call returned, and ours again
        assert await get(a, key) == await get(b, key) == [HIT]


async def test_each_page_of_a_batch_comes_from_the_first_tier_that_has_it():
    keys, [a, b, c] = new_keys(4), [Tier(), Tier(), Tier()]
    for key, tier in zip(keys, (c, a, b), strict=False):
        await put(tier, key)
    async with tiers_of(a, b, c) as store:
        assert await store.contains(keys) == [True, True, True, False]
        assert await get(store, *keys, keys[0]) == [HIT, HIT, HIT, MISS, HIT]
        assert [a.has(key) for key in keys] == [True, True, True, False]
        # What was found above is not carried down.
        assert [b.has(key) for key in keys] == [True, False, True, False]
        assert [c.has(key) for key in keys] == [True, False, False, False]
        num_asked = b.get_gate.num_arrived
        assert await get(store, *keys[:3]) == [HIT] * 3
        assert b.get_gate.num_arrived == num_asked


async def test_only_whole_pages_are_promoted():
    [key], fast, last = new_keys(1), Tier(), Tier()
    await put(last, key)
    async with tiers_of(fast, last) as store:
        for layers in (range(1), range(1, 4), range(3)):
            assert await get(store, key, layers=layers) == [HIT]
            assert not fast.has(key)
        assert await get(store, key, layers=range(4)) == [HIT]
        assert fast.has(key)
        assert await get(store, key, layers=range(1, 3)) == [HIT]


async def test_whole_is_what_has_all_layers_of_its_own_space():
    [deep], [thin] = new_keys(1), new_keys(1, THIN)
    fast, last = Tier(), Tier()
    await put(last, deep, thin)
    async with tiers_of(fast, last) as store:
        assert await get(store, deep, thin, layers=range(2)) == [HIT, HIT]
        assert (fast.has(deep), fast.has(thin)) == (False, True)


@pytest.mark.parametrize("fault", [Fault.REJECTED, Fault.UNAVAILABLE, Fault.LOST])
async def test_a_promotion_that_fails_costs_nothing(fault):
    keys, fast, last = new_keys(2), Tier(fault=fault), Tier()
    await put(last, *keys)
    async with tiers_of(fast, last) as store:
        assert await get(store, *keys) == [HIT, HIT]
        assert await get(store, *keys) == [HIT, HIT]


async def test_a_tier_without_an_answer_is_not_asked_to_take_a_page():
    [key], fast, last = new_keys(1), Tier(fault=Fault.UNAVAILABLE), Tier()
    await put(last, key)
    async with tiers_of(fast, last) as store:
        assert await get(store, key) == [HIT]
    assert fast.put_gate.num_arrived == 0


@pytest.mark.parametrize("fault", [Fault.CORRUPT, Fault.TORN, Fault.LOST])
async def test_a_good_copy_heals_the_tiers_above(fault):
    keys, [a, b, c] = new_keys(2), [Tier(), Tier(), Tier()]
    async with tiers_of(a, b, c) as store:
        await put(store, *keys)
        a.faulty.fault = b.faulty.fault = fault
        assert await get(store, *keys) == [HIT, HIT]
        a.faulty.fault = b.faulty.fault = None
        assert await get(a, *keys) == await get(b, *keys) == [HIT, HIT]


async def test_a_rotten_file_is_healed_from_below(tmp_path):
    [key], last = new_keys(1), Tier()
    async with tiers_of(FileStore(tmp_path), last) as store:
        await put(store, key)
        [path] = tmp_path.rglob("*.kv")
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        assert await get(store, key) == [HIT]
        assert path.read_bytes() == good
        last.faulty.fault = Fault.UNAVAILABLE
        assert await get(store, key) == [HIT]


@pytest.mark.parametrize(
    ("faults", "answer"),
    [
        ([Fault.MISSING, Fault.MISSING], MISS),
        ([Fault.MISSING, Fault.UNAVAILABLE], UNAVAILABLE),
        ([Fault.UNAVAILABLE, Fault.MISSING], UNAVAILABLE),
        ([Fault.CORRUPT, Fault.MISSING], CORRUPT),
        ([Fault.MISSING, Fault.CORRUPT], CORRUPT),
        ([Fault.CORRUPT, Fault.UNAVAILABLE], CORRUPT),
        ([Fault.UNAVAILABLE, Fault.TORN], CORRUPT),
        ([Fault.UNAVAILABLE, None], HIT),
        ([Fault.TORN, None], HIT),
        ([None, Fault.CORRUPT], HIT),
    ],
)
async def test_a_read_says_the_most_that_any_tier_knows(faults, answer):
    [key], tiers = new_keys(1), [Tier(), Tier()]
    async with tiers_of(*tiers) as store:
        await put(store, key)
        for tier, fault in zip(tiers, faults, strict=True):
            tier.faulty.fault = fault
        assert await get(store, key) == [answer]


async def test_a_removed_page_is_gone_from_every_tier():
    keys, [a, b, c] = new_keys(2), [Tier(), Tier(), Tier()]
    async with tiers_of(a, b, c) as store:
        await put(store, *keys)
        await store.remove(keys[:1])
        assert [tier.has(keys[0]) for tier in (a, b, c)] == [False] * 3
        assert [tier.has(keys[1]) for tier in (a, b, c)] == [True] * 3


async def test_a_read_that_found_a_page_does_not_bring_it_back_once_it_is_removed():
    gone, _ = keys = new_keys(2)
    fast, last = Tier(), Tier()
    await put(last, *keys)
    last.answer_gate.close()
    async with tiers_of(fast, last) as store:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(get, store, *keys)
            await last.answer_gate.wait_arrived()  # read, not yet returned
            await store.remove([gone])
            last.answer_gate.open()
        assert [fast.has(key) for key in keys] == [False, True]
        assert [last.has(key) for key in keys] == [False, True]


async def test_a_removal_outlasts_a_promotion_that_has_begun():
    keys, fast, last = new_keys(2), Tier(), Tier()
    await put(last, *keys)
    fast.put_gate.close()
    async with tiers_of(fast, last) as store:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(get, store, *keys)
            await fast.put_gate.wait_arrived()
            tasks.start_soon(store.remove, keys[:1])
            await anyio.wait_all_tasks_blocked()
            assert last.has(keys[0])  # it waits
            await store.remove(new_keys(1))  # a page that nobody promotes need not
            fast.put_gate.open()
        assert [fast.has(key) for key in keys] == [False, True]
        assert [last.has(key) for key in keys] == [False, True]


async def test_a_read_that_begins_during_a_removal_brings_nothing_back():
    [key], fast, last = new_keys(1), Tier(), Tier()
    await put(last, key)
    last.remove_gate.close()
    last.answer_gate.close()
    async with tiers_of(fast, last) as store:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.remove, [key])
            await last.remove_gate.wait_arrived()
            tasks.start_soon(get, store, key)
            await last.answer_gate.wait_arrived()
            last.remove_gate.open()
            await anyio.wait_all_tasks_blocked()
            assert not last.has(key)
            last.answer_gate.open()
        assert not fast.has(key)


async def test_a_removed_page_can_be_put_and_promoted_again():
    [key], fast, last = new_keys(1), Tier(), Tier()
    async with tiers_of(fast, last) as store:
        await put(store, key)
        await store.remove([key])
        assert await put(last, key) == [HIT]
        assert await get(store, key) == [HIT]
        assert fast.has(key)


async def test_a_cancelled_removal_leaves_promotion_as_it_was():
    [key], fast, last = new_keys(1), Tier(), Tier()
    await put(last, key)
    last.remove_gate.close()
    async with tiers_of(fast, last) as store:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.remove, [key])
            await last.remove_gate.wait_arrived()
            tasks.cancel_scope.cancel()
        assert await get(store, key) == [HIT]
        assert fast.has(key)


class World:
    """Calls that overlap, are held and are cancelled, and what must hold of pages."""

    def __init__(self) -> None:
        self.tiers = [Tier(PAGE), Tier()]
        self.store = TieredStore(self.tiers)
        fast, last = self.tiers
        # Where a call is between two tiers, or has begun what may be too late.
        self.gates = [fast.put_gate, last.put_gate, last.answer_gate, last.remove_gate]
        self.keys = new_keys(2)
        self.calls: list[asyncio.Task[None]] = []
        self.owed: set[PageKey] = set()  # put, and no removal has begun since
        self.gone: set[PageKey] = set()  # removed, and no put has begun since
        # Calls of each page that ever began, and that are under way.
        self.begun = {call: Counter[PageKey]() for call in (self.put, self.remove)}
        self.active = {call: Counter[PageKey]() for call in (self.put, self.remove)}

    async def put(self, key: PageKey) -> None:
        self.gone.discard(key)
        async with self._alone(key, self.put, self.remove) as is_alone:
            assert await put(self.store, key) == [HIT]
            if is_alone():
                self.owed.add(key)

    async def remove(self, key: PageKey) -> None:
        self.owed.discard(key)
        async with self._alone(key, self.remove, self.put) as is_alone:
            await self.store.remove([key])
            if is_alone():
                self.gone.add(key)

    async def get(self, key: PageKey) -> None:
        await get(self.store, key)

    async def do(self, what: object, number: int) -> None:
        """Take a step: CALLS, GATES, FAULTS or OTHERS."""
        match what:
            case "put" | "get" | "remove":
                call = getattr(self, what)(self.keys[number])
                self.calls.append(asyncio.create_task(call))
            case "open" | "close":
                getattr(self.gates[number], what)()
            case "cancel":
                for call in self.calls[-number:][:1]:
                    call.cancel()
            case "turns":
                for _ in range(number):
                    await self.turn()
            case _:
                self.tiers[number].faulty.fault = what

    async def turn(self) -> None:
        """Let every task take one step, and look."""
        await anyio.lowlevel.checkpoint()
        for key in self.owed:
            assert any(tier.has(key) for tier in self.tiers), "a page is in neither"
        for key in self.gone:
            assert not any(tier.has(key) for tier in self.tiers), "a page came back"

    async def finish(self) -> None:
        for gate in self.gates:
            gate.open()
        while not all(call.done() for call in self.calls):
            await self.turn()
        for call in self.calls:
            assert call.cancelled() or call.exception() is None
        for tier in self.tiers:
            tier.faulty.fault = None
        assert await self.store.contains([*self.owed]) == [True] * len(self.owed)
        assert await get(self.store, *self.owed) == [HIT] * len(self.owed)
        assert await get(self.store, *self.gone) == [MISS] * len(self.gone)
        assert (self.store._reads, self.store._removals) == (set(), [])

    @asynccontextmanager
    async def _alone(self, key, own, other) -> AsyncIterator[Callable[[], bool]]:
        """Count a call, and tell whether calls of the other kind overlapped it."""
        num_others, is_first = self.begun[other][key], not self.active[other][key]
        self.begun[own][key] += 1
        self.active[own][key] += 1
        try:
            yield lambda: is_first and num_others == self.begun[other][key]
        finally:
            self.active[own][key] -= 1


CALLS = st.tuples(
    st.sampled_from(["put", "get", "get", "remove", "remove"]), st.integers(0, 1)
)
GATES = st.tuples(st.sampled_from(["open", "close"]), st.integers(0, 3))
FAULTS = st.tuples(
    st.sampled_from([None, None, Fault.REJECTED, Fault.UNAVAILABLE, Fault.TORN]),
    st.just(0),
)
OTHERS = st.tuples(
    st.sampled_from(["cancel", "turns", "turns", "turns"]), st.integers(1, 8)
)
KINDS = (CALLS, CALLS, CALLS, GATES, GATES, GATES, FAULTS, OTHERS, OTHERS)
STEPS = st.lists(st.one_of(KINDS), min_size=10, max_size=60)


@given(STEPS)
def test_a_page_is_never_in_neither_and_never_comes_back(steps):
    async def play() -> None:
        world = World()
        await put(world.tiers[1], *world.keys)  # of another process, say
        world.owed.update(world.keys)
        async with world.store:
            for what, number in steps:
                await world.do(what, number)
                await world.turn()
            await world.finish()

    asyncio.run(play())


@pytest.mark.slow
@pytest.mark.parametrize("files_last", [False, True])
async def test_every_await_of_a_read_and_a_removal_may_be_the_last(
    tmp_path, files_last
):
    gone, kept = keys = new_keys(2)
    targets = [new_target(key) for key in keys]
    memory, files = MemoryStore(ROOM), FileStore(tmp_path)
    fast, last = (memory, files) if files_last else (files, memory)

    @asynccontextmanager
    async def fresh() -> AsyncIterator[TieredStore]:
        await fast.remove(keys)
        assert await put(last, *keys) == [HIT, HIT]
        yield store

    async def use(store: TieredStore) -> None:
        await store.get_into(keys, targets)
        await store.remove([gone])

    async def check(store: TieredStore) -> None:
        fill(targets, b"\0")
        assert (store._reads, store._removals) == (set(), [])
        assert await get(store, kept) == [HIT]
        assert await get(store, gone) in ([HIT], [MISS])
        fill(targets, b"\0")
        assert await get(store, *keys) in ([HIT, HIT], [MISS, HIT])

    async with tiers_of(fast, last) as store:
        assert await cancel_nth(use, fresh=fresh, check=check) >= 5


async def test_a_cancelled_read_lets_a_removal_go_on():
    [key], fast, last = new_keys(1), Tier(), Tier()
    await put(last, key)
    fast.put_gate.close()
    async with tiers_of(fast, last) as store:
        async with anyio.create_task_group() as tasks:
            reader = asyncio.create_task(get(store, key))
            await fast.put_gate.wait_arrived()
            tasks.start_soon(store.remove, [key])
            await anyio.wait_all_tasks_blocked()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        assert not last.has(key)


async def test_opening_opens_all_and_closing_closes_all(tmp_path):
    files = [FileStore(tmp_path / name) for name in "ab"]
    store, [key] = TieredStore(files), new_keys(1)
    with pytest.raises(OrderError, match="is not open"):
        await store.contains([key])
    async with store:
        await store.open()
        assert await put(store, key) == [HIT]
        assert repr(store) == f"<TieredStore [{files[0]!r}, {files[1]!r}]>"
    for closed in (store, *files):
        with pytest.raises(ClosedError):
            await closed.contains([key])
    with pytest.raises(ClosedError):
        await store.open()


async def test_an_open_store_stays_so_if_it_is_opened_again_and_that_is_cancelled():
    [key] = new_keys(1)
    async with tiers_of(Tier(), Tier()) as store:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await store.open()
        assert await put(store, key) == [HIT]


async def test_if_a_tier_cannot_open_those_before_it_are_closed(tmp_path):
    (tmp_path / "b").write_text("no directory")
    files = [FileStore(tmp_path / name) for name in "abc"]
    store = TieredStore(files)
    with pytest.raises(StoreError, match="cannot keep pages in"):
        await store.open()
    for closed in (store, *files):
        with pytest.raises(ClosedError):
            await closed.open()


@pytest.mark.parametrize("style", CancelStyle)
async def test_opening_may_be_cancelled_at_every_await(tmp_path, style):
    @asynccontextmanager
    async def fresh() -> AsyncIterator[TieredStore]:
        store = TieredStore([FileStore(tmp_path / name) for name in "ab"])
        yield store
        await store.aclose()

    async def check(store: TieredStore) -> None:
        if not store._is_open:
            for closed in (store, *store._tiers):
                with pytest.raises(ClosedError):
                    await closed.open()

    num_awaits = await cancel_nth(
        TieredStore.open, fresh=fresh, check=check, styles=[style]
    )
    assert num_awaits >= 2


async def test_closing_tries_every_tier_and_tells_what_went_wrong():
    class Stubborn(Tier):
        async def aclose(self) -> None:
            raise StoreError("will not close")

    a, b, c = Tier(), Stubborn(), Tier()
    store = TieredStore([a, b, c])
    await store.open()
    with pytest.raises(StoreError, match="will not close"):
        await store.aclose()
    for tier in (a, c):
        with pytest.raises(ClosedError):
            await tier.contains([])


@pytest.mark.parametrize("gate_of", ["contains", "get", "put", "remove"])
async def test_closing_under_a_call_ends_it_before_the_next_tier(gate_of):
    keys, tiers = new_keys(2), [Late(), Late()]
    first = tiers[1 if gate_of == "remove" else 0]
    store = TieredStore(tiers)
    await store.open()
    other = next(tier for tier in tiers if tier is not first)
    await put(other, *keys)
    call = {
        "contains": lambda: store.contains(keys),
        "get": lambda: get(store, *keys),
        "put": lambda: put(store, *keys),
        "remove": lambda: store.remove(keys),
    }[gate_of]
    gate = getattr(first, f"{gate_of}_gate")
    gate.close()
    task = asyncio.create_task(call())
    await gate.wait_arrived()
    await store.aclose()
    gate.open()
    assert (
        await task
        == {
            "contains": [False] * 2,
            "get": [UNAVAILABLE] * 2,
            "put": [UNAVAILABLE] * 2,
            "remove": None,
        }[gate_of]
    )
    assert all(other.has(key) for key in keys)


async def test_closing_under_a_read_from_below_promotes_nothing():
    [key], fast, last = new_keys(1), Late(), Late()
    store = TieredStore([fast, last])
    await store.open()
    await put(last, key)
    last.get_gate.close()
    task = asyncio.create_task(get(store, key))
    await last.get_gate.wait_arrived()
    await store.aclose()
    last.get_gate.open()
    assert await task == [HIT]
    assert not fast.has(key)


class Late(Tier):
    """Is still at work when it is closed, and answers what it has."""

    async def aclose(self) -> None:
        return


async def test_lengths_that_do_not_fit_are_refused_before_any_tier_is_asked():
    [key], fast, last = new_keys(1), Tier(), Tier()
    async with tiers_of(fast, last) as store:
        with pytest.raises(ValueError, match="1 keys, but buffers for 0 pages"):
            await store.get_into([key], [])
        with pytest.raises(ValueError, match="1 keys, but buffers for 2 pages"):
            await store.put([key], [new_source(key)] * 2)
    assert fast.get_gate.num_arrived == fast.put_gate.num_arrived == 0


def test_no_tiers_are_no_store():
    with pytest.raises(ValueError, match="need at least one store, got none"):
        TieredStore([])


def test_it_is_at_the_front_door():
    assert asyncache.TieredStore is TieredStore
