"""What an engine still keeps of requests, loads and forwards: at rest, nothing."""

from __future__ import annotations

from typing import Any

from asyncache.engine import BlockingCache, KVCache


def leftovers(cache: KVCache | BlockingCache) -> dict[str, object]:
    """Return what an open cache keeps beside its pages, by what it is kept for.

    Empty once no request is open, no forward runs and nothing moves: what is left then
    was kept for nobody. Pages are told by ``cache.statistics()``.

    Args:
        cache: One that is or was open; nothing of it is changed.
    """
    runtime: Any = cache._runtime  # noqa: SLF001 - a look at what no embedder needs
    kept: dict[str, object] = {
        "clocks of restores": runtime._deadlines,  # noqa: SLF001 - as above
        "late lookups": runtime._late,  # noqa: SLF001 - as above
        "restores given up": runtime._given_up,  # noqa: SLF001 - as above
        "drains": runtime._resting,  # noqa: SLF001 - as above
        "gates": runtime.board._loads,  # noqa: SLF001 - as above
        "waiters at gates": runtime.board._waiters,  # noqa: SLF001 - as above
        "votes": runtime.driver._votes.said(),  # noqa: SLF001 - as above
        "forwards": runtime.driver._open_brackets,  # noqa: SLF001 - as above
    }
    if not runtime.is_alone:
        kept["scopes"] = dict(runtime.lobby._waiting)  # noqa: SLF001 - as above
        kept["scopes to dismiss"] = runtime.lobby._left  # noqa: SLF001 - as above
    if runtime.transfers is not None:
        kept["claims"] = runtime.transfers._vouched  # noqa: SLF001 - as above
        kept["transfers"] = runtime.transfers._scopes  # noqa: SLF001 - as above
        kept["timers"] = runtime.transfers._timers  # noqa: SLF001 - as above
    return {name: what for name, what in kept.items() if what}
