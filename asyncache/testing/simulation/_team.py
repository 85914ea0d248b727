"""What a seed decides of a case with several ranks, beyond what it does of any case."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Literal


class Odd(Enum):
    """In what the last rank is not like the others when the first cache is opened."""

    NOTHING = "nothing"
    LIMITS = "limits"
    LAYOUT = "layout"
    ABORTS = "aborts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Several ranks.

    Args:
        num_ranks: How many, at least 2.
        barrier: As for the cache.
        aborts: As for the cache.
        net_s: Seconds that a part of a reduce travels at most.
        post_s: Seconds that a batch travels to the loops, about.
        skew_s: Seconds that a loop takes for other things in each gap, about.
        overlap: How many steps a forward may take: 0 for none.
        stricken: Ranks whose stores and devices fail; those of the others never do.
        fewer_pages: Pages that each rank's pools have less than the case says.
        odd: What the ranks differ in.
    """

    num_ranks: int
    barrier: Literal["sync", "pipelined"]
    aborts: Literal["vote", "call"]
    net_s: float
    post_s: float
    skew_s: float
    overlap: int
    stricken: frozenset[int]
    fewer_pages: tuple[int, ...]
    odd: Odd


def draw_team(dice: Random, num_ranks: int) -> Team:
    """Return what dice decide of several ranks."""
    ranks = range(num_ranks)
    some = frozenset(dice.sample(ranks, dice.choice([1, 1, num_ranks - 1])))
    return Team(
        num_ranks=num_ranks,
        barrier=dice.choice(["sync", "pipelined"]),
        aborts=dice.choice(["vote", "vote", "call"]),
        net_s=dice.choice([0.0, 0.0005, 0.004]),
        post_s=dice.choice([0.0, 0.001, 0.005]),
        skew_s=dice.choice([0.0, 0.0, 0.002, 0.01]),
        overlap=dice.choice([0, 0, 1, 2]),
        stricken=dice.choice([some, frozenset(ranks)]),
        fewer_pages=tuple(dice.choice([0, 0, 0, 1]) for _ in ranks),
        odd=dice.choice(list(Odd)) if dice.random() < 0.02 else Odd.NOTHING,
    )
