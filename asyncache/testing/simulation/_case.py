"""A case: all that a seed decides before a run, as values that can be shrunk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from random import Random
from typing import Literal, assert_never

from asyncache.core import (
    AttentionPool,
    KVLayout,
    Policy,
    Pool,
    StatePool,
    WindowPool,
    fifo,
    filo,
    lfu,
    lru,
    mru,
    priority,
    slru,
)
from asyncache.engine import Limits, ReadOnly, WriteBack, WriteThrough
from asyncache.testing.simulation._mishaps import CLIENT, DEVICE, STORE, Mishap
from asyncache.testing.simulation._team import Odd, Team, draw_team

PAGE_TOKENS = 2
_SHAPE = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 2, "dtype": "uint8"}
_LAYOUTS: tuple[tuple[Pool, ...], ...] = (
    (AttentionPool(**_SHAPE),),  # type: ignore[arg-type]  # one shape for all
    (
        AttentionPool(**_SHAPE),  # type: ignore[arg-type]
        WindowPool(name="window", window_tokens=4, **_SHAPE),  # type: ignore[arg-type]
    ),
    (
        AttentionPool(**_SHAPE),  # type: ignore[arg-type]
        WindowPool(name="window", window_tokens=3, **_SHAPE),  # type: ignore[arg-type]
        WindowPool(name="wide", window_tokens=6, **_SHAPE),  # type: ignore[arg-type]
    ),
    (
        AttentionPool(**_SHAPE),  # type: ignore[arg-type]
        AttentionPool(name="second", **_SHAPE),  # type: ignore[arg-type]
    ),
)
_STATE = StatePool(name="state", num_layers=2, shape=(3,), dtype="uint8")
POLICIES: tuple[Policy, ...] = (lru, lru, lfu, fifo, mru, filo, slru, priority)


class Role(Enum):
    """What an actor does."""

    CLIENT = auto()
    PREFETCH = auto()
    RESET = auto()
    REVISION = auto()
    DETACH = auto()
    DRAIN = auto()
    OUTAGE = auto()
    STRANGER = auto()
    KILL = auto()
    LOOK = auto()
    # Where there are several ranks.
    EVERYONE = auto()
    SLOW = auto()
    SILENT = auto()
    DEAD = auto()
    AHEAD = auto()
    LEAVE = auto()


_ROLES = (
    (Role.CLIENT, 80),
    (Role.PREFETCH, 6),
    (Role.RESET, 2),
    (Role.REVISION, 2),
    (Role.DETACH, 4),
    (Role.DRAIN, 3),
    (Role.OUTAGE, 4),
    (Role.STRANGER, 4),
    (Role.KILL, 1),
    (Role.LOOK, 4),
)
_TEAM_ROLES = (
    (Role.CLIENT, 64),
    (Role.EVERYONE, 12),
    (Role.PREFETCH, 4),
    (Role.RESET, 2),
    (Role.REVISION, 2),
    (Role.DETACH, 4),
    (Role.DRAIN, 3),
    (Role.OUTAGE, 4),
    (Role.STRANGER, 3),
    (Role.KILL, 1),
    (Role.LOOK, 3),
    (Role.SLOW, 5),
    (Role.SILENT, 1),
    (Role.DEAD, 1),
    (Role.AHEAD, 1),
    (Role.LEAVE, 1),
)


@dataclass(frozen=True, slots=True)
class Actor:
    """Somebody who does something from some moment of an epoch on, on some rank."""

    number: int
    role: Role
    at_s: float
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What happens in a run, but for what chance decides in its course."""

    seed: int
    layout: KVLayout
    num_pages: dict[str, int]
    host_addressable: bool
    layer_groups: int
    batch_pages: int
    num_batches: int
    limits: Limits
    policy: Policy
    writes: WriteThrough | WriteBack | ReadOnly
    launch: Literal["eager", "batch"]
    shelf_pages: int
    stored: float
    """Share of the pages of common prompts that the shelf has from the start."""
    tier_pages: int
    num_models: int
    rates: dict[Mishap, float]
    epochs: tuple[tuple[Actor, ...], ...]
    answer_s: float
    linger_s: float
    forward_s: float
    is_shuffled: bool
    team: Team | None = None
    """What several ranks are like; None where there is one."""

    @property
    def num_ranks(self) -> int:
        """Of one model, each of them with a cache."""
        return 1 if self.team is None else self.team.num_ranks

    @property
    def actors(self) -> list[Actor]:
        """All who take part."""
        return [actor for epoch in self.epochs for actor in epoch]

    @property
    def page_bytes(self) -> int:
        """Of the largest page of any pool."""
        pools = self.layout.pools
        return max(self.layout.space(pool).page_bytes for pool in pools)

    def rates_on(self, rank: int) -> dict[Mishap, float]:
        """Return how often what goes wrong on a rank."""
        if self.team is None or rank in self.team.stricken:
            return self.rates
        spared = (*STORE, *DEVICE)
        return {m: rate for m, rate in self.rates.items() if m not in spared}

    def num_pages_on(self, rank: int) -> dict[str, int]:
        """Return how many pages each pool of a rank has."""
        fewer = 0 if self.team is None else self.team.fewer_pages[rank]
        return {name: count - fewer for name, count in self.num_pages.items()}

    def odd(self) -> Case:
        """Return what the odd one of several ranks takes the case to be."""
        assert self.team is not None
        match self.team.odd:
            case Odd.NOTHING:
                return self
            case Odd.LIMITS:
                more = self.limits.requests + 1
                return replace(self, limits=replace(self.limits, requests=more))
            case Odd.LAYOUT:
                return replace(self, layout=replace(self.layout, model="other"))
            case Odd.ABORTS:
                other: Literal["vote", "call"] = "vote"
                if self.team.aborts == "vote":
                    other = "call"
                return replace(self, team=replace(self.team, aborts=other))
            case _:
                assert_never(self.team.odd)

    def only(self, numbers: Collection[int]) -> Case:
        """Return the case with no other actors than these."""
        epochs = tuple(
            tuple(actor for actor in epoch if actor.number in numbers)
            for epoch in self.epochs
        )
        return replace(self, epochs=epochs)

    def without(self, mishap: Mishap) -> Case:
        """Return the case in which something never goes wrong."""
        return replace(
            self, rates={m: rate for m, rate in self.rates.items() if m is not mishap}
        )


def draw(seed: int, num_ranks: int = 1) -> Case:
    """Return the case of a seed, for so many ranks.

    Raises:
        ValueError: If there is no rank.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, not {num_ranks}")
    # A checkpoint is a call, and here forwards run beside the loop that makes calls.
    case = _draw(seed, may_have_states=num_ranks == 1)
    if num_ranks == 1:
        return case
    dice = Random(f"case {seed} of {num_ranks} ranks")
    barrier_s, step_s = dice.choice([8.0, 20.0]), dice.choice([0.4, 5.0])
    return replace(
        case,
        limits=replace(case.limits, barrier_s=barrier_s, step_s=step_s),
        rates=case.rates | {Mishap.CUT: dice.choice([0.0, 0.0, 0.05, 0.2])},
        epochs=_epochs(dice, _TEAM_ROLES, num_ranks),
        team=draw_team(dice, num_ranks),
    )


def _draw(seed: int, *, may_have_states: bool) -> Case:
    dice = Random(f"case {seed}")
    pools = dice.choice(_LAYOUTS)
    num_pages = dice.choice([7, 10, 14, 20, 32])
    slots = dice.choice([2, 2, 3, 4, 16])
    sizes = {
        pool.name: max(6, num_pages - (dice.randrange(4) if index else 0))
        for index, pool in enumerate(pools)
    }
    # Dice of its own: what else a seed decides stays as it was.
    more = Random(f"states {seed}")
    if may_have_states and more.random() < 0.25:
        pools, sizes[_STATE.name] = (*pools, _STATE), more.choice([2, 3, 5, 12])
    return Case(
        seed=seed,
        layout=KVLayout(model="simulated", page_tokens=PAGE_TOKENS, pools=pools),
        num_pages=sizes,
        host_addressable=dice.random() < 0.5,
        layer_groups=dice.choice([1, 1, 2]),
        batch_pages=dice.choice([1, 3, 64]),
        num_batches=dice.choice([1, 2, 4]),
        limits=_limits(dice, slots),
        policy=dice.choice(POLICIES),
        writes=_writes(dice, num_pages),
        launch=dice.choice(["eager", "eager", "batch"]),
        shelf_pages=dice.choice([24, 1000, 1000, 1000]),
        stored=dice.choice([0.0, 0.8, 1.0, 1.0]),
        tier_pages=dice.choice([0, 0, 0, 6]),
        num_models=dice.choice([1, 1, 2]),
        rates=_rates(dice),
        epochs=_epochs(dice),
        answer_s=dice.choice([0.0, 0.001, 0.004, 0.02]),
        linger_s=dice.choice([0.0, 0.0, 0.01]),
        forward_s=dice.choice([0.0, 0.002, 0.01]),
        is_shuffled=dice.random() < 0.75,
    )


def _limits(dice: Random, slots: int) -> Limits:
    return Limits(
        requests=dice.choice([3, 6, 32]),
        slots=slots,
        offloads=max(1, slots // 2),
        offload_attempts=dice.choice([1, 2, 3]),
        mask_ints=dice.choice([32, 64]),
        restore_s=0.2,
        gate_s=dice.choice([0.02, 0.3]),
        drain_s=2.0,
        close_s=dice.choice([0.002, 0.05, 1.0]),
        retry_s=0.005,
        breaker_failures=dice.choice([1, 3, 100]),
        breaker_s=dice.choice([0.005, 0.05]),
    )


def _writes(dice: Random, num_pages: int) -> WriteThrough | WriteBack | ReadOnly:
    draw = dice.random()
    if draw < 0.65:
        return WriteThrough(dice.choice([1, 1, 2]))
    if draw < 0.92:
        return WriteBack(low_water=dice.choice([2, num_pages // 2]))
    return ReadOnly()


def _rates(dice: Random) -> dict[Mishap, float]:
    """Choose what can go wrong at all: a run in which all does gets nowhere."""
    share = dice.choice([0.0, 0.15, 0.4])
    rates = {}
    for mishap in CLIENT:
        rates[mishap] = dice.choice([0.0, 0.1, 0.3])
    for mishap in (*STORE, *DEVICE, Mishap.CLOSE):
        # An outage is an actor's doing.
        if dice.random() < share and mishap is not Mishap.OUTAGE:
            rates[mishap] = dice.choice([0.02, 0.1, 0.3])
    return rates


def _epochs(
    dice: Random, weighted: Sequence[tuple[Role, int]] = _ROLES, num_ranks: int = 1
) -> tuple[tuple[Actor, ...], ...]:
    number, epochs = 0, []
    roles, weights = zip(*weighted, strict=True)
    for _ in range(dice.choice([1, 1, 2, 3])):
        actors = []
        within_s = dice.choice([0.0, 0.01, 0.06])
        for _ in range(dice.choice([3, 5, 8, 12])):
            [role] = dice.choices(roles, weights)
            actor = Actor(number, role, round(dice.random() * within_s, 4))
            if num_ranks > 1:
                actor = replace(actor, rank=dice.choice([0, *range(num_ranks)]))
            actors.append(actor)
            number += 1
        epochs.append(tuple(actors))
    return tuple(epochs)
