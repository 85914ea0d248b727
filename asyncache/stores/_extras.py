"""Packages that come with an extra, and are imported when first used."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from asyncache.core import StoreError


def load_extra(module: str, *, extra: str, user: str) -> ModuleType:
    """Return a module that an extra of ours brings.

    Raises:
        StoreError: If it is not installed; names the extra.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise StoreError(
            f"{user} needs the extra {extra!r}: pip install 'asyncache[{extra}]'"
        ) from error
