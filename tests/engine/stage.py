"""Where scenarios play, and what must hold after each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from asyncache.core import ClosedError, OrderError, PageKey
from asyncache.devices import CpuDevice, Device
from asyncache.engine import Hit, KVCache, Request
from asyncache.linkers import Linker, StoreLinker
from asyncache.stores import MemoryStore, Store
from asyncache.testing import FailPoint, GateDevice
from tests.engine.scene import (
    KV,
    LAYOUT,
    MEANINGS,
    PAGE,
    REVISIONS,
    Scene,
    content,
    keys,
    prompt,
    scene,
)

TOKENS, OTHER = prompt(3), prompt(3, seed=1)
"""In the store of each scenario from the start."""
PLAIN = prompt(3, seed=2)
"""In it too, with all weights, for the request that comes when all is over."""
NEW, NEWER = prompt(3, seed=3), prompt(3, seed=4)
"""Not in the store."""


def longer(tokens: Sequence[int]) -> list[int]:
    """Return a prompt with a page of answer."""
    return [*tokens, *range(500, 500 + PAGE)]


PAGE_BYTES = LAYOUT.space(KV).page_bytes
PROMPTS = [
    decoded
    for tokens in (TOKENS, OTHER, PLAIN, NEW, NEWER)
    for decoded in (tokens, longer(tokens))
]


def meant(tokens, layout=LAYOUT, namespace=None) -> dict[PageKey, bytes]:
    """Return what the pages of a prompt mean, by their keys."""
    names = keys(tokens, namespace, layout=layout)
    return {
        name: content(tokens, position, layout=layout, namespace=namespace)
        for position, name in enumerate(names)
    }


MEANT = {
    name: page
    for layout, namespace in MEANINGS.values()
    for tokens in PROMPTS
    for name, page in meant(tokens, layout, namespace).items()
}
"""Every page that a scenario may share."""
STORED = (
    meant(TOKENS)
    | meant(OTHER)
    | meant(TOKENS[: 2 * PAGE], namespace="tenant-1")
    | meant(PLAIN, REVISIONS[0])
    | meant(PLAIN, REVISIONS[1])
    | meant(PLAIN, REVISIONS[2])
)


class KeptStore(MemoryStore):
    """Keeps its pages when it is closed, and knows how often that was."""

    def __init__(self) -> None:
        super().__init__(2**20)
        self.num_opened = self.num_closed = 0

    async def open(self) -> None:
        self.num_opened += 1

    async def aclose(self) -> None:
        self.num_closed += 1

    @property
    def pages(self) -> dict[PageKey, bytes]:
        """What it holds."""
        return dict(self._pages)


async def kept_store(pages: dict[PageKey, bytes] = STORED) -> KeptStore:
    """Return a store that holds these pages."""
    store = KeptStore()
    await store.put(list(pages), [[memoryview(page)] for page in pages.values()])
    return store


class Fuse:
    """A fail point that only counts while the scenario plays.

    Args:
        point: What :func:`fail_nth` gave; nothing ever fails if None.
    """

    def __init__(self, point: FailPoint | None = None) -> None:
        self._point = point

    def trips(self) -> bool:
        """Count a call; return whether it is the one to fail."""
        return self._point is not None and self._point.trips()

    def remove(self) -> None:
        """Let every later call work, uncounted."""
        self._point = None


@dataclass
class Stage:
    """Where a scenario plays."""

    view: Scene
    store: KeptStore
    """What the cache is opened with, below whatever makes it fail."""
    spare: KeptStore
    """What may be attached instead."""
    link: Callable[[Store], Linker]
    launches: bool
    forgets: bool
    """Whether its store may lose a page by itself."""
    fuse: Fuse
    tasks: set[asyncio.Task[object]]
    """Those that were there before."""

    @property
    def cache(self) -> KVCache:
        return self.view.cache

    @contextmanager
    def request(self, tokens: Sequence[int], **arguments: Any) -> Iterator[Request]:
        """Open a request; once it is left, all that it held has gone back."""
        request = self.cache.request(tokens, **arguments)
        try:
            with request:
                yield request
        finally:
            state = request._state
            waits_to_commit = state.want > state.shared
            assert waits_to_commit or not self.view.replica.look.is_open(state.seq)

    async def restore(self, request: Request) -> Hit:
        """Restore, and start the load at once if that is the loop's to do."""
        hit = await request.restore()
        if self.launches:
            self.cache.launch()
        return hit

    async def serve(self, tokens: Sequence[int], namespace=None) -> int:
        """Serve a prompt from its restore to its commit; return the hit's length."""
        with self.request(tokens, namespace=namespace) as request:
            return await self.finish(request, tokens, await self.restore(request))

    async def finish(self, request: Request, tokens: Sequence[int], hit: Hit) -> int:
        """Compute what a hit does not cover, and share it; return the hit's length."""
        await hit.wait()
        while not request.reserved:  # a hit that fell may take the promise with it
            request.suspend()
            hit = await (await self.restore(request)).wait()
        self.view.finish(request, tokens, hit.num_tokens)
        return hit.num_tokens

    async def attach(self, store: Store) -> None:
        """Attach a store in the way in which the first one was linked."""
        try:
            await self.cache.attach(linker=self.link(store))
        except OrderError as error:
            if "was detached while" not in str(error):
                raise


@contextmanager
def unless_closed(stage: Stage) -> Iterator[None]:
    """Let the end of a request be that of its cache."""
    try:
        yield
    except* ClosedError:
        if not stage.cache._is_closed:
            raise


Play = Callable[[Stage], Awaitable[None]]


def same(store: Store) -> Store:
    """Return the store."""
    return store


@dataclass(frozen=True)
class Scenario:
    """What happens, and in what cache."""

    play: Play
    num_pages: int = 16
    arguments: dict[str, Any] = field(default_factory=dict)
    around: Callable[[Store], Store] = same
    has_store: bool = True
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.play.__name__


class Place(Enum):
    """How pages move."""

    IN_PLACE = "the store reads and writes the device's memory"
    LAYERED = "through staging buffers, layer by layer"

    def device(self, num_pages: int) -> Device:
        device = CpuDevice(LAYOUT, num_pages)
        return device if self is Place.IN_PLACE else GateDevice(device, is_open=True)

    def link(self, store: Store, device: Device) -> StoreLinker:
        groups = 2 if self is Place.LAYERED else 1
        return StoreLinker(
            store,
            device,
            layer_groups=groups,
            batch_bytes=2 * PAGE_BYTES,
            num_batches=2,
        )


@asynccontextmanager
async def staged(
    scenario: Scenario,
    place: Place,
    *,
    fuse: Fuse | None = None,
    around: Callable[[Store], Store] = same,
    device: Device | None = None,
    store: KeptStore | None = None,
) -> AsyncIterator[Stage]:
    """Open what a scenario needs, and let it go however it comes back.

    Without a store, it is one in memory.
    """
    loop, tasks = asyncio.get_running_loop(), asyncio.all_tasks()
    loop.set_debug(False)  # a stack trace for each call takes most of thousands of runs
    store, spare = store or await kept_store(), await kept_store()
    device = device or place.device(scenario.num_pages)
    given = scenario.around(around(store)) if scenario.has_store else None
    async with scene(
        device=device,
        linker=None if given is None else lambda device: place.link(given, device),
        check=False,
        **scenario.arguments,
    ) as view:
        yield Stage(
            view,
            store,
            spare,
            link=lambda store: place.link(around(store), device),
            launches=scenario.arguments.get("launch") == "batch",
            forgets=scenario.around is not same,
            fuse=fuse or Fuse(),
            tasks=tasks,
        )
    for lent in (store, spare):
        assert not is_open(lent)


def is_open(store: KeptStore) -> bool:
    return store.num_opened > store.num_closed


# What must hold after each run.


async def check(stage: Stage) -> None:
    """Raise unless nothing is left, no page is wrong, and requests are served."""
    await check_left(stage)
    if not stage.cache._is_closed:
        stage.fuse.remove()
        await check_serving(stage)
        await stage.view.rest()
    check_shared(stage)


async def check_left(stage: Stage) -> None:
    """Raise unless all that was played has ended, and nothing of it is left."""
    if stage.cache._is_closed:
        await stage.cache.aclose()
        await stage.view.forwards_end()
        stage.view.check_clean()
    else:
        await stage.view.rest()


def check_shared(stage: Stage) -> None:
    """Raise if a task or a timer is left, or a store has a page that is wrong."""
    check_alone(stage)
    for store in (stage.store, stage.spare):
        for key, page in store.pages.items():
            assert page == MEANT[key], key


async def check_serving(stage: Stage) -> None:
    """Raise unless a plain request finds what is stored, and then what is resident."""
    stored = 3 * PAGE if stage.cache._linker is not None else 0
    assert await stage.serve(PLAIN) == stored
    assert await stage.serve(PLAIN) == 3 * PAGE


def check_alone(stage: Stage) -> None:
    """Raise if a task or a timer is left, but those of the cache itself."""
    assert asyncio.all_tasks() - stage.tasks <= {stage.cache._home}
    runtime = stage.cache._runtime
    ours = {part._late._timer for part in (runtime.transfers, runtime.forwards) if part}
    timers = asyncio.get_running_loop()._scheduled
    assert {timer for timer in timers if not timer.cancelled()} <= ours


async def check_stored(stage: Stage) -> None:
    """Check, and raise if a page that counts as stored is in no open store."""
    await check(stage)
    if stage.cache._is_closed or stage.forgets:
        return
    held = {
        key
        for store in (stage.store, stage.spare)
        if is_open(store)
        for key in store.pages
    }
    for (layout, namespace), node, tokens in stage.view.nodes():
        if node.stored:
            assert held.issuperset(keys(tokens, namespace, layout=layout)), node
