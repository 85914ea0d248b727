"""The command, run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncache.cli import main

TRACES = Path(__file__).parent / "traces"


@pytest.fixture
def traces() -> Path:
    return TRACES


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict]:
    """Return a function that replays a trace and returns what it found as JSON."""

    def run(trace: Path, *arguments: object) -> dict:
        words = ["replay", str(trace), *map(str, arguments), "--json"]
        assert main(words) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return json.loads(out)

    return run
