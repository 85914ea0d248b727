"""The simulator's command: seeds in and out of processes, one seed, what was seen."""

from __future__ import annotations

import multiprocessing
import shlex
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from asyncache.cli import _progress, _sim_seeds, main
from asyncache.cli._sim_cases import command
from asyncache.cli._sim_seeds import Player, WorkerError, play_all
from asyncache.cli._sim_table import compact, table
from asyncache.core import STAGES, Stage
from asyncache.testing.simulation import (
    RANK,
    Mishap,
    Setting,
    can_befall,
    draw,
    plain,
)
from tests.testing.planted import collected, planted, quietly

__all__ = ["collected", "planted"]  # fixtures

ROOT = Path(__file__).parents[2]
BAD_ARGUMENTS = {
    "--seeds 0": "argument --seeds: '0' is not an int from 1 on",
    "--first -1": "argument --first: ",
    "--jobs 1.5": "argument --jobs: '1.5' is not an int from 1 on",
    "--seed x": "argument --seed: 'x' is not an int from 0 on",
    "--seed 1 --seeds 5": "--seeds does not go with --seed",
    "--seed 1 --stop": "--stop does not go with --seed",
    "--trace": "--trace needs --seed",
    "--only 3": "--only needs --seed",
    "--seed 1 --only 1,,2": "argument --only: '' is not an int from 0 on",
    "--seed 1 --only 999": "--only 999: seed 1 has the actors 0 to ",
    "--seed 1 --without rain": "--without 'rain': is none of ",
    "--ranks 0": "argument --ranks: '0' is not an int from 1 on",
    "--ranks 9": "argument --ranks: 9 ranks are more than 8",
    "--seed 1 --plain corrupt": "--plain 'corrupt': is none of order, launch, ",
}


pytestmark = quietly


@pytest.fixture
def sim(capsys):
    """Return a function that runs the command and returns its code and its lines."""

    def run(*words: object) -> tuple[int, list[str]]:
        code = main(["sim", *map(str, words)])
        out, err = capsys.readouterr()
        assert err == ""
        return code, out.splitlines()

    return run


# Many seeds.


def test_seeds_that_pass_are_told_of_in_a_table(sim):
    code, lines = sim("--seeds", 6, "--first", 20, "--jobs", 1)
    assert code == 0
    assert lines[0].startswith("6 seeds in ")
    assert ": 0 failed, " in lines[0]
    assert lines[3].split() == [m.name.lower() for m in Mishap][: len(lines[3].split())]
    rows = [" ".join(line.split()[:2]) for line in lines if " · " in line]
    assert set(map(str, STAGES)) <= {*rows, "request looking up"}
    assert "seen, and cannot be" not in "\n".join(lines)


def test_workers_find_what_one_process_finds():
    here = list(play_all(range(3, 40), jobs=1, player=Player()))
    there = list(play_all(range(3, 40), jobs=2, player=Player()))
    there = sorted(filter(None, there), key=lambda outcome: outcome.seed)
    assert here == there
    assert multiprocessing.active_children() == []


def test_a_worker_that_dies_is_told_and_the_others_end_at_once():
    with closing(play_all(range(100_000), jobs=2, player=Player())) as outcomes:
        next(filter(None, outcomes))
        multiprocessing.active_children()[0].kill()
        with pytest.raises(WorkerError, match=r"seed \d+ ended its process, exit.*-9"):
            list(outcomes)
    assert multiprocessing.active_children() == []


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "asyncache", "sim", "--seed", "0", "--only", "none"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("seed 0: passed, ")


# What fails.


def test_a_planted_bug_is_found_and_what_is_printed_plays_it_again(planted, sim):
    code, lines = sim("--seeds", 50, "--jobs", 1, "--stop")
    assert code == 1
    found, what, *rest = lines
    assert found.startswith("seed ")
    assert found.endswith(" are told")
    assert "  with 2 of its " in what
    [printed] = [line for line in rest if line.startswith("  python -m asyncache sim")]
    assert any(line.startswith("    epoch ") for line in rest)

    code, [again] = sim(*shlex.split(printed)[4:])
    assert code == 1
    assert again.partition(": ")[2] == what.partition(" actors: ")[2]


def test_each_seed_that_fails_is_told_and_the_first_of_a_kind_shrunk(planted, sim):
    code, lines = sim("--seeds", 25, "--jobs", 1)
    failed = [line for line in lines if line.startswith("seed ")]
    same = [line for line in lines if line.startswith("  as seed ")]
    printed = [line for line in lines if line.startswith("  python -m asyncache sim")]
    assert code == 1
    assert len(failed) > 1
    assert (len(same), len(printed)) == (len(failed) - 1, 1)


def test_nothing_is_shrunk_where_that_is_not_wanted(planted, sim):
    code, lines = sim("--seeds", 50, "--jobs", 1, "--stop", "--no-shrink")
    assert code == 1
    assert lines[0].startswith("seed ")
    assert " 1 failed, " in lines[1]


def test_a_command_has_all_that_sets_a_case_apart():
    case = draw(7)
    assert command(case) == "python -m asyncache sim --seed 7"
    assert command(case.only([])).endswith(" --only none")
    for setting in Setting:
        case = plain(case, setting)
    assert " --plain " in command(case)


def test_what_differs_from_run_to_run_is_found(monkeypatch, sim):
    assert sim("--seeds", 3, "--jobs", 1, "--check")[0] == 0
    run, runs = _sim_seeds.simulate, []

    def drifting(case, **options):
        result = run(case, **options)
        result.log[1:2] = [f"run {len(runs)}"]
        runs.append(case)
        return result

    monkeypatch.setattr(_sim_seeds, "simulate", drifting)
    code, lines = sim("--seed", 1, "--check")
    assert code == 1
    assert "differ from line 2 of the log on: 'run 0', then 'run 1'" in lines[0]
    code, lines = sim("--seeds", 1, "--jobs", 1, "--check")
    assert code == 1
    assert "passes when it is played again" in lines[1]


def test_a_log_that_ends_early_differs():
    [error] = [_sim_seeds._difference(["a"], ["a", "b"])]
    assert "line 2 of the log on: 'the end', then 'b'" in str(error)


@pytest.mark.parametrize("words", BAD_ARGUMENTS)
def test_a_bad_argument_is_refused(words, capsys):
    try:
        code = main(["sim", *words.split()])
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert BAD_ARGUMENTS[words] in err


# One seed.


def test_a_trace_has_the_steps_of_its_clients(sim):
    code, lines = sim("--seed", 3, "--trace")
    assert code == 0
    assert lines[0].startswith("epoch 0: ")
    assert any(line.startswith("mishaps: ") for line in lines)
    for step in ("opens [", "has a hit of ", "committed "):
        assert any("CLIENT" in line and step in line for line in lines)
    assert lines[-1].startswith("seed 3: passed, ")


def test_a_trace_of_what_fails_ends_in_where(planted, sim):
    seed = next(s for s in range(50) if Player().play(s).failure)
    code, lines = sim("--seed", seed, "--trace")
    assert code == 1
    assert "Traceback (most recent call last):" in lines
    assert lines[-1].startswith(f"seed {seed}: LawError: planted: ")


def test_less_than_all_of_a_seed_can_be_played(sim):
    words = ["--seed", 3, "--trace", "--only", "0,1", "--only", 2, "--plain", "pools"]
    words += ["--without", "write lands, said to have failed"]
    words += ["--without", "CORRUPT, lose", "--check"]
    code, lines = sim(*words)
    assert code == 0
    numbers = {actor.number for actor in draw(3).only([0, 1, 2]).actors}
    assert numbers == {0, 1, 2}
    assert not any(f"CLIENT {n}:" in line for line in lines for n in range(3, 20))
    assert not any("said to have failed (" in line for line in lines)
    assert sim("--seed", 3, "--only", "none")[0] == 0


# What was seen.


def test_a_table_marks_what_could_be_and_was_never_seen():
    drains, corrupt = Stage("load", "draining"), Mishap.CORRUPT
    seen = Counter({(s, m): 1 for s in STAGES for m in Mishap if can_befall(s, m)})
    assert "never seen: 0 of " in table(seen)
    del seen[drains, corrupt]
    lines = table(seen).splitlines()
    title = next(i for i, line in enumerate(lines) if line.startswith("never seen: 1 "))
    assert lines[title + 1 :] == ["  load draining x page corrupt"]
    [row] = [x for x in lines if x.startswith("load draining ") and " 0" in x]
    heading = next(line for line in lines if " corrupt " in line)
    assert row[heading.index("corrupt") + len("corrupt") - 1] == "0"


def test_a_table_tells_what_was_seen_and_cannot_be():
    text = table(Counter({(Stage("load", "queued"), Mishap.CORRUPT): 4}))
    assert text.endswith("seen, and cannot be: 1\n  load queued x page corrupt")


def test_counts_are_short():
    assert [*map(compact, [0, 999, 1000, 3999, 2_500_000])] == [
        *("0", "999", "1k", "3k", "2M")
    ]


# Several ranks.


def test_seeds_of_several_ranks_are_told_of_in_a_table_of_their_own(sim):
    code, lines = sim("--seeds", 5, "--ranks", 2, "--jobs", 1)
    assert code == 0
    heading = next(line.split() for line in lines if line.split()[:1] == ["cut"])
    assert heading == [mishap.name.lower() for mishap in RANK]
    assert "seen, and cannot be" not in "\n".join(lines)
    possible = sum(can_befall(s, m, 2) for s in STAGES for m in Mishap)
    assert any(line.endswith(f" of {possible}") for line in lines)


def test_one_rank_knows_no_mishaps_of_ranks(sim):
    _, lines = sim("--seeds", 2, "--jobs", 1)
    assert not any(line.split()[:1] == ["cut"] for line in lines)
    assert not any(can_befall(stage, Mishap.CUT) for stage in STAGES)


def test_a_planted_bug_is_found_with_ranks_and_played_again(planted, sim):
    code, lines = sim("--ranks", 2, "--seeds", 50, "--jobs", 1, "--stop")
    assert code == 1
    what = lines[1]
    [printed] = [line for line in lines if line.startswith("  python -m asyncache sim")]
    assert " --ranks 2" in printed
    assert any(line.startswith("    2 ranks: ") for line in lines)
    code, [again] = sim(*shlex.split(printed)[4:])
    assert code == 1
    assert again.partition(": ")[2] == what.partition(" actors: ")[2]


def test_a_trace_names_the_rank_of_each_line(sim):
    code, lines = sim("--seed", 2, "--ranks", 3, "--trace")
    assert code == 0
    assert any(line.startswith("3 ranks: ") for line in lines)
    assert any(" on rank " in line for line in lines if line.startswith("epoch "))
    told = [line for line in lines if " #" in line]
    assert all(line.split()[2] == "rank" for line in told)
    assert {line.split()[3] for line in told} == {"0", "1", "2"}


# Who watches.


def test_a_line_says_from_time_to_time_that_it_lives(monkeypatch, capsys):
    monkeypatch.setattr(_progress, "LINE_S", 0.0)
    assert main(["sim", "--seeds", "2", "--jobs", "1"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("1 of 2 seeds, ")
    assert lines[0].endswith(" seeds/s, 0 failed")


def test_a_bar_is_drawn_on_a_terminal_and_results_are_not(planted, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["sim", "--seeds", "8", "--jobs", "1", "--no-shrink"]) == 1
    out, err = capsys.readouterr()
    assert "seeds/s" in err
    assert "seeds/s" not in out
    assert out.startswith("seed ")
    assert "planted" not in err
