"""One Mooncake Store for all tests that do not hurt it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.linkers.mooncake_server import (
    Master,
    bare_client,
    running_master,
    running_node,
)
from tests.linkers.worlds import MooncakeWorld


@pytest.fixture(scope="session")
def master() -> Iterator[Master]:
    with running_master() as started, running_node(started):
        yield started


@pytest.fixture(scope="session")
def client(master: Master) -> Iterator[Any]:
    with bare_client(master) as lent:
        yield lent


@pytest.fixture
def mooncake(client: Any) -> MooncakeWorld:
    return MooncakeWorld(client)
