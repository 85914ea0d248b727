"""The handshake: ranks open a cache only if all of them mean the same one.

Two minima of fixed length, whatever the ranks were given: gloo aborts the process when
shapes differ. The first is over a digest of each setting and its negative, and shows
which of them differs; the second is over the pages of each pool, of which a cache uses
what every rank has, and over a number that no other caches have.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from asyncache.core import PROTOCOL, VERSION, RankError
from asyncache.engine._barrier import reduce
from asyncache.ranks import Group


class Agreed(NamedTuple):
    """What ranks agreed on: pages of each pool, and what their caches are called."""

    num_pages: Sequence[int]
    name: int


async def shake_hands(
    group: Group,
    settings: Mapping[str, object],
    num_pages: Sequence[int],
    *,
    timeout_s: float,
) -> Agreed:
    """Return how many pages of each pool every rank has, and a name for these caches.

    Args:
        group: The ranks; each calls this at the same time.
        settings: What must be the same on each, by name; the names are.
        num_pages: Pages of each pool on this rank.
        timeout_s: Seconds to wait for the slowest rank.

    Raises:
        RankError: If a setting differs, or a rank is gone or silent.
    """
    facts = {
        "protocol": PROTOCOL,
        "version": VERSION,
        "number of ranks": group.num_ranks,
        **settings,
    }
    digests = [_digest(fact) for fact in facts.values()]
    vector = array("i", [sign * d for d in digests for sign in (1, -1)])
    await reduce(group, vector, timeout_s)
    pairs = zip(vector[::2], vector[1::2], strict=True)
    differ = [name for name, pair in zip(facts, pairs, strict=True) if sum(pair)]
    if differ:
        raise RankError(f"ranks differ in {', '.join(differ)}")
    least = array("i", [*num_pages, secrets.randbits(31)])
    await reduce(group, least, timeout_s)
    return Agreed(least[:-1], least[-1])


def _digest(fact: object) -> int:
    """Return 31 bits of a value's text, which is the same in every process."""
    digest = hashlib.sha256(repr(fact).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
