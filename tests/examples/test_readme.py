"""What the README shows runs as it stands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    command = [sys.executable, "-W", "error", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def test_the_ten_lines_of_the_readme_run_as_they_stand():
    text = (ROOT / "README.md").read_text()
    (first, *_) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert run("-c", first) == "0 tokens restored\n96 tokens restored\n"


def test_a_loop_of_ones_own_runs_in_the_simulator_as_the_readme_shows():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [shown] = [block for block in blocks if "testing.simulation" in block]
    hits = json.loads(run("-c", shown))
    assert hits[0] == 0
    assert 0 < max(hits) <= 48
    assert run("-c", shown) == run("-c", shown)


def test_the_quickstart_restores_after_a_restart():
    told = run("examples/quickstart.py").splitlines()
    assert told == [
        "0 of 100 tokens came from the store",
        "96 of 100 tokens came from the store",
    ]
