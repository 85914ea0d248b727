"""What notices a defect: the simulator, and the suite."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Timer
from typing import NamedTuple

SIMULATOR = ("-m", "asyncache", "sim", "--seeds", "300", "--stop", "--no-shrink")
SIMULATOR += ("--jobs", "1")
BAD_SEED = re.compile(r"(seed \d+:.*)")
RANKS = ("--ranks", "3", "--seeds", "120")
ROOMS_OF_RANKS = ("core", "engine")
UNSIMULATED_ROOMS = ("stores",)  # a simulation has a store of its own
SIMULATOR_S = 600

# Verbose, so that a test that hangs has been named; pytest ends it after a minute.
SUITE = ("-m", "pytest", "-x", "-v", "--tb=no", "-p", "no:cacheprovider")
SUITE += ("-p", "tests.mutants.quick", "-o", "faulthandler_timeout=60")
FAILED_TEST = re.compile(r"(tests/\S+::.*?) (?:FAILED|ERROR)\b")
BEGUN_TEST = re.compile(r"tests/\S+::\S+")
HANGS = re.compile(r"Timeout \(")
SUITE_S = 900
# The room of the defect comes first.
ROOMS = ("core", "engine", "linkers", "threads", "stores", "testing", "cli")
DEVICES = ("cuda", "devices")

_running: set[int] = set()


class Run(NamedTuple):
    code: int | None
    """None if it did not end in time, or a line was looked for and found."""
    found: str | None
    lines: list[str]


def run(
    arguments: Sequence[str], tree: Path, timeout_s: float, sign: re.Pattern[str]
) -> Run:
    """Run python in a tree until it ends or a line begins as looked for.

    A defect may well keep it from ending, so that line is its end.
    """
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "PYTHONUNBUFFERED": "1",
        "HYPOTHESIS_PROFILE": "mutants",
    }
    lines: list[str] = []
    found = None
    out_of_time = Event()

    def time_out() -> None:
        out_of_time.set()
        stop(process.pid)

    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        _running.add(process.pid)
        clock = Timer(timeout_s, time_out)
        clock.start()
        for line in process.stdout:
            lines.append(line.rstrip())
            match = sign.match(line)
            if match is not None:
                found = match.group(1)
                stop(process.pid)
                break
        code = process.wait()
        clock.cancel()
        _running.discard(process.pid)
    ended = found is None and not out_of_time.is_set()
    return Run(code if ended else None, found, lines)


def stop(pid: int) -> None:
    """End a run, and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def stop_all() -> None:
    for pid in list(_running):
        stop(pid)


def has_simulator(tree: Path) -> bool:
    return run((*SIMULATOR[:3], "--help"), tree, 60, BAD_SEED).code == 0


def proof(done: Run, what: str) -> str | None:
    """Return what was found; a run that ended in any other way proves nothing."""
    if done.found is None and done.code != 0:
        last = done.lines[-1] if done.lines else ""
        sys.stderr.write(f"{what} proves nothing: exit code {done.code}: {last}\n")
    return done.found


def simulate(tree: Path, room: str) -> str | None:
    """Return the seed that kills a defect, and what it says; None if none does."""
    if room in UNSIMULATED_ROOMS:
        return None
    done = run(SIMULATOR, tree, SIMULATOR_S, BAD_SEED)
    if done.found is None and done.code is None:
        return f"simulator: nothing for {SIMULATOR_S} s"
    return proof(done, "the simulator")


def simulate_ranks(tree: Path, room: str) -> str | None:
    """Do the same with several ranks, if it can make a difference there."""
    if room not in ROOMS_OF_RANKS:
        return None
    done = run((*SIMULATOR, *RANKS), tree, SIMULATOR_S, BAD_SEED)
    if done.found is None and done.code is None:
        return f"simulator of ranks: nothing for {SIMULATOR_S} s"
    found = proof(done, "the simulator of ranks")
    return None if found is None else f"ranks: {found}"


def test(tree: Path, room: str) -> str | None:
    """Return the test that kills a defect; None if all pass."""
    rooms = sorted(ROOMS, key=lambda name: name != room)
    rooms = [*DEVICES, *rooms] if room == "devices" else [*rooms, *DEVICES]
    folders = [f"tests/{name}" for name in rooms if (tree / "tests" / name).is_dir()]
    done = run((*SUITE, *folders), tree, SUITE_S, FAILED_TEST)
    if done.found is None and (done.code is None or any(map(HANGS.search, done.lines))):
        begun = [line for line in done.lines if BEGUN_TEST.match(line)]
        return (
            f"timeout in {BEGUN_TEST.match(begun[-1]).group() if begun else 'pytest'}"
        )
    return proof(done, "pytest")


KILLERS = {"sim": simulate, "ranks": simulate_ranks, "suite": test}
