"""What a simulation finds."""

from __future__ import annotations

from asyncache.core import AsyncacheError


class StuckError(AsyncacheError):
    """The loop's main task has not ended, and nothing that it waits for can come."""


class BusyError(AsyncacheError):
    """Something polls: turn after turn, and no timer is ever waited for."""


class LawError(AssertionError):
    """Something that must hold does not."""
