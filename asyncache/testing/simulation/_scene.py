"""Where clients are served: a cache, the device and the models behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from asyncache.core import Coverage, Namespace, WindowPool
from asyncache.engine import KVCache, Request
from asyncache.ranks import Group
from asyncache.testing.simulation._case import Case
from asyncache.testing.simulation._contents import Era, needed
from asyncache.testing.simulation._device import SimulatedDevice
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._laws import Laws
from asyncache.testing.simulation._linker import SimulatedLinker
from asyncache.testing.simulation._mishaps import Mishap
from asyncache.testing.simulation._model import Model, Row
from asyncache.testing.simulation._prompts import packed
from asyncache.testing.simulation._world import World


class Scene:
    """A cache over a device of its own, in a world.

    Attributes:
        num_opened: Requests that were opened.
        prefetches: Prompts that were asked for ahead, packed, by namespace.
        laws: What is checked, from the opening on.
    """

    laws: Laws

    def __init__(self, world: World, case: Case, group: Group | None = None) -> None:
        self._world = world
        self._case = case
        self.contents = world.contents
        self.page_tokens = case.layout.page_tokens
        self.num_opened = 0
        self.prefetches: list[tuple[Namespace, bytes]] = []
        layout = replace(case.layout, revision=world.revision)
        self.device = SimulatedDevice(
            layout,
            case.num_pages_on(world.rank),
            copies=world.copies,
            weather=world.weather,
            copy_s=world.answer_s,
            host_addressable=case.host_addressable,
        )
        self.cache = KVCache(
            layout,
            device=self.device,
            linker=self.linker(),
            limits=case.limits,
            policy=case.policy,
            writes=case.writes,
            launch=case.launch,
            observer=world,
            group=group,
            barrier=case.team.barrier if case.team else "sync",
            aborts=case.team.aborts if case.team else "vote",
        )

    def linker(self) -> SimulatedLinker:
        """Return a new linker of its device and the world's store."""
        return SimulatedLinker(
            self._world.store(),
            self.device,
            linger_s=self._world.linger_s,
            layer_groups=self._case.layer_groups,
            batch_bytes=self._case.batch_pages * self._case.page_bytes,
            num_batches=self._case.num_batches,
            rank=self._world.rank,
            num_ranks=self._case.num_ranks,
        )

    @property
    def has_states(self) -> bool:
        """Whether forwards begin with a state."""
        pools = self._case.layout.pools
        return any(pool.coverage is Coverage.ENDPOINT for pool in pools)

    @property
    def revision(self) -> str:
        """Of the weights in use."""
        return self._world.revision

    def learn(self, namespace: Namespace, tokens: bytes) -> None:
        """Take note of a prompt that some request has, packed."""
        self.contents.learn(Era(namespace, self.revision), tokens)

    def log(self, text: str) -> None:
        """Write down what whoever runs now did."""
        self._world.log(text)

    def note(self, mishap: Mishap, request: Request) -> None:
        """Take note of what befell a request."""
        state = request._state  # noqa: SLF001 - the simulator looks inside
        self._world.note(mishap, None if state is None else state.seq)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the cache, and run its models meanwhile; whoever is inside closes it."""
        await self.open()
        self._models = [self.new_model() for _ in range(self._case.num_models)]
        async with anyio.create_task_group() as group:
            for model in self._models:
                group.start_soon(model.run)
            if self._case.launch == "batch":
                group.start_soon(self._launch)
            yield
            group.cancel_scope.cancel()
        self._world.end()

    async def open(self) -> None:
        """Open the cache, and check the laws from then on."""
        await self.cache.open()
        runtime = self.cache._runtime  # noqa: SLF001 - the simulator looks inside
        assert runtime is not None
        self.laws = Laws(
            runtime.replica,
            self.device,
            self._world.copies,
            self.contents,
            self._world.sound,
        )
        self._world.begin(runtime.replica, self.laws)

    def new_model(self) -> Model:
        """Return a model that runs over its pages."""
        return Model(
            self.cache,
            self.device,
            self.contents,
            self.laws,
            forward_s=self._world.forward_s,
            gate_s=self._case.limits.gate_s,
        )

    async def compute(self, row: Row) -> None:
        """Take part in the next forward of some model."""
        await self._world.dice.choice(self._models).compute(row)

    async def idle(self) -> None:
        """Do nothing for about as long as a forward takes, or an answer."""
        await anyio.sleep(self._world.forward_s() + self._world.answer_s())

    async def _launch(self) -> None:
        while not self.cache._is_closed:  # noqa: SLF001 - the simulator looks inside
            self.cache.launch()
            await anyio.sleep(0.003)

    # What it looks at.

    def least_kept(self, request: Request) -> int:
        """Return the fewest tokens that a request may be truncated to, for windows."""
        return max(
            (
                self.page_tokens * num_passed + pool.window_tokens
                for pool in self._case.layout.pools
                if isinstance(pool, WindowPool)
                if (num_passed := request.page_table[pool.name].count(-1))
            ),
            default=0,
        )

    def check_hit(
        self,
        request: Request,
        era: Era,
        tokens: list[int],
        num_tokens: int,
        *,
        num_computed: int,
    ) -> None:
        """Raise LawError unless a hit that has landed holds what it means.

        Of windows, that is what the token after ``num_computed`` looks back to.
        """
        key, stride = packed(tokens), 4 * self.page_tokens
        num_pages = num_tokens // self.page_tokens
        unwritten = self.laws.unwritten if self._case.team else set()
        for index, pool in enumerate(self._case.layout.pools):
            if pool.coverage is Coverage.ENDPOINT:
                # The first forward reads it, from the request's own slot.
                continue
            table = request.page_table[pool.name]
            first = needed(self._case.layout, pool, num_computed).start
            for position in range(first, num_pages):
                page, end = table[position], (position + 1) * stride
                wanted = self.contents.page(era, key[:end], pool.name)
                if (index, page) in unwritten:
                    continue  # who reads it will run after who writes it
                if page < 0 or self.device.page(pool.name, page) != wanted:
                    raise LawError(
                        f"the hit of {request} has other bytes at position {position}"
                        f" of {pool.name!r}, in page {page}"
                    )
