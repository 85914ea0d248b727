"""Which leaf is evicted first: a policy is a sort key over unused leaves.

The smallest key goes first. Keys are made of what the replica knows, so that every
rank picks the same leaf: no clock, no chance.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncache.core._node import Node

Key = tuple[int, ...]
Policy = Callable[[Node], Key]

PROTECTED_HITS = 2
"""Uses after which ``slru`` keeps a leaf before all that were used less."""


def lru(node: Node) -> Key:
    """Evict what was used least recently."""
    return (node.used,)


def mru(node: Node) -> Key:
    """Evict what was used most recently."""
    return (-node.used,)


def lfu(node: Node) -> Key:
    """Evict what was used least often, and among those least recently."""
    return (node.hits, node.used)


def fifo(node: Node) -> Key:
    """Evict what came first."""
    return (node.created,)


def filo(node: Node) -> Key:
    """Evict what came last."""
    return (-node.created,)


def slru(node: Node) -> Key:
    """Evict what was used once before what was used again, each least recently."""
    return (int(node.hits >= PROTECTED_HITS), node.used)


def priority(node: Node) -> Key:
    """Evict what only requests of low priority used, and among those as ``lru``."""
    return (node.priority, node.used)


def saved_first(policy: Policy) -> Policy:
    """Return a policy that loses nothing while there is a leaf that is stored."""

    def key(node: Node) -> Key:
        return (int(not node.stored), *policy(node))

    return key
