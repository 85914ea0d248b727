"""A prompt as a request is opened with: packed, checked, fit to be sent to ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from asyncache.core import MAX_TOKEN, TOKEN_BYTES, Namespace
from asyncache.engine._tokens import TokenSource, check_count, pack


class ScopeId(NamedTuple):
    """Which handler's scope a prompt is of.

    Args:
        cache: Which group of caches has it, as they agreed when they were opened.
        rank: Which rank of it.
        number: Which scope of that rank.
    """

    cache: int
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
        is_prefetch: Whether nobody waits for what it has loaded.
    """

    tokens: bytes
    namespace: Namespace = None
    num_reserve_tokens: int = 0
    priority: int = 0
    scope: ScopeId | None = None
    is_prefetch: bool = False


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


def check_prompt(prompt: object, *, cache: int, num_ranks: int) -> None:
    """Raise unless a prompt is one that a rank of these caches made.

    It comes from other processes, and every rank has to find the same wrong with it.

    Raises:
        TypeError: If it is no prompt, or something in it is of another kind.
        ValueError: If something in it is out of range, or it is of other caches.
    """
    if not isinstance(prompt, Prompt):
        raise TypeError(f"not a prompt, but {type(prompt).__name__}: {prompt!r}")
    _check_tokens(prompt.tokens)
    check_count("num_reserve_tokens", prompt.num_reserve_tokens)
    check_count("priority", prompt.priority, least=-MAX_TOKEN)
    if not isinstance(prompt.is_prefetch, bool):
        raise TypeError(f"is_prefetch is a bool, not {prompt.is_prefetch!r}")
    if prompt.scope is not None:
        _check_scope(prompt.scope, cache=cache, num_ranks=num_ranks)


def _check_tokens(tokens: object) -> None:
    if not isinstance(tokens, bytes):
        kind = type(tokens).__name__
        raise TypeError(f"a prompt's tokens are packed bytes, not {kind}")
    if len(tokens) % TOKEN_BYTES:
        raise ValueError(
            f"a prompt's tokens have {TOKEN_BYTES} bytes each, not {len(tokens)} in all"
        )
    pack(memoryview(tokens).cast("i"))


def _check_scope(scope: object, *, cache: int, num_ranks: int) -> None:
    if not isinstance(scope, ScopeId):
        raise TypeError(f"a scope's name is a ScopeId, not {scope!r}")
    check_count("a scope's rank", scope.rank, most=num_ranks - 1)
    check_count("a scope's number", scope.number)
    if scope.cache != cache:
        raise ValueError(f"a prompt of other caches: {scope}, not of {cache}")
