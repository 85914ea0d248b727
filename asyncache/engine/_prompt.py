"""A prompt as a request is opened with: packed, checked, fit to be sent to ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from asyncache.core import MAX_TOKEN, Namespace
from asyncache.engine._tokens import TokenSource, check_count, pack


class ScopeId(NamedTuple):
    """Which handler's scope a prompt is of: the rank that has it, and its number."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request is opened with, all of it checked; made by ``cache.prompt``.

    A value that can be pickled: the loop of several ranks sends those that are waiting
    on one of them to all.

    Args:
        tokens: Packed int32, little-endian.
        namespace: What must not share pages with others.
        num_reserve_tokens: Tokens beyond these whose pages are reserved with them.
        priority: What the ``priority`` policy keeps its pages by.
        scope: Whose it is; None where every rank has a scope of its own for it.
    """

    tokens: bytes
    namespace: Namespace = None
    num_reserve_tokens: int = 0
    priority: int = 0
    scope: ScopeId | None = None


def make_prompt(
    tokens: TokenSource, namespace: Namespace, reserve_tokens: int, priority: int
) -> Prompt:
    """Return a prompt of no scope yet.

    Raises:
        TypeError, ValueError: As for the ``request`` of the cache.
    """
    num_reserve_tokens = check_count("reserve_tokens", reserve_tokens)
    packed = pack(tokens)
    level = check_count("priority", priority, least=-MAX_TOKEN)
    return Prompt(packed, namespace, num_reserve_tokens, level)
