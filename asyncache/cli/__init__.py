"""``python -m asyncache``: commands for people; each is a thin user of the library."""

from __future__ import annotations

from asyncache.cli._main import main

__all__ = ["main"]
