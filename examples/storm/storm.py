"""The storm: clients on one cache, half of which hang up while they are served.

Each client is a task with a request's scope in it. Who hangs up is picked at random
among those in flight, at a random moment, and is cancelled in one of the two ways that
there are: by an anyio scope, whose every await raises from then on, or by
``task.cancel()``, which raises once. Neither client nor batch undoes anything: that is
the scope's affair.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from random import Random

import anyio

from asyncache import KVCache, OutOfPagesError, Request
from examples.storm.batch import Batch
from examples.storm.toy import PAGE_TOKENS, Prompts, Text, ToyModel
from examples.storm.weather import Pause


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How hard it blows.

    Args:
        seed: Of all chance but the machine's.
        num_requests: Requests in all.
        num_at_once: Requests in flight.
        answer_tokens: Most tokens of an answer; no pages are reserved for it.
        hangup_s: Longest time from a request's arrival to the hang-up that it brings
            about, its own or another's.
        oversized: How many in a hundred prompts are larger than the pool.
    """

    seed: int = 0
    num_requests: int = 2_000
    num_at_once: int = 64
    answer_tokens: int = 32
    hangup_s: float = 0.25
    oversized: int = 1


class State(Enum):
    """Where a request is, as its client sees it."""

    WAITING = "waiting for room"
    ASKING = "asking the store"
    LOADING = "loading pages"
    PREFILL = "computing its prompt"
    DECODING = "decoding"


@dataclass(eq=False, slots=True)
class Client:
    """One request, and how to hang up on it."""

    text: Text
    num_tokens: int
    state: State = State.WAITING
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Tally:
    """What became of the requests."""

    served: int = 0
    refused: int = 0
    aborted: Counter[State] = field(default_factory=Counter)
    by_scope: int = 0
    by_task: int = 0
    out_of_pages: int = 0

    @property
    def num_ended(self) -> int:
        """Requests that are over."""
        return self.served + self.refused + self.aborted.total()


class Storm:
    """Clients, a batch, and a tally of what became of them.

    Args:
        plan: How hard it blows.
        cache: An open cache.
        model: Computes into the pages of the cache's device.
        num_pages: Of that device.
        pause: How to wait.
        on_end: Called when a request has ended.
    """

    def __init__(
        self,
        plan: Plan,
        cache: KVCache,
        model: ToyModel,
        *,
        num_pages: int,
        pause: Pause = anyio.sleep,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._plan = plan
        self._cache = cache
        self._batch = Batch(cache, model)
        self._pool_tokens = num_pages * PAGE_TOKENS
        self._pause = pause
        self._on_end = on_end
        self._dice = Random(plan.seed)
        self._in_flight: dict[Client, None] = {}
        self.tally = Tally()

    @property
    def num_in_flight(self) -> int:
        """Requests that are open and whose clients have not hung up."""
        return len(self._in_flight)

    async def run(self) -> None:
        """Serve everyone; returns when the last request has ended."""
        prompts, places = Prompts(self._dice), asyncio.Semaphore(self._plan.num_at_once)
        async with asyncio.TaskGroup() as background:
            batch = background.create_task(self._batch.run())
            async with asyncio.TaskGroup() as clients:
                for number in range(self._plan.num_requests):
                    await places.acquire()
                    client = self._arrive(prompts)
                    client.task = clients.create_task(
                        self._attend(client), name=f"client {number}"
                    )
                    client.task.add_done_callback(lambda _: places.release())
                    if number % 2:
                        clients.create_task(self._hang_up())
            batch.cancel()

    def _arrive(self, prompts: Prompts) -> Client:
        tokens = prompts.draw()
        if self._dice.randrange(100) < self._plan.oversized:
            tokens *= self._pool_tokens // len(tokens) + 1
        num_tokens = len(tokens) + self._dice.randint(1, self._plan.answer_tokens)
        return Client(Text(tokens), num_tokens)

    async def _hang_up(self) -> None:
        """Cancel someone who is in flight, in one way or the other."""
        await self._pause(self._dice.random() * self._plan.hangup_s)
        if not self._in_flight:
            return
        victim = self._dice.choice(list(self._in_flight))
        del self._in_flight[victim]  # nobody is cancelled twice
        if self._dice.randrange(2):
            victim.scope.cancel()
            self.tally.by_scope += 1
        elif victim.task is not None:
            victim.task.cancel()
            self.tally.by_task += 1

    # A client.

    async def _attend(self, client: Client) -> None:
        self._in_flight[client] = None
        try:
            with client.scope:
                await self._serve(client)
        finally:
            self._in_flight.pop(client, None)
            client.task = None  # else each would hold the other until collected
            self._on_end()

    async def _serve(self, client: Client) -> None:
        try:
            with self._cache.request(client.text.tokens) as request:
                await self._answer(client, request)
        except OutOfPagesError:
            self.tally.refused += 1  # it could never fit
        except asyncio.CancelledError:
            self.tally.aborted[client.state] += 1
            raise
        else:
            self.tally.served += 1

    async def _answer(self, client: Client, request: Request) -> None:
        while True:
            num_hit = await self._restore(client, request)
            try:
                await self._generate(client, request, num_hit)
            except OutOfPagesError:
                # Beyond the reservation there is no promise: give way, and start over.
                self.tally.out_of_pages += 1
                request.suspend()
            else:
                return

    async def _restore(self, client: Client, request: Request) -> int:
        client.state = State.WAITING
        try:
            hit = await request.restore()
        except asyncio.CancelledError:
            if request.reserved:
                client.state = State.ASKING
            raise
        client.state = State.LOADING
        await hit.wait()
        return hit.num_tokens

    async def _generate(self, client: Client, request: Request, num_hit: int) -> None:
        text, compute = client.text, self._batch.compute
        client.state = State.PREFILL
        request.extend(len(text))
        await compute(request, text, start=num_hit, num_read=num_hit)
        request.commit(len(text))
        client.state = State.DECODING
        while len(text) < client.num_tokens:
            token = text.next_token
            text.add(token)
            request.append([token])
            request.extend(len(text))
            # The last one reads all that was computed before, by whomever.
            is_last = len(text) == client.num_tokens
            num_read = len(text) - 1 if is_last else 0
            await compute(request, text, start=len(text) - 1, num_read=num_read)
            request.commit(len(text))
