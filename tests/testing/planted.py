"""A law that does not hold, for tests of what finds, shrinks and tells of failures."""

from __future__ import annotations

import gc

import pytest

from asyncache.core import Stage
from asyncache.testing.simulation import LawError
from asyncache.testing.simulation._laws import Laws

TOLD = [Stage("request", word) for word in ("restored", "computing")]

# A run that ends half-way leaves what had not begun, and the collector finds it later.
quietly = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")


@pytest.fixture(scope="module", autouse=True)
def collected():
    yield
    gc.collect()


@pytest.fixture
def planted(monkeypatch):
    """Let it be against the law that two requests have been told of their hits."""
    check = Laws.check

    def planted(self):
        stages = self._replica.look.stages()
        found = [seq for seq, stage in stages.items() if stage in TOLD]
        if len(found) > 1:
            raise LawError(f"planted: {found} are\ntold")
        return check(self)

    monkeypatch.setattr(Laws, "check", planted)
