"""Many seeds: what fails is told as it is found, and what was seen at the end."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from functools import partial

from asyncache.cli._progress import Watch
from asyncache.cli._sim_cases import command, describe
from asyncache.cli._sim_seeds import Outcome, Player, one_line, play_all
from asyncache.cli._sim_table import Seen, compact, table
from asyncache.testing.simulation import (
    Case,
    draw,
    shrink,
    simulate,
    torn_down_quietly,
)


def play_many(
    seeds: range,
    *,
    num_ranks: int,
    jobs: int,
    is_checked: bool,
    is_shrunk: bool,
    stops: bool,
) -> int:
    """Play seeds and print what came of them; return the exit code.

    Args:
        seeds: Which.
        num_ranks: Ranks of the model in each.
        jobs: Processes that play them.
        is_checked: Whether to play each twice, and compare.
        is_shrunk: Whether to make smaller what fails, the first in each way.
        stops: Whether to end at the first that fails.

    Raises:
        WorkerError: If a process dies.
    """
    seen: Seen = Counter()
    ways: dict[str, int] = {}
    steps = 0
    player = Player(num_ranks, is_checked=is_checked)
    outcomes = play_all(seeds, jobs=jobs, player=player)
    with torn_down_quietly(), Watch(len(seeds), "seeds") as watch, closing(outcomes):
        for outcome in outcomes:
            if outcome is None:
                watch.live()
                continue
            seen += outcome.seen
            steps += outcome.steps
            watch.advance(failed=outcome.failure is not None)
            if outcome.failure is not None:
                case = draw(outcome.seed, num_ranks) if is_shrunk else None
                _tell(watch, outcome, ways, case)
                if stops:
                    break
        watch.say(
            f"{watch.count} seeds in {watch.seconds:.1f} s, {watch.per_second:.1f} a"
            f" second: {watch.num_failed} failed, {compact(steps)} steps checked"
        )
        watch.say(f"\n{table(seen, num_ranks)}")
    return 1 if watch.num_failed else 0


def _tell(
    watch: Watch, outcome: Outcome, ways: dict[str, int], case: Case | None
) -> None:
    """Say what failed, and unless another failed like it, the least of it that does."""
    watch.say(f"seed {outcome.seed}: {outcome.failure}")
    first = ways.setdefault(outcome.way, outcome.seed)
    if first != outcome.seed:
        watch.say(f"  as seed {first} did")
    elif case is not None:
        _shrink(watch, case)


def _shrink(watch: Watch, case: Case) -> None:
    if simulate(case).failure is None:
        watch.say("  and passes when it is played again: it does not go by its seed")
        return
    doing = f"making seed {case.seed} smaller"
    small, result = shrink(case, on_run=partial(watch.live, doing))
    assert result.failure is not None
    watch.say(
        f"  with {len(small.actors)} of its {len(case.actors)} actors:"
        f" {one_line(result.failure)}"
    )
    for line in describe(small):
        watch.say(f"    {line}")
    watch.say(f"  {command(small)}")
