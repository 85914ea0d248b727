"""A client: one prompt from its restore to its last token, whatever becomes of it."""

from __future__ import annotations

from random import Random

from asyncache.core import Namespace, OutOfPagesError
from asyncache.engine import Hit, Request
from asyncache.testing.simulation._contents import Era
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._model import Row
from asyncache.testing.simulation._pace import Pace
from asyncache.testing.simulation._prompts import packed
from asyncache.testing.simulation._scene import Scene


class Client:
    """Serves one prompt, and checks what it is given.

    Args:
        scene: Where it is served.
        pace: How it waits.
        request: Its scope, entered.
        tokens: Its prompt.
        namespace: Whom it shares with.
        num_reserved: Tokens whose pages it was promised.
        dice: What it does next.
    """

    def __init__(
        self,
        scene: Scene,
        pace: Pace,
        request: Request,
        tokens: list[int],
        namespace: Namespace,
        *,
        num_reserved: int,
        dice: Random,
    ) -> None:
        self._scene = scene
        self._pace = pace
        self._request = request
        self._tokens = tokens
        self._namespace = namespace
        self._dice = dice
        self._num_computed = 0
        self._num_committed = 0
        self._has_state = True
        """Whether its slots hold the state after what it has computed."""
        self._hit: Hit | None = None
        self._num_hit = 0
        """Tokens of the hit that were relied on."""
        self._num_reserved = num_reserved
        self._misread = ""
        self.era = self._renew()

    @property
    def holds_nothing(self) -> bool:
        """Whether new weights are no matter to it."""
        state = self._request._state  # noqa: SLF001 - what it has to spare is its own affair
        return state is not None and not any(map(len, [*state.tables, *state.spare]))

    def renew(self) -> None:
        """Begin in the present era."""
        self.era = self._renew()

    def _renew(self) -> Era:
        era = Era(self._namespace, self._scene.revision)
        self._scene.contents.learn(era, packed(self._tokens))
        return era

    async def live(self) -> None:
        """Do what clients do."""
        for _ in range(self._dice.choice([1, 1, 1, 2])):
            await self._restore(self._dice.choice([0.0, 0.01, 0.1, 0.5, 0.5, 0.5]))
            # A forward begins with its state, and that has to be there.
            if self._dice.random() < 0.6 or self._scene.has_states:
                await self._land()
            if self._dice.random() < 0.3:
                # In line for the batch, as a scheduler has it.
                await self._pace.idle()
            await self._prefill()
            for _ in range(self._dice.choice([0, 1, 2, 4])):
                await self._decode()
            if self._dice.random() < 0.5:
                await self._land()
            if self._dice.random() < 0.15:
                self._suspend()
        self._scene.log("has come to its end")

    async def serve_once(self) -> int:
        """Restore, compute all and commit; return the tokens of the hit."""
        await self._restore(after_s=30.0)
        await self._land()
        num_hit = self._num_hit
        await self._advance(1.0)
        self._commit()
        return num_hit

    # Restoring.

    async def _restore(self, after_s: float) -> None:
        if self._num_computed:
            self._suspend()
        self.renew()
        self._num_reserved = max(self._num_reserved, len(self._tokens))
        self._hit = await self._pace.restore(self._request, after_s)
        self._num_hit = self._num_computed = self._hit.num_tokens
        self._scene.log(f"has a hit of {self._num_hit}, {self._hit!r}")

    async def _land(self) -> None:
        """Wait for the hit, and read it."""
        assert self._hit is not None
        await self._pace.land(self._request, self._hit)
        if not self._request.settled:
            raise LawError(f"{self._request} waited for its hit, and is not settled")
        self._fall()
        self._check_reads()
        self._scene.check_hit(
            self._request,
            self.era,
            self._tokens,
            self._num_hit,
            num_computed=self._num_computed,
        )

    def _fall(self) -> bool:
        """Give up what was computed over a hit that sank; return whether it has."""
        assert self._hit is not None
        now = self._hit.num_tokens
        if now > self._num_hit:
            raise LawError(f"the hit of {self._request} rose from {self._num_hit}")
        if now == self._num_hit:
            return False
        self._scene.log(f"hit sank from {self._num_hit} to {now}")
        self._num_hit = self._num_computed = now
        self._misread = ""
        self._num_committed = min(self._num_committed, now)
        return True

    # Computing.

    async def _prefill(self) -> None:
        await self._advance(self._dice.choice([1.0, 1.0, 0.5]))
        self._commit()

    async def _decode(self) -> None:
        if self._dice.random() < 0.2:
            self._truncate()
        more = [self._dice.randrange(3) for _ in range(self._dice.randint(1, 3))]
        self._request.append(more)
        self._tokens += more
        self._scene.contents.learn(self.era, packed(self._tokens))
        await self._advance(1.0)
        if self._dice.random() < 0.7:
            self._commit()

    async def _advance(self, share: float) -> None:
        """Compute the known tokens, or a share of them that ends beyond the hit."""
        self._fall()
        end = max(self._num_computed + 1, round(share * len(self._tokens)))
        end = min(end, len(self._tokens))
        while True:
            self._extend(end)
            row = self._row(end)
            await self._pace.compute(row)
            if not self._fall():
                break
        if not row.has_run:
            raise LawError(f"{self._request} lost pages, and its hit did not sink")
        self._misread = self._misread or row.misread
        self._check_reads()
        self._num_computed = max(self._num_computed, end)
        self._has_state = True

    def _check_reads(self) -> None:
        """What was read through an open gate was true, if all has landed since."""
        if self._misread and self._request.settled:
            raise LawError(f"read behind a gate by {self._request}: {self._misread}")

    def _row(self, end: int) -> Row:
        assert self._hit is not None
        return Row(
            request=self._request,
            era=self.era,
            tokens=packed(self._tokens[:end]),
            start=self._num_computed,
            gates=None if self._request.settled else self._hit.gates,
            has_state=self._has_state,
        )

    def _extend(self, end: int) -> None:
        request = self._request
        may_fail = not request.reserved or end > self._num_reserved
        try:
            request.extend(end)
        except OutOfPagesError:
            if not may_fail:
                raise LawError(
                    f"extend failed within what {request} reserved"
                ) from None
            raise
        assert self._hit is not None
        if self._hit.num_tokens < self._num_hit:
            return  # with the end of the call, and it took the new pages along
        for name, table in request.page_table.items():
            if len(table) < -(-end // self._scene.page_tokens):
                raise LawError(f"{request} has {len(table)} pages of {name!r}")

    def _commit(self) -> None:
        shared = self._request.commit(self._num_computed)
        self._num_committed = self._num_computed
        if shared > self._num_computed or shared % self._scene.page_tokens:
            raise LawError(f"commit of {self._num_computed} shared {shared}")
        self._scene.log(f"committed {self._num_computed}, shared {shared}")

    def _truncate(self) -> None:
        least = max(1, self._num_committed, self._num_hit)
        least = max(least, self._scene.least_kept(self._request))
        if least < len(self._tokens):
            kept = self._dice.randint(least, len(self._tokens))
            self._request.truncate(kept)
            del self._tokens[kept:]
            # A state cannot be taken back: the model begins from one of its own.
            self._has_state = self._has_state and self._num_computed <= kept
            self._num_computed = min(self._num_computed, kept)
            self._scene.log(f"truncated to {kept}")

    def _suspend(self) -> None:
        self._request.suspend()
        self._misread = ""
        self._num_computed = self._num_committed = self._num_hit = 0
        self._has_state = True
        self.renew()
        self._scene.log("suspended")
