"""One of several ranks: its cache, and what its loop does on it in each gap."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from random import Random
from typing import Any

import anyio

from asyncache.core import (
    AsyncacheError,
    ClosedError,
    InvariantError,
    OrderError,
    OutOfPagesError,
    RankError,
    TooManyRequestsError,
)
from asyncache.engine import Prompt, Request, StepReport
from asyncache.testing._nth import Canceller, CancelStyle
from asyncache.testing.simulation._case import Actor, Case, Role
from asyncache.testing.simulation._client import Client
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._mishaps import Mishap
from asyncache.testing.simulation._model import Model, Row
from asyncache.testing.simulation._party import Party, WatchedGroup
from asyncache.testing.simulation._place import Place
from asyncache.testing.simulation._play import Play
from asyncache.testing.simulation._post import Batch
from asyncache.testing.simulation._prompts import NAMESPACES, draw_prompt
from asyncache.testing.simulation._scene import Scene
from asyncache.testing.simulation._team import Team
from asyncache.testing.simulation._turns import Script, TurnPace
from asyncache.testing.simulation._world import World


class Rank:
    """A rank's cache, and whoever is served there.

    Args:
        world: Around it.
        case: What is decided.
        team: What several ranks are like.
        party: All ranks.
        group: What joins them.

    Attributes:
        places: Requests that are open, by number.
        sleep_s: Seconds that the loop will take for other things in the next gap.
        is_ahead: Whether it is to make a call that no other rank makes.
        last_step_at: When it last came to the end of a step.
    """

    model: Model

    def __init__(
        self, world: World, case: Case, team: Team, party: Party, group: WatchedGroup
    ) -> None:
        self.world = world
        self.number = world.rank
        self.group = group
        self.scene = Scene(world, case, group)
        self.cache = self.scene.cache
        self.places: dict[int, Place] = {}
        self.new_places: list[Place] = []
        """Those of requests that are every rank's, and want a handler here."""
        self.sleep_s = 0.0
        self.is_ahead = False
        self.last_step_at = 0.0
        self._case = case
        self._team = team
        self._party = party
        self._dice = Random(f"rank {case.seed} {self.number}")
        self._common = Random(f"ranks {case.seed}")
        self._rows: list[Row] = []
        self._forwards: deque[tuple[int, asyncio.Task[None], list[Row]]] = deque()
        self._num_turns = 0
        self._detached: list[tuple[int, Play]] = []

    async def open(self) -> None:
        """Open the cache."""
        await self.scene.open()
        self.group.is_open = True
        self.model = self.scene.new_model()

    @property
    def is_idle(self) -> bool:
        """Whether nobody is served, and nothing is open."""
        replica = self.world.replica
        assert replica is not None
        is_over = all(place.is_over for place in self.places.values())
        return is_over and not self._forwards and not replica.look.needs_verdict

    # A gap, and the step after it.

    async def turn(self, batch: Batch) -> None:
        """Make the calls of one gap, and step."""
        self._num_turns += 1
        sleep_s, self.sleep_s = self.sleep_s, 0.0
        await anyio.sleep(sleep_s + self._some(self._team.skew_s))
        self._go_ahead()
        self._admit(batch.prompts)
        if self._team.aborts == "call":
            self.cache.dismiss(batch.left)
        for actor in batch.orders:
            await self._obey(actor)
        await self._attach_again()
        self._serve()
        if self._case.launch == "batch" and batch.launches:
            self.cache.launch()
        self._begin_forward()
        await self.step(batch.timeout_s)

    async def step(self, timeout_s: float) -> None:
        """Step, however often that is cut short, and compare what came of it."""
        if not self._team.overlap:
            await self.finish_forwards(self._num_turns)
        report = await self._step(timeout_s)
        while report is None:
            self._check_owed()
            report = await self._step(timeout_s)
        self.last_step_at = anyio.current_time()
        replica = self.world.replica
        assert replica is not None
        if not self.group.is_lost:
            found, number = _told(report), self._num_steps
            self._party.check_same("what was told in step", number, self.number, found)
            state = replica.look.dump()
            self._party.check_same("the state after step", number, self.number, state)
        await self.finish_forwards(self._num_turns + 1 - self._team.overlap)
        for seq, place in list(self.places.items()):
            place.tell()
            if not place.request.is_open:
                place.end()
                del self.places[seq]
            elif self._team.aborts == "vote" and self._party.has_left(seq):
                place.check_ends()

    @property
    def _num_steps(self) -> int:
        runtime: Any = self.cache._runtime  # noqa: SLF001 - the simulator looks inside
        return int(runtime.barrier.num_steps)

    async def _step(self, timeout_s: float) -> StepReport[Request] | None:
        """Step; return None if it was cut short."""
        reports: list[StepReport[Request]] = []

        async def step() -> None:
            try:
                reports.append(await self.cache.step(timeout_s=timeout_s))
            finally:
                # What is cancelled as it ends may hear of it a moment later.
                await asyncio.sleep(0)

        if self.world.weather.strikes(Mishap.CUT):
            nth = self._dice.choice([1, 1, 2])
            style = self._dice.choice(list(CancelStyle))
            await Canceller(step(), nth, style).run()
        else:
            await step()
        return reports[0] if reports else None

    def _check_owed(self) -> None:
        """No call is made before a step that was cut short was repeated."""
        try:
            self.cache.reset()
        except OrderError:
            return
        raise LawError("a call was made, and a step is owed")

    def _some(self, scale_s: float) -> float:
        return scale_s * self._dice.expovariate(1.0) if scale_s else 0.0

    # Requests.

    def _admit(self, prompts: list[Prompt]) -> None:
        for prompt, request in zip(prompts, self.cache.admit(prompts), strict=True):
            assert prompt.scope is not None
            self.seat(request, prompt, self._party.actors[prompt.scope])

    def seat(
        self,
        request: Request,
        prompt: Prompt,
        number: int,
        play: Callable[[Client], Coroutine[object, object, object]] = Client.live,
    ) -> Place | None:
        """Serve a request that was admitted, if it is open."""
        found = request.id if request.is_open else type(request._end).__name__  # noqa: SLF001 - the simulator looks inside
        self._party.check_same(
            "what was admitted for actor", number, self.number, found
        )
        if not request.is_open:
            return None
        self.scene.num_opened += 1
        tokens = memoryview(prompt.tokens).cast("i").tolist()
        dice = Random(f"client {self._case.seed} {number}")
        pace = TurnPace(
            self.scene,
            self._party,
            self._join,
            dice=dice,
            runs_ahead=self._team.overlap > 0,
        )
        client = Client(
            self.scene,
            pace,
            request,
            tokens,
            prompt.namespace,
            num_reserved=len(tokens) + prompt.num_reserve_tokens,
            dice=dice,
        )
        place = Place(request, number, client, Script(play(client)))
        self.places[request.id] = place
        self.world.log(f"seats {request!r}, actor {number}")
        return place

    def _serve(self) -> None:
        """Let each client take its turn."""
        for seq, place in self.places.items():
            if place.is_over:
                continue
            outcome = "goes on"
            try:
                if place.script.go_on():
                    outcome = "was served"
            except ClosedError as error:
                outcome = type(error).__name__
                if place.request.is_open:
                    raise LawError(f"{place.request} is open: {error}") from error
            except OutOfPagesError:
                outcome = "is aborted"
                self.cache.abort(place.request)
            if outcome != "goes on":
                self.world.log(f"{seq} {outcome}")
                place.end()

    # Forwards.

    def _join(self, row: Row) -> None:
        self._rows.append(row)

    def _begin_forward(self) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        try:
            forward = self.model.begin(rows)
        except (InvariantError, RankError):
            raise
        except AsyncacheError as error:
            for row in rows:
                row.error = error
                row.done.set()
            return
        previous = self._forwards[-1][1] if self._forwards else None
        task = asyncio.get_running_loop().create_task(
            _after(previous, forward), name="forward"
        )
        self._forwards.append((self._num_turns, task, rows))

    async def finish_forwards(self, before: float = float("inf")) -> None:
        """Wait for the forwards of all turns up to one."""
        while self._forwards and self._forwards[0][0] <= before:
            _, task, rows = self._forwards[0]
            await asyncio.wait([task])
            task.result()
            self._forwards.popleft()
            for row in rows:
                row.done.set()

    # What all ranks do beside serving.

    async def _obey(self, actor: Actor) -> None:
        clients = dict.fromkeys(place.client for place in self.places.values())
        play = Play(self.scene, self.world, self._case, actor, clients)
        if actor.role is Role.EVERYONE:
            self._open_for_all(actor)
        elif actor.role is Role.DETACH:
            await play.detach()
            after = self._common.choice([0, 0, 1, 5])
            self._detached.append((self._num_turns + after, play))
        else:
            await play.act_now()

    async def _attach_again(self) -> None:
        for at, play in list(self._detached):
            if at <= self._num_turns:
                self._detached.remove((at, play))
                with suppress(ClosedError):  # its task was killed meanwhile
                    await play.attach()

    def _open_for_all(self, actor: Actor) -> None:
        dice = Random(f"actor {self._case.seed} {actor.number}")
        prompt = self.cache.prompt(
            draw_prompt(dice), namespace=dice.choice(NAMESPACES), reserve_tokens=2
        )
        [request] = self.cache.admit([prompt])
        place = self.seat(request, prompt, actor.number)
        if place is not None:
            self.new_places.append(place)

    def _go_ahead(self) -> None:
        """Make a call that no other rank makes, if it is to."""
        # One of them: two that make the same call are on a level again.
        if self.is_ahead and not self._party.is_uneven:
            self.is_ahead = False
            self._party.note_fault("a rank is ahead")
            self._party.is_uneven = True
            self.world.note(Mishap.AHEAD)
            if self._dice.random() < 0.5:
                self.cache.reset()
            else:
                [request] = self.cache.admit([self.cache.prompt([1, 2, 3])])
                refused = suppress(OutOfPagesError, TooManyRequestsError)
                with refused, request:
                    pass


async def _after(previous: asyncio.Task[None] | None, forward: object) -> None:
    if previous is not None:
        await asyncio.wait([previous])
    await forward  # type: ignore[misc]


def _told(report: StepReport[Request]) -> tuple[object, ...]:
    lists = (
        report.agreed,
        report.landed,
        report.shortened,
        report.aborted,
        report.closed,
    )
    ids = [[r._state.seq for r in requests if r._state] for requests in lists]  # noqa: SLF001 - some have ended
    return (repr(ids), report.stored_pages, report.refused_pages)
