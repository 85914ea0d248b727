"""``make gpu``: checks and numbers of CudaDevice on a GPU; a table, and a JSON file."""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.bench.gpus import Gpu
    from tests.gpu.report import Line

NEEDED = {
    "torch": "torch",
    "cuda.bindings": "cuda-bindings",
    "numpy": "numpy",
    "anyio": "anyio",
    "aiofiles": "aiofiles",
    "xxhash": "xxhash",
}
"""Packages, by the module that shows whether they are there."""
BUDGET_S = {
    "checks": 40,
    "wake": 35,
    "bandwidth": 40,
    "overlap": 40,
    "streams": 15,
    "lost": 30,
    "costs": 20,
}
"""Seconds of each section: 220 in all, which leaves some of four minutes to spare."""
SOFT_BUDGETS = 10
"""Times as many on softcuda, where rounds are counted and machines are busy."""
GRACE_S = 20.0
"""A section so late hangs: the run ends, and shows where every thread stands."""


def main() -> int:
    """Run the sections that were asked for; return the exit status."""
    arguments = _parse()
    missing = _missing()
    if missing:
        print(f"make gpu needs packages that are not there: {', '.join(missing)}")
        return 2
    gpu = _pick(is_soft=arguments.softcuda)
    if isinstance(gpu, str):
        print(gpu)
        return 2
    facts = _facts(gpu)
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    names = arguments.only or list(BUDGET_S)
    found: list[tuple[str, list[Line]]] = []
    for place, name in enumerate(names, 1):
        lines = _run_section(f"[{place}/{len(names)}] {name}", name, gpu)
        found.append((name, lines))
        _write(arguments.json, facts, found)
    from tests.gpu.report import table

    print(table(found))
    if gpu.soft is not None:
        print("These numbers prove the script. Of a GPU they say nothing.")
    wrong = [line for _, lines in found for line in lines if line.is_right is False]
    print(f"{arguments.json}: all numbers. {len(wrong)} checks failed.")
    return 1 if wrong else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), metavar="PATH")
    parser.add_argument(
        "--only", action="append", choices=BUDGET_S, help="may be given several times"
    )
    parser.add_argument(
        "--softcuda",
        action="store_true",
        help="prove the script itself, small, on the software driver: no numbers",
    )
    return parser.parse_args()


def _missing() -> list[str]:
    return [package for module, package in NEEDED.items() if not _is_there(module)]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def _pick(*, is_soft: bool) -> Gpu | str:
    """Return the GPU, or why there is none."""
    from asyncache.core import DeviceError
    from tests.bench.gpus import has_driver, pick_gpu

    if is_soft and has_driver():
        return "--softcuda is for machines without a CUDA driver, and here is one"
    if not is_soft and not has_driver():
        return "no GPU: there is no CUDA driver here (libcuda.so.1). Nothing was run."
    try:
        return pick_gpu()
    except (DeviceError, RuntimeError, AssertionError) as error:  # torch asserts
        return f"no GPU: {error}. Nothing was run."


def _facts(gpu: Gpu) -> dict[str, str]:
    version = importlib.metadata.version
    now = datetime.datetime.now(datetime.UTC)
    return {
        "device": gpu.name,
        "torch": version("torch"),
        "cuda-bindings": version("cuda-bindings"),
        "python": platform.python_version(),
        "date": now.isoformat(timespec="seconds"),
    }


def _run_section(title: str, name: str, gpu: Gpu) -> list[Line]:
    from tests.gpu.report import Line, Run

    print(f"{title} ...", file=sys.stderr, flush=True)
    budget_s = BUDGET_S[name] * (1 if gpu.soft is None else SOFT_BUDGETS)
    faulthandler.dump_traceback_later(budget_s + GRACE_S, exit=True)
    start, lines = time.monotonic(), []
    try:
        section = importlib.import_module(f"tests.gpu.{name}")
        for line in section.run(Run(gpu, start + budget_s)):
            lines.append(line)
            print(f"  {line.what}", file=sys.stderr, flush=True)
    except Exception as error:  # noqa: BLE001 - the others are run all the same
        traceback.print_exc()
        lines.append(Line(what=name, is_right=False, note=repr(error)))
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(f"{title}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    return lines


def _write(
    path: Path, facts: dict[str, str], found: Iterable[tuple[str, list[Line]]]
) -> None:
    """Write what there is: after each section, lest a later one takes it along."""
    lines = [
        {"section": name} | asdict(line) for name, lines in found for line in lines
    ]
    text = json.dumps(facts | {"lines": lines}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
