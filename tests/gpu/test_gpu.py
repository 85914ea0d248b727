"""``make gpu`` works, as far as that can be seen where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.softcuda import load, why_not

ROOT = Path(__file__).parents[2]
SECTIONS = ["checks", "wake", "bandwidth", "overlap", "streams", "lost", "costs"]

WHY_NOT = why_not()
if WHY_NOT is None and load() is None:
    WHY_NOT = "there is a driver: make gpu is what to run"
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def gpu(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_every_section_runs_on_softcuda(tmp_path):
    done = gpu("--softcuda", "--json", tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert "softcuda" in found["device"]
    lines = found["lines"]
    assert list(dict.fromkeys(line["section"] for line in lines)) == SECTIONS
    for line in lines:
        assert line["is_right"] is not False
        assert line["what"] in done.stdout
    skipped = [line["what"] for line in lines if "needs a GPU" in line["note"]]
    assert len(skipped) == 2
    assert all("wait_stream()" in what for what in skipped)


def test_without_a_gpu_it_says_so_and_fails():
    done = gpu()
    assert done.returncode == 2
    assert done.stdout.startswith("no GPU: there is no CUDA driver")
    assert done.stdout.count("\n") == 1
    assert not done.stderr
