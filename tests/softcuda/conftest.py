"""A driver that each test finds as new, and leaves with nothing in it."""

from __future__ import annotations

import pytest

from tests.softcuda import load, why_not
from tests.softcuda.calls import make_current


@pytest.fixture
def softcuda():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    softcuda = load()
    if softcuda is None:
        pytest.skip("a real driver is loaded")
    yield softcuda
    softcuda.reset()


@pytest.fixture
def context(softcuda):
    """The primary context of device 0, current to this thread."""
    return make_current(0)
