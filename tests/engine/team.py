"""Some ranks of one model in one event loop, each with its cache, shard and loop task.

What a test does, it does on every rank, each in its own loop task; what a rank learns
by itself, it does on one. After every step all replicas must be equal, lawful, and
their pages the right ones.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from asyncache.core import PageKey
from asyncache.devices import CpuDevice, Device
from asyncache.engine import Hit, KVCache, Limits, Prompt, Request, StepReport
from asyncache.ranks import Group, LocalGroup
from asyncache.stores import MemoryStore, Store
from asyncache.testing import leftovers
from tests.engine.scene import (
    KV,
    LAYOUT,
    NAMESPACES,
    PAGE,
    POISON,
    Log,
    content,
    keys,
    read,
    write,
)

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

LIMITS = Limits(close_s=5.0, retry_s=0.001, breaker_s=0.001, barrier_s=20.0)
MODES = [
    {"barrier": barrier, "aborts": aborts}
    for barrier in ("sync", "pipelined")
    for aborts in ("vote", "call")
]
MAX_STEPS = 400

Act = Callable[["Rank"], Any]


def shard(rank: int, tokens: Sequence[int], position: int, **whose: Any) -> bytes:
    """Return the bytes of a page at a position of a prompt, on one rank."""
    mask = 37 * rank
    return bytes(byte ^ mask for byte in content(tokens, position, **whose))


@dataclass
class Rank:
    """One rank: what it holds, and the task that makes its calls."""

    number: int
    cache: KVCache
    device: Device
    store: Store | None
    log: Log
    acts: MemoryObjectSendStream[Any]
    requests: dict[int, Request] = field(default_factory=dict)
    """Open requests, by id."""
    hits: dict[int, Hit] = field(default_factory=dict)

    @property
    def replica(self):
        return self.cache._runtime.replica

    async def do(self, act: Act) -> Any:
        """Do something in this rank's loop task; return or raise what it does."""
        outcome: list[tuple[bool, Any]] = []
        done = anyio.Event()
        await self.acts.send((act, self, outcome, done))
        await done.wait()
        [(is_good, result)] = outcome
        if not is_good:
            raise result
        return result

    def compute(self, request: Request, tokens: Sequence[int]) -> None:
        """Fill the whole pages that a request owns, with this rank's shard of them."""
        namespace = request._prompt.namespace
        own = request._state.own[0]
        for position, page in enumerate(request.page_table["kv"]):
            if own[position] and position < len(tokens) // PAGE:
                data = shard(self.number, tokens, position, namespace=namespace)
                write(self.device, page, data)

    def check_pages(self, request: Request, tokens: Sequence[int], count: int) -> None:
        """Raise unless the leading tokens' pages hold this rank's shard of them."""
        namespace = request._prompt.namespace
        table = request.page_table["kv"]
        for position in range(count // PAGE):
            wanted = shard(self.number, tokens, position, namespace=namespace)
            assert read(self.device, table[position]) == wanted, position


class Team:
    """All ranks, and what a serving loop does on each of them."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks

    def __len__(self) -> int:
        return len(self.ranks)

    async def everywhere(self, act: Act) -> list[Any]:
        """Do something on every rank at once; raise the first rank's error."""
        outcomes: list[Any] = [None] * len(self)

        async def one(rank: Rank) -> None:
            try:
                outcomes[rank.number] = await rank.do(act)
            except Exception as error:  # noqa: BLE001 - told below
                outcomes[rank.number] = error

        async with anyio.create_task_group() as group:
            for rank in self.ranks:
                group.start_soon(one, rank)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    async def errors(self, act: Act) -> list[Exception]:
        """Return what each rank raises."""
        found: list[Exception] = []
        async with anyio.create_task_group() as group:
            for rank in self.ranks:
                group.start_soon(self._note, rank, act, found)
        return found

    @staticmethod
    async def _note(rank: Rank, act: Act, found: list[Exception]) -> None:
        try:
            await rank.do(act)
        except Exception as error:  # noqa: BLE001 - that is what is asked for
            found.append(error)

    # What a serving loop does.

    async def step(self, timeout_s: float = 0.0) -> StepReport[Request]:
        """Step on every rank; return the first one's report."""
        reports = await self.everywhere(lambda r: r.cache.step(timeout_s=timeout_s))
        self.check()
        told = [_told(report) for report in reports]
        assert told == [told[0]] * len(told), "ranks report the same"
        for rank in self.ranks:
            rank.requests = {i: r for i, r in rank.requests.items() if r.is_open}
        return reports[0]

    async def admit(self, prompts: Sequence[Prompt]) -> list[int]:
        """Admit prompts everywhere; return the ids of those that are open."""

        def act(rank: Rank) -> list[int]:
            requests = rank.cache.admit(prompts)
            opened = {request.id: request for request in requests if request.is_open}
            rank.requests |= opened
            return list(opened)

        return (await self.everywhere(act))[0]

    async def open(self, tokens: Sequence[int], **arguments: Any) -> int:
        """Open a request of which every rank holds a scope; return its id."""
        prompt = self.ranks[0].cache.prompt(tokens, **arguments)
        [seq] = await self.admit([prompt])
        return seq

    async def call(self, seq: int, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make a call on a request, everywhere."""
        act = partial(_call, seq=seq, name=name, args=args, kwargs=kwargs)
        return (await self.everywhere(act))[0]

    async def begin(self, tokens: Sequence[int], **arguments: Any) -> int:
        """Open a request and begin to restore it."""
        seq = await self.open(tokens, **arguments)
        await self.restore_nowait(seq)
        return seq

    async def restore_nowait(self, seq: int, **arguments: Any) -> None:
        def act(rank: Rank) -> None:
            rank.hits[seq] = rank.requests[seq].restore_nowait(**arguments)

        await self.everywhere(act)

    async def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Step until something holds."""
        for _ in range(MAX_STEPS):
            if is_so():
                return
            await self.step(timeout_s=0.001)
        raise AssertionError(f"not within {MAX_STEPS} steps: {what}")

    async def settle(self, seq: int) -> int:
        """Step until a request's hit has settled; return how long it is."""
        hit = self.ranks[0].hits[seq]
        await self.until(lambda: hit.settled, "a hit settles")
        return hit.num_tokens

    async def compute(self, seq: int, tokens: Sequence[int]) -> None:
        """Run the model over what a hit does not cover, and share it."""

        def act(rank: Rank) -> None:
            request = rank.requests[seq]
            rank.check_pages(request, tokens, rank.hits[seq].num_tokens)
            request.extend(len(tokens))
            with rank.cache.forward([request]):
                rank.compute(request, tokens)
            request.commit(len(tokens))

        await self.everywhere(act)

    async def end(self, seq: int, *, aborted: bool = False) -> None:
        """End a request's scopes, on every rank, and step until all know."""

        def act(rank: Rank) -> None:
            rank.requests[seq]._finish(aborted=aborted)

        await self.everywhere(act)
        await self.dismiss()
        await self.until(lambda: seq not in self.ranks[0].requests, "a request ends")

    async def dismiss(self) -> None:
        """Let the loop end what was left, where votes do not."""
        left: dict[int, bool] = {}
        for rank in self.ranks:
            for seq, aborted in rank.cache.left().items():
                left[seq] = left.get(seq, False) or aborted
        await self.everywhere(lambda rank: rank.cache.dismiss(left))

    async def serve(self, tokens: Sequence[int], **arguments: Any) -> int:
        """Serve a prompt from its restore to its end; return the hit's length."""
        seq = await self.begin(tokens, **arguments)
        num_hit = await self.settle(seq)
        await self.compute(seq, tokens)
        await self.end(seq)
        return num_hit

    async def drain(self) -> None:
        """Step until nothing moves."""
        left = await self.everywhere(lambda rank: rank.cache.drain(deadline_s=20))
        assert left == [0] * len(self)

    # Laws.

    def check(self) -> None:
        """Raise unless all replicas are equal, lawful and truthful."""
        dumps = [rank.replica.look.dump() for rank in self.ranks]
        assert dumps == [dumps[0]] * len(dumps), "replicas are equal"
        for rank in self.ranks:
            rank.cache.check_invariants()
            check_tree(rank)

    async def rest(self) -> None:
        """Come to rest, and check that nothing was left behind."""
        await self.drain()
        for _ in range(8):
            await self.step()
        for rank in self.ranks:
            statistics = rank.cache.statistics()
            assert statistics.leaked_pages == 0, statistics
            assert statistics.transfers == 0, statistics
            assert leftovers(rank.cache) == {}
        self.check()


def _call(rank: Rank, *, seq: int, name: str, args: Any, kwargs: Any) -> Any:
    return getattr(rank.requests[seq], name)(*args, **kwargs)


def _told(report: StepReport[Request]) -> list[Any]:
    lists = ("agreed", "landed", "shortened", "aborted", "closed")
    ids = [[r._state.seq for r in getattr(report, name)] for name in lists]
    return [*ids, report.stored_pages, report.refused_pages]


def check_tree(rank: Rank) -> None:
    """Raise unless each page of a rank's tree is its shard of what the prefix means."""
    from asyncache.core import root_hash

    names = {root_hash(LAYOUT, namespace): namespace for namespace in NAMESPACES}
    for resident in rank.replica.look.residents():
        if resident.root not in names or resident.written > _finished(rank):
            continue
        tokens = memoryview(resident.tokens).cast("i").tolist()
        for index, page in enumerate(resident.pages):
            position, namespace = resident.start + index, names[resident.root]
            wanted = shard(rank.number, tokens, position, namespace=namespace)
            assert read(rank.device, page) == wanted, (rank.number, position)


def _finished(rank: Rank) -> int:
    return rank.replica._state.num_finished


async def stored(rank: int, num_ranks: int, *prompts: Sequence[int]) -> MemoryStore:
    """Return a store that holds one rank's shard of some prompts."""
    store = MemoryStore(2**24)
    for tokens in prompts:
        names = shard_keys(rank, num_ranks, tokens)
        data = [shard(rank, tokens, position) for position in range(len(names))]
        await store.put(names, [[memoryview(page)] for page in data])
    return store


def shard_keys(rank: int, num_ranks: int, tokens: Sequence[int]) -> list[PageKey]:
    """Return the store keys of a prompt's whole pages on one rank."""
    space = LAYOUT.space(KV, rank=rank, num_ranks=num_ranks)
    return [PageKey(key.hash, space) for key in keys(tokens)]


Groups = Callable[[int], Sequence[Group]]
Stores = Callable[[int, int], Awaitable[Store | None]]


async def no_store(rank: int, num_ranks: int) -> None:
    return None


@asynccontextmanager
async def team(
    num_ranks: int = 2,
    *,
    stores: Stores = no_store,
    groups: Groups = LocalGroup.of,
    num_pages: int = 16,
    devices: Callable[[int], Device] | None = None,
    limits: Limits = LIMITS,
    check: bool = True,
    **arguments: Any,
) -> AsyncIterator[Team]:
    """Open a cache on every rank; at its end nothing may be left behind."""
    joined = groups(num_ranks)
    ranks: list[Rank] = []
    async with anyio.create_task_group() as tasks:
        for number, group in enumerate(joined):
            device = devices(number) if devices else CpuDevice(LAYOUT, num_pages)
            for pool in device.layout.pools:
                device.tensor(pool.name).fill_(POISON)
            store, log = await stores(number, num_ranks), Log()
            cache = KVCache(
                device.layout,
                device=device,
                store=store,
                group=group,
                limits=limits,
                observer=log,
                **arguments,
            )
            send, receive = anyio.create_memory_object_stream[Any](1)
            ranks.append(Rank(number, cache, device, store, log, send))
            tasks.start_soon(_loop, receive)
        view = Team(ranks)
        try:
            await view.everywhere(lambda rank: rank.cache.open())
            yield view
            if check:
                await view.rest()
        finally:
            with anyio.CancelScope(shield=True):
                await view.errors(lambda rank: rank.cache.aclose())
                for rank in ranks:
                    rank.acts.close()
    for rank in ranks:
        rank.cache.check_invariants()
        if rank.cache._runtime is not None:
            assert rank.cache.statistics().transfers == 0


async def _loop(acts: MemoryObjectReceiveStream[Any]) -> None:
    """Do what comes, one after the other: the loop task of a rank."""
    async with acts:
        async for act, rank, outcome, done in acts:
            try:
                result = act(rank)
                if inspect.isawaitable(result):
                    result = await result
                outcome.append((True, result))
            except Exception as error:  # noqa: BLE001 - told to whoever asked
                outcome.append((False, error))
            finally:
                done.set()
