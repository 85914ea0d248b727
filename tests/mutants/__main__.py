"""``make mutants``: proves that each deliberate defect is noticed, and by what."""

# ruff: noqa: T201 - it talks to a person

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from asyncache.cli._progress import progress
from tests.mutants.defects import DEFECTS, Defect
from tests.mutants.killers import KILLERS, has_simulator, stop_all

ROOT = Path(__file__).parents[2]
TREE = ("asyncache", "tests", "examples", "pyproject.toml")
# If this one is killed, all other kills prove nothing.
CONTROL = Defect("nothing is broken", "none", "core/__init__.py", "", "")


class Result(NamedTuple):
    defect: Defect
    killed_by: str | None
    seconds: float

    @property
    def is_as_it_should(self) -> bool:
        return (self.killed_by is None) == (self.defect is CONTROL)

    @property
    def cells(self) -> tuple[str, ...]:
        killed_by = self.killed_by or "SURVIVED"
        if self.defect is CONTROL:
            killed_by = self.killed_by or "passes, as it should"
        return (*self.defect[:2], f"{self.seconds:.0f} s", killed_by)


def main() -> int:
    # Ignored, as in the background of a script, it would be ignored by each test too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    options = parse()
    defects = chosen(options.names)
    if options.list:
        print("\n".join(table((d.name, d.law, d.path) for d in defects)))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        # Copied once: whoever edits the checkout meanwhile changes no result.
        sound = Path(folder, "sound")
        copy(ROOT, sound)
        killers = available(options.killers, sound)
        if not killers:
            return 2
        results = run_all([CONTROL, *defects], killers, sound, options.jobs)
    print()
    print("\n".join(table(result.cells for result in results)))
    wrong = [result.defect.name for result in results if not result.is_as_it_should]
    num_killed = len(results) - 1 - sum(name != CONTROL.name for name in wrong)
    print(f"\n{num_killed} of {len(defects)} defects killed")
    if CONTROL.name in wrong:
        print("the sound code does not pass, so that this proves nothing")
    return int(bool(wrong))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__
    )
    parser.add_argument("names", nargs="*", help="parts of names; all if none is given")
    parser.add_argument("--list", action="store_true", help="show the defects")
    parser.add_argument("--killers", choices=[*KILLERS, "all"], default="all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def chosen(parts: Sequence[str]) -> list[Defect]:
    defects = [d for d in DEFECTS if not parts or any(part in d.name for part in parts)]
    if not defects:
        sys.exit(f"no defect is called {' or '.join(parts)}: see --list")
    return defects


def available(wanted: str, tree: Path) -> list[str]:
    names = list(KILLERS) if wanted == "all" else [wanted]
    if names != ["suite"] and not has_simulator(tree):
        print("there is no `python -m asyncache sim` yet: the simulator is skipped")
        names = [name for name in names if name == "suite"]
    return names


def run_all(
    defects: Sequence[Defect], killers: Sequence[str], sound: Path, jobs: int
) -> list[Result]:
    results = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(kill, defect, killers, sound) for defect in defects]
        try:
            with progress(futures, "mutants") as bar:
                for place, future in enumerate(bar, 1):
                    results.append(future.result())
                    name, _, taken, killed_by = results[-1].cells
                    line = f"[{place}/{len(futures)}] {name}: {killed_by} ({taken})"
                    print(line, flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_all()
            raise
    return results


def kill(defect: Defect, killers: Sequence[str], sound: Path) -> Result:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder, "tree")
        copy(sound, tree)
        apply(defect, tree)
        room = defect.path.partition("/")[0]
        for name in killers:
            killed_by = KILLERS[name](tree, room)
            if killed_by is not None:
                break
    return Result(defect, killed_by, time.monotonic() - start)


def copy(source: Path, target: Path) -> None:
    target.mkdir()
    for name in TREE:
        if (source / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source / name, target / name, ignore=ignored)
        else:
            shutil.copy(source / name, target / name)


def apply(defect: Defect, tree: Path) -> None:
    path = tree / "asyncache" / defect.path
    text = path.read_text(encoding="utf-8")
    if defect is not CONTROL and text.count(defect.old) != 1:
        sys.exit(f"{defect.name}: its snippet is not in {defect.path} just once")
    path.write_text(text.replace(defect.old, defect.new), encoding="utf-8")


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


if __name__ == "__main__":
    sys.exit(main())
