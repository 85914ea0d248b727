"""What a person gave and cannot be used."""

from __future__ import annotations


class InputError(Exception):
    """Says in one line what was wrong with the input, and where."""
