"""A folder with the pages of a prompt, made once and copied for each test."""

from __future__ import annotations

import shutil

import anyio
import pytest

from tests.serve.scene import MAX_TOKENS, PROMPT, expected, room


@pytest.fixture(scope="session")
def stored_once(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stored")

    async def store() -> None:
        async with room(directory) as here, here.service.running():
            assert await here.answer() == expected(PROMPT, MAX_TOKENS)

    anyio.run(store)
    return directory


@pytest.fixture
def stored(stored_once, tmp_path):
    """Return a folder with the pages of the prompt."""
    return shutil.copytree(stored_once, tmp_path / "stored")
