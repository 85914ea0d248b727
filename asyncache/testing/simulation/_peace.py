"""Several ranks where nothing goes wrong: what was stored must be found by all."""

from __future__ import annotations

import anyio

from asyncache.core import Namespace
from asyncache.testing.simulation._case import Case
from asyncache.testing.simulation._client import Client
from asyncache.testing.simulation._ending import close
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._party import Party
from asyncache.testing.simulation._post import Batch
from asyncache.testing.simulation._rank import Rank
from asyncache.testing.simulation._rank_loop import rest

_MOST_TURNS = 300


class Peace:
    """What one rank's loop does, and each other rank's does too."""

    def __init__(self, rank: Rank, case: Case, party: Party) -> None:
        self._rank = rank
        self._case = case
        self._party = party
        self._num_served = 0

    async def run(self, *, is_stored: bool) -> None:
        """Serve, and close the cache; see :meth:`Epoch.run_in_peace`."""
        rank = self._rank
        if is_stored:
            rank.world.weather.is_out = True
            await self._serve([8] * (2 * rank.scene.page_tokens + 1), None)
            rank.world.weather.is_out = False
            await anyio.sleep(2 * self._case.limits.breaker_s)
        tokens = [7] * (2 * rank.scene.page_tokens + 1)
        for is_there in (is_stored, True):
            found = await self._serve(tokens, "a")
            if is_there:
                self._expect(found, tokens, "served")
        await rest(rank, self._party)
        await self._ask(tokens, "a")
        await rest(rank, self._party)
        await close(rank.scene, rank.world, self._case)
        rank.world.end()

    async def _serve(self, tokens: list[int], namespace: Namespace) -> object:
        """Serve a prompt of which every rank has a scope; return the hit's length."""
        rank, self._num_served = self._rank, self._num_served + 1
        prompt = rank.cache.prompt(tokens, namespace=namespace)
        [request] = rank.cache.admit([prompt])
        with request:
            place = rank.seat(request, prompt, self._num_served, Client.serve_once)
            assert place is not None
            while not place.is_over:
                await rank.turn(self._batch())
        for _ in range(_MOST_TURNS):
            if not rank.places:
                break
            await rank.turn(self._batch())
        else:
            raise LawError(f"in peace, {request} never ends")
        return place.script.result

    def _batch(self) -> Batch:
        return Batch(
            prompts=[],
            left=self._rank.cache.left(),
            orders=[],
            launches=True,
            timeout_s=0.01,
            is_mark=False,
            is_rest=False,
            is_end=False,
        )

    async def _ask(self, tokens: list[int], namespace: Namespace) -> None:
        cache = self._rank.cache
        self._expect(cache.match_nowait(tokens, namespace=namespace), tokens, "matched")
        found = await cache.prefetch(tokens, namespace=namespace)
        self._expect(found, tokens, "prefetched")
        self._rank.scene.num_opened += 1

    def _expect(self, found: object, tokens: list[int], what: str) -> None:
        if found != len(tokens) - 1:
            raise LawError(
                f"in peace, {found} tokens of {tokens} were {what}"
                f" on rank {self._rank.number}"
            )
