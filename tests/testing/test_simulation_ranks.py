"""The simulator with several ranks: a seed is a run, and what differs is seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from asyncache.core import _verdicts, mru
from asyncache.core._look import Look
from asyncache.core._votes import HEADER_INTS
from asyncache.engine import KVCache, _barrier, _life
from asyncache.engine._barrier import Barrier
from asyncache.engine._driver import Driver
from asyncache.engine._handshake import Agreed
from asyncache.engine._runtime import Runtime
from asyncache.testing.simulation import (
    Actor,
    Mishap,
    Role,
    Setting,
    SimulatedGroup,
    draw,
    plain,
    shrink,
    simulate,
)
from asyncache.testing.simulation._linker import SimulatedLinker
from asyncache.testing.simulation._rank import Rank
from asyncache.testing.simulation._team import Odd
from tests.testing import fresh
from tests.testing.planted import collected, quietly

__all__ = ["collected"]  # fixtures

pytestmark = quietly
SEEDS = range(6)


def logs(seeds, num_ranks: int) -> list[list[str]]:
    return [simulate(draw(seed, num_ranks), is_logged=True).log for seed in seeds]


# A seed is a run.


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_seed_makes_the_same_run_twice_in_one_process(num_ranks):
    first = logs(SEEDS, num_ranks)
    second = logs(reversed(SEEDS), num_ranks)
    assert first == second[::-1]
    assert len(set(map(tuple, first))) == len(SEEDS)
    ranks = {line.split(" rank ")[1][0] for line in first[0] if " rank " in line}
    assert ranks == set(map(str, range(num_ranks)))


@pytest.mark.slow
def test_a_seed_makes_the_same_run_in_fresh_processes():
    assert len(fresh.outputs(4, 3)) == 1


def test_a_case_of_one_rank_is_none_of_several():
    one, two, three = (draw(7, num_ranks) for num_ranks in (1, 2, 3))
    assert one == draw(7)
    assert one.team is None
    assert (one.num_ranks, two.num_ranks, three.num_ranks) == (1, 2, 3)
    assert two.epochs != three.epochs
    with pytest.raises(ValueError, match="at least 1, not 0"):
        draw(7, 0)


def test_a_team_is_made_plain_and_one_rank_has_none():
    for setting in (Setting.BARRIER, Setting.ABORTS, Setting.WIRE, Setting.OVERLAP):
        assert plain(draw(7), setting) == draw(7)
    case = draw(7, 3)
    for setting in Setting:
        case = plain(case, setting)
        assert plain(case, setting) == case
    team = case.team
    assert (team.barrier, team.aborts, team.overlap, team.net_s) == (
        "sync",
        "vote",
        0,
        0,
    )
    assert team.fewer_pages == (0, 0, 0)


# What is wrong is seen.


def cases(num_ranks: int = 2, role: Role | None = None, **team):
    """Yield cases with some traits of a team, and a role on the last rank, given."""
    for seed in range(150):
        case = draw(seed, num_ranks)
        if role is not None:
            actor = Actor(999, role, 0.002, num_ranks - 1)
            first, *others = case.epochs
            case = replace(case, epochs=((*first, actor), *others))
        yield replace(case, team=replace(case.team, **team))


def first_failure(played) -> str:
    for case in played:
        if (failure := simulate(case).failure) is not None:
            return f"{type(failure).__name__}: {failure}"
    raise AssertionError("nobody notices")


def is_last(cache: KVCache) -> bool:
    return cache._group.rank == cache._group.num_ranks - 1


def test_a_minimum_that_is_another_on_one_rank_is_seen(monkeypatch):
    all_min = SimulatedGroup.all_min

    async def torn(self, vector):
        await all_min(self, vector)
        if self.rank == 1 and len(vector) > HEADER_INTS:
            vector[3] += 1

    monkeypatch.setattr(SimulatedGroup, "all_min", torn)
    assert "LawError: minimum " in first_failure(cases())


def test_a_report_that_is_another_on_one_rank_is_seen(monkeypatch):
    step = KVCache.step

    async def forget(self, **arguments):
        report = await step(self, **arguments)
        return replace(report, closed=()) if is_last(self) else report

    monkeypatch.setattr(KVCache, "step", forget)
    assert "what was told in step" in first_failure(cases())


def test_a_rank_that_evicts_other_pages_is_seen(monkeypatch):
    new_replica = KVCache._new_replica

    def decide(self, num_pages):
        if self._group.num_ranks > 1 and is_last(self):
            self._policy = mru
        return new_replica(self, num_pages)

    monkeypatch.setattr(KVCache, "_new_replica", decide)
    told = first_failure(cases())
    assert "the state after step" in told or "ranks differ: digests" in told


def test_a_reduce_for_nothing_is_seen(monkeypatch):
    monkeypatch.setattr(Look, "needs_verdict", property(lambda _: True))
    monkeypatch.setattr(Rank, "is_idle", property(lambda self: not self.places))
    found = first_failure(cases(aborts="call"))
    assert "never end" in found or "nothing to agree on" in found


def test_a_call_before_a_step_was_repeated_is_seen(monkeypatch):
    monkeypatch.setattr(Barrier, "check_gap", Barrier._check_task)
    assert "a step is owed" in first_failure(cases())


def test_a_rank_that_stores_the_shard_of_another_is_seen(monkeypatch):
    init = SimulatedLinker.__init__

    def confuse(self, *args, **arguments):
        init(self, *args, **arguments | {"rank": 0})

    monkeypatch.setattr(SimulatedLinker, "__init__", confuse)
    assert "under a key" in first_failure(cases()).replace(
        "a key that nobody asked for", "under a key"
    )


def test_ranks_that_wait_too_long_for_a_silent_one_are_seen(monkeypatch):
    async def wait(group, vector, timeout_s):
        await group.all_min(vector)

    monkeypatch.setattr(_barrier, "reduce", wait)
    found = first_failure(cases(role=Role.SILENT))
    assert "for the others" in found


def test_ranks_that_do_not_compare_what_they_were_told_are_seen(monkeypatch):
    monkeypatch.setattr(_verdicts, "_check_header", lambda verdict: None)
    found = first_failure(cases(role=Role.AHEAD))
    assert "goes on with ranks that differ" in found


def test_ranks_that_open_unlike_each_other_are_seen(monkeypatch):
    async def nod(group, settings, num_pages, *, timeout_s):
        return Agreed(num_pages, name=0)

    monkeypatch.setattr(_life, "shake_hands", nod)
    found = first_failure(cases(odd=Odd.LIMITS))
    assert "ranks that differ in their limits are open" in found


def test_a_cache_that_opens_on_one_rank_alone_is_seen(monkeypatch):
    async def agree(self, *, is_fine):
        return is_fine, None

    monkeypatch.setattr(Barrier, "agree", agree)
    shut = (replace(case, rates={Mishap.SHUT: 0.5}) for case in cases())
    assert "of 2 ranks are open" in first_failure(shut)


def test_a_request_that_never_ends_is_seen(monkeypatch):
    quiet = Driver.quiet

    def ignore(self, seq):
        if self.replica.look.request(seq) is None:
            quiet(self, seq)

    monkeypatch.setattr(Driver, "quiet", ignore)
    found = first_failure(cases(aborts="vote"))
    assert " steps ago" in found or "never ends" in found


def test_a_restore_that_outlasts_its_deadline_is_seen(monkeypatch):
    monkeypatch.setattr(Runtime, "give_up", lambda self, state: None)
    stalled = (replace(case, rates={Mishap.STALL: 1.0}) for case in cases())
    assert "steps after its end" in first_failure(stalled)


def test_a_page_that_one_ranks_forward_still_writes_is_seen(monkeypatch):
    forward = Driver.forward

    def vouch(self, requests):
        number = forward(self, requests)
        self._votes.finished = number
        return number

    monkeypatch.setattr(Driver, "forward", vouch)
    found = first_failure(cases(overlap=2))
    assert "forward" in found or "other bytes" in found


# What ranks are told.


@pytest.mark.parametrize("role", [Role.SILENT, Role.DEAD, Role.AHEAD, Role.LEAVE])
def test_what_one_rank_does_wrong_is_an_end_for_all(role):
    ends = set()
    for case in islice(cases(3, role=role, aborts="vote"), 20):
        result = simulate(case, is_logged=True)
        assert result.failure is None
        failed = [line.split()[3] for line in result.log if ": failed: " in line]
        ends.add(frozenset(failed))
    assert {"0", "1"} <= max(ends, key=len)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7007330, 7013860])
def test_a_rank_that_lost_the_others_is_compared_with_nobody(seed):
    """One of them is gone, and it steps to hear of that while they attach a store."""
    result = simulate(draw(seed, 3), is_logged=True)
    assert result.failure is None
    assert any(": failed: rank 1 has left" in line for line in result.log)


def test_mishaps_of_ranks_are_seen():
    seen = Counter()
    for case in islice(cases(2, role=Role.SLOW), 12):
        seen += simulate(case).seen
    assert {mishap for _, mishap in seen} >= {Mishap.CUT, Mishap.SLOW}


def test_a_case_of_ranks_is_made_small(monkeypatch):
    monkeypatch.setattr(Barrier, "check_gap", Barrier._check_task)
    case = next(case for case in cases() if simulate(case).failure is not None)
    small, result = shrink(case, max_runs=60)
    assert "a step is owed" in str(result.failure)
    assert len(small.actors) < len(case.actors)
    assert [m for m, rate in small.rates.items() if rate] == [Mishap.CUT]
