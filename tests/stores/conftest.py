"""What the tests of stores share: a server that takes its time to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stores import object_server as seaweed


@pytest.fixture(scope="session")
def object_server() -> Iterator[seaweed.Server]:
    with seaweed.running() as started:
        yield started
