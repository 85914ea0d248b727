"""The prompts of a run: few and much alike, so that they meet in the tree."""

from __future__ import annotations

from array import array
from random import Random

from asyncache.core import Namespace

NAMESPACES: tuple[Namespace, ...] = (None, None, "a", "")
STEMS = ((0,) * 14, (0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0), (0, 1) * 7)


def draw_prompt(dice: Random) -> list[int]:
    """Return a prompt that shares a beginning with many others."""
    stem = dice.choice(STEMS)
    tail = [dice.randrange(3) for _ in range(dice.randint(1, 4))]
    return [*stem[: dice.choice([2, 5, 8, 10, 12])], *tail]


def packed(tokens: list[int]) -> bytes:
    """Return tokens as the core has them."""
    return array("i", tokens).tobytes()
