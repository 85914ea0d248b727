"""Shrinking: what is left of a case still fails as it did, and nothing more is left."""

from __future__ import annotations

from dataclasses import fields

import pytest

from asyncache.testing.simulation import (
    BusyError,
    LawError,
    Mishap,
    Role,
    Setting,
    StuckError,
    draw,
    plain,
    shrink,
    simulate,
    way_of,
)
from tests.testing.planted import collected, planted, quietly

__all__ = ["collected", "planted"]  # fixtures


pytestmark = quietly


@pytest.fixture
def failing(planted):
    """Return a large case that fails by what was planted."""
    cases = map(draw, range(1000))
    return next(
        case
        for case in cases
        if len(case.actors) > 8 and "planted" in str(simulate(case).failure)
    )


def test_what_is_left_fails_in_the_same_way_and_is_small(failing):
    small, result = shrink(failing)
    assert way_of(result.failure) == way_of(simulate(failing).failure)
    assert str(simulate(small).failure) == str(result.failure)
    assert 2 <= len(small.actors) <= 3
    assert {Role.CLIENT, Role.PREFETCH} >= {actor.role for actor in small.actors}


def test_nothing_more_can_be_taken_from_what_is_left(failing):
    small, result = shrink(failing)
    numbers = {actor.number for actor in small.actors}
    smaller = [small.only(numbers - {number}) for number in numbers]
    smaller += [small.without(mishap) for mishap, rate in small.rates.items() if rate]
    smaller += [plain(small, setting) for setting in Setting]
    for case in smaller:
        failure = simulate(case).failure
        is_same = failure is not None and way_of(failure) == way_of(result.failure)
        assert case == small or not is_same


def test_a_case_is_always_made_the_same_one(failing):
    assert shrink(failing)[0] == shrink(failing)[0]


@pytest.mark.parametrize("max_runs", [1, 2, 10])
def test_no_more_cases_are_played_than_allowed(failing, max_runs):
    runs = []
    small, result = shrink(failing, max_runs=max_runs, on_run=lambda: runs.append(1))
    assert len(runs) == max_runs
    assert simulate(small).failure is not None
    assert result.failure is not None


def test_what_fails_in_another_way_is_not_taken_for_it(monkeypatch, planted):
    # With fewer than three actors another law breaks, sooner.
    cases = (draw(seed) for seed in range(1000))
    case = next(
        c for c in cases if len(c.actors) > 5 and "planted" in str(simulate(c).failure)
    )
    run = simulate

    def other(case):
        result = run(case)
        if len(case.actors) < 3:
            result.error = LawError("another law")
        return result

    monkeypatch.setattr("asyncache.testing.simulation._shrink.simulate", other)
    small, result = shrink(case)
    assert len(small.actors) == 3
    assert "planted" in str(result.failure)


def test_a_case_that_passes_is_refused():
    with pytest.raises(ValueError, match="seed 0 passes"):
        shrink(draw(0).only([]))
    with pytest.raises(ValueError, match="max_runs must be at least 1, not 0"):
        shrink(draw(0), max_runs=0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (LawError("page 3 of 'kv' is free"), LawError("page 17 of 'window' is free")),
        (LawError("took -0.25 s"), LawError("took 3e-05 s")),
        (LawError("<R (1, [2])> is open"), LawError("<R {}> is open")),
        (StuckError("nothing: task 1 in a:1"), StuckError("nothing: b in c:2, d in e")),
    ],
)
def test_a_failure_is_known_whomever_it_befalls(first, second):
    assert way_of(first) == way_of(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (LawError("a"), ValueError("a")),
        (LawError("left behind: 3"), LawError("a hit: 3")),
        (StuckError("nothing: b"), BusyError("nothing: b")),
        (LawError("a client's page, a page's client"), LawError("a clients client")),
    ],
)
def test_another_failure_is_another(first, second):
    assert way_of(first) != way_of(second)


@pytest.mark.parametrize("setting", Setting)
def test_what_was_made_plain_is_plain(setting):
    cases = [draw(seed, num_ranks=2) for seed in range(30)]
    for case in cases:
        made = plain(case, setting)
        assert plain(made, setting) == made
    assert any(plain(case, setting) != case for case in cases)


def test_each_choice_of_a_case_can_be_made_plain():
    changed = set()
    for seed in range(60):
        case = draw(seed, num_ranks=2)
        small = plain_throughout(case)
        changed |= {
            field.name
            for field in fields(case)
            if getattr(case, field.name) != getattr(small, field.name)
        }
    assert changed == {f.name for f in fields(case)} - {"seed", "rates", "epochs"}


def plain_throughout(case):
    for setting in Setting:
        case = plain(case, setting)
    return case


def test_a_case_with_all_made_plain_can_be_played():
    case = plain_throughout(draw(5))
    for mishap in Mishap:
        case = case.without(mishap)
    assert simulate(case).failure is None


def test_the_failure_of_a_result_is_the_innermost():
    result = simulate(draw(0).only([]))
    assert result.failure is None
    error = LawError("a")
    result.error = ExceptionGroup("", [ExceptionGroup("", [error, ValueError()])])
    assert result.failure is error
