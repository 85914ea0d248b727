"""What is said of namespaces, by what page hashes tell of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from asyncache.core import Namespace, namespace_tag

_Value = TypeVar("_Value")


def by_tag(values: Mapping[Namespace, _Value]) -> dict[bytes, _Value]:
    """Return values by the tag of their namespace.

    Raises:
        TypeError: If a namespace is no such thing.
        ValueError: If two have one tag: it happens once in billions, and one of them
            has to be called otherwise then.
    """
    found: dict[bytes, _Value] = {}
    names: dict[bytes, Namespace] = {}
    for namespace, value in values.items():
        tag = namespace_tag(namespace)
        if tag in found:
            raise ValueError(
                f"{namespace!r} and {names[tag]!r} have one tag: rename one"
            )
        found[tag], names[tag] = value, namespace
    return found
