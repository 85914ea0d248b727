"""A world: what outlives the caches in it, and what is seen of all that happens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from asyncache.core import (
    Coverage,
    Fact,
    FactKind,
    PageHash,
    PageKey,
    PagesCached,
    PagesDropped,
    Replica,
    Stage,
)
from asyncache.engine import Event, ReadOnly, TransferFailed
from asyncache.stores import MemoryStore, Store, TieredStore
from asyncache.testing.simulation._case import Case
from asyncache.testing.simulation._contents import Contents, Era
from asyncache.testing.simulation._copies import Copies
from asyncache.testing.simulation._errors import LawError
from asyncache.testing.simulation._laws import Laws
from asyncache.testing.simulation._linker import at_work
from asyncache.testing.simulation._loop import SimulatedLoop
from asyncache.testing.simulation._mishaps import Mishap, Weather
from asyncache.testing.simulation._prompts import (
    NAMESPACES,
    STEMS,
    draw_prompt,
    packed,
)
from asyncache.testing.simulation._store import Shelf, SimulatedStore

Seen = Counter[tuple[Stage, Mishap]]


@dataclass(slots=True)
class Result:
    """What came of a case.

    Args:
        seen: How often each mishap befell a transaction, by where that was.
        steps: Changes of the state, each of which was checked.
        log: What happened, if it was asked for.
        error: What was wrong; None if all held.
    """

    seen: Seen = field(default_factory=Counter)
    steps: int = 0
    log: list[str] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        """The innermost error: of a group's the first, and so on; None if all held."""
        error = self.error
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return error


class World:
    """What outlives the caches of one rank in one run, and watches them.

    Args:
        case: What happens.
        result: Where it is written down.
        is_logged: Whether all that happens is.
        rank: Which rank's world it is.
    """

    def __init__(
        self, case: Case, result: Result, *, is_logged: bool = False, rank: int = 0
    ) -> None:
        self._case = case
        self._is_logged = is_logged
        self.result = result
        self.rank = rank
        self.sound: set[int] | None = None
        """As for :class:`Laws`."""
        self._rank_name = f" rank {rank}" if case.team else ""
        name = f"{case.seed}{self._rank_name}"
        self.dice = Random(f"world {name}")
        self.copies = Copies()
        self.weather = Weather(
            Random(f"weather {name}"), case.rates_on(rank), on_strike=self._struck
        )
        self._spaces = [
            case.layout.space(pool, rank=rank, num_ranks=case.num_ranks)
            for pool in case.layout.pools
        ]
        self.contents = Contents(case.layout, self._spaces)
        self.revision = ""
        self.replica: Replica | None = None
        self._laws: Laws | None = None
        self._violation: LawError | None = None
        self._stores: list[SimulatedStore] = []
        self._shelf = Shelf(case.shelf_pages, on_put=self._put)
        self.known_prompts = [draw_prompt(Random(index)) for index in range(6)]

    # For its epochs.

    def store(self) -> Store:
        """Return a store over the shelf of this world, behind memory if so decided."""
        store = SimulatedStore(
            self._shelf,
            copies=self.copies,
            weather=self.weather,
            answer_s=self.answer_s,
        )
        self._stores.append(store)
        if not self._case.tier_pages:
            return store
        memory = MemoryStore(self._case.tier_pages * self._case.page_bytes)
        return TieredStore([memory, store])

    def fill(self) -> None:
        """Store what others have stored before: the beginnings of most prompts."""
        for namespace in dict.fromkeys(NAMESPACES):
            era = Era(namespace, self.revision)
            for stem in STEMS:
                tokens = packed(list(stem))
                self.contents.learn(era, tokens)
                for key in self.contents.keys(era, tokens):
                    page = self.contents.under(key)
                    if page is not None and self.dice.random() < self._case.stored:
                        self._shelf.keep(key, page)

    def answer_s(self) -> float:
        """Return how long the next answer or copy takes: mostly short, with a tail."""
        return self._some(self._case.answer_s)

    def forward_s(self) -> float:
        """Return how long the next forward takes."""
        return self._some(self._case.forward_s)

    def linger_s(self) -> float:
        """Return how long the next load takes to end once all of it has landed."""
        return self._some(self._case.linger_s)

    def _some(self, scale_s: float) -> float:
        return scale_s * self.dice.expovariate(1.0) if scale_s else 0.0

    def begin(self, replica: Replica, laws: Laws) -> None:
        """Check the laws of a cache from now on."""
        self.replica, self._laws = replica, laws

    def end(self) -> None:
        """Check them no more."""
        self.check()
        if any(store.is_held for store in self._stores):
            raise LawError("a store was never closed")
        self._stores.clear()
        self.replica = self._laws = None

    def log(self, text: str) -> None:
        """Write down what whoever runs now did."""
        if self._is_logged:
            task = asyncio.current_task()
            who = "loop" if task is None else task.get_name()
            self.result.log.append(f"{self._now()}{self._rank_name} {who}: {text}")

    def on_event(self, event: Event) -> None:
        """Write down what the cache tells."""
        match event:
            case Fact(kind=kind, num_pages=num_pages, hashes=hashes):
                self.log(f"told {kind.name} {num_pages}")
                if kind is FactKind.STORED:
                    self._check_stored(num_pages, hashes)
            case PagesCached(pool, hashes) | PagesDropped(pool, hashes):
                self.log(f"told {type(event).__name__} {len(hashes)} of {pool}")
            case TransferFailed(kind=kind, error=error):
                self.log(f"told that a {kind.name} failed: {type(error).__name__}")
            case _:
                self.log(f"told {event}")

    def _now(self) -> str:
        # Its number of handles shows any difference in order long before it matters.
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        return f"{loop.time():.6f} #{loop.num_handles}"

    # What is seen.

    def _struck(self, mishap: Mishap) -> None:
        self.note(mishap, at_work())

    def note(self, mishap: Mishap, seq: int | None = None) -> None:
        """Take note of a mishap, and of whom it befell: everyone if nobody is named."""
        self.log(f"! {mishap.value}{'' if seq is None else f' (of {seq})'}")
        if self.replica is None:
            return
        stages = self.replica.look.stages()
        victims = list(stages) if seq is None else [seq]
        for victim in victims:
            if victim in stages:
                self.result.seen[stages[victim], mishap] += 1

    # What must hold.

    def _check_stored(self, num_pages: int, hashes: Sequence[PageHash]) -> None:
        """What is told to be stored was put, in each pool that keeps every page."""
        pools = zip(self._case.layout.pools, self._spaces, strict=True)
        spaces = [s for pool, s in pools if pool.coverage is Coverage.ALL_PAGES]
        keys = {PageKey(page, space) for page in hashes for space in spaces}
        if len(hashes) != num_pages or not keys <= self._shelf.ever:
            self.violate(f"{num_pages} pages are told to be stored, and are not")

    def violate(self, what: str) -> None:
        """Let the next check raise that something is against the law."""
        # Raised by the next check: where it is found, somebody might swallow it.
        self._violation = self._violation or LawError(what)

    def _put(self, key: PageKey, page: bytes) -> None:
        if isinstance(self._case.writes, ReadOnly) and self.replica is not None:
            self.violate(f"stored by a cache that only reads: {key}")
        wanted = self.contents.under(key)
        if page != wanted:
            what = "a key that nobody asked for" if wanted is None else "other bytes"
            self.violate(f"stored: {what}, under {key}")

    def check(self) -> None:
        """Raise what is against the law; to be called after each step."""
        if self._violation is not None:
            raise self._violation
        if self._laws is not None and self._laws.check():
            self.result.steps += 1
