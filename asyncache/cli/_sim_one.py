"""One seed, as it was drawn or with less in it, and all that is to be seen of it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TypeVar

from asyncache.cli._errors import InputError
from asyncache.cli._sim_cases import describe
from asyncache.cli._sim_seeds import one_line, play
from asyncache.testing.simulation import (
    Case,
    Mishap,
    Setting,
    draw,
    plain,
    torn_down_quietly,
)

E = TypeVar("E", bound=Enum)


def play_one(
    seed: int,
    *,
    num_ranks: int,
    only: list[int] | None,
    without: Sequence[str],
    made_plain: Sequence[str],
    is_traced: bool,
    is_checked: bool,
) -> int:
    """Play a seed and print how it ended; return the exit code.

    Args:
        seed: Which.
        num_ranks: Ranks of the model.
        only: The actors that are left in it; None leaves all.
        without: Mishaps that are left out, by name or in words.
        made_plain: Settings that are made plain, by name.
        is_traced: Whether to print what it consists of, and all that happens.
        is_checked: Whether to play it twice, and compare.

    Raises:
        InputError: If there is no such actor, mishap or setting.
    """
    case = _case(draw(seed, num_ranks), only, without, made_plain)
    with torn_down_quietly():
        result = play(case, is_checked=is_checked, is_logged=is_traced)
    failure = result.failure
    if is_traced:
        _write([*describe(case), "", *result.log, ""])
        if failure is not None:
            _write("".join(traceback.format_exception(failure)).splitlines())
    if failure is not None:
        _write([f"seed {seed}: {one_line(failure)}"])
        return 1
    _write([f"seed {seed}: passed, {result.steps} steps checked"])
    return 0


def _write(lines: list[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _case(
    case: Case,
    only: list[int] | None,
    without: Sequence[str],
    made_plain: Sequence[str],
) -> Case:
    if only is not None:
        numbers = [actor.number for actor in case.actors]
        for number in only:
            if number not in numbers:
                last = max(numbers)
                raise InputError(
                    f"--only {number}: seed {case.seed} has the actors 0 to {last}"
                )
        case = case.only(only)
    for text in without:
        for mishap in _named("--without", text, Mishap):
            case = case.without(mishap)
    for text in made_plain:
        for setting in _named("--plain", text, Setting):
            case = plain(case, setting)
    return case


def _named(option: str, text: str, kind: type[E]) -> Iterator[E]:
    """Yield what is named: one in its own words, which may have commas, or several."""
    words = {member.value: member for member in kind}
    words |= {member.name.lower(): member for member in kind}
    if text in words:
        yield words[text]
        return
    for part in map(str.strip, text.split(",")):
        member = words.get(part) or words.get(part.lower())
        if member is None:
            known = ", ".join(member.name.lower() for member in kind)
            raise InputError(f"{option} {part!r}: is none of {known}")
        yield member
