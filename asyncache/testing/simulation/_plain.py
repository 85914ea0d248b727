"""What of a case can be made plain, and what plain is: the fewest words to explain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from asyncache.core import lru
from asyncache.engine import Limits, WriteThrough
from asyncache.testing.simulation._case import Case


class Setting(Enum):
    """One choice of a case; the value is its name on a command line."""

    ORDER = "order"
    LAUNCH = "launch"
    LAYERS = "layers"
    BATCHES = "batches"
    ADDRESSABLE = "addressable"
    POOLS = "pools"
    PAGES = "pages"
    SHELF = "shelf"
    STORED = "stored"
    TIER = "tier"
    MODELS = "models"
    LIMITS = "limits"
    POLICY = "policy"
    WRITES = "writes"
    ANSWERS = "answers"
    FORWARDS = "forwards"
    # Of several ranks.
    BARRIER = "barrier"
    ABORTS = "aborts"
    WIRE = "wire"
    OVERLAP = "overlap"


_LIMITS = Limits(
    requests=32,
    slots=16,
    offloads=8,
    mask_ints=64,
    restore_s=0.2,
    gate_s=0.3,
    drain_s=2.0,
    close_s=1.0,
    retry_s=0.005,
    breaker_s=0.02,
)
"""Room for everyone, and waits as short as those that are drawn."""
_NUM_PAGES = 24
_PLAIN: Mapping[Setting, Mapping[str, Any]] = {
    Setting.ORDER: {"is_shuffled": False},
    Setting.LAUNCH: {"launch": "eager"},
    Setting.LAYERS: {"layer_groups": 1},
    Setting.BATCHES: {"batch_pages": 64, "num_batches": 4},
    Setting.ADDRESSABLE: {"host_addressable": True},
    Setting.SHELF: {"shelf_pages": 1000},
    Setting.STORED: {"stored": 0.0},
    Setting.TIER: {"tier_pages": 0},
    Setting.MODELS: {"num_models": 1},
    Setting.LIMITS: {"limits": _LIMITS},
    Setting.POLICY: {"policy": lru},
    Setting.WRITES: {"writes": WriteThrough()},
    Setting.ANSWERS: {"answer_s": 0.0, "linger_s": 0.0},
    Setting.FORWARDS: {"forward_s": 0.0},
}

_PLAIN_TEAM: Mapping[Setting, Mapping[str, Any]] = {
    Setting.BARRIER: {"barrier": "sync"},
    Setting.ABORTS: {"aborts": "vote"},
    Setting.WIRE: {"net_s": 0.0, "post_s": 0.0, "skew_s": 0.0},
    Setting.OVERLAP: {"overlap": 0},
}


def plain(case: Case, setting: Setting) -> Case:
    """Return the case with one setting at its plainest; the same if it is already."""
    if setting in _PLAIN_TEAM:
        return _plain_team(case, **_PLAIN_TEAM[setting])
    match setting:
        case Setting.POOLS:
            first = case.layout.pools[0]
            layout = replace(case.layout, pools=(first,))
            num_pages = {first.name: case.num_pages[first.name]}
            return replace(case, layout=layout, num_pages=num_pages)
        case Setting.PAGES:
            case = replace(case, num_pages=dict.fromkeys(case.num_pages, _NUM_PAGES))
            return _plain_team(case, fewer_pages=(0,) * case.num_ranks)
        case Setting.LIMITS if case.team is not None:
            # As long as ranks may be apart.
            mine = case.limits
            limits = replace(_LIMITS, barrier_s=mine.barrier_s, step_s=mine.step_s)
            return replace(case, limits=limits)
        case _:
            return replace(case, **_PLAIN[setting])


def _plain_team(case: Case, **changes: Any) -> Case:  # noqa: ANN401 - of any setting
    if case.team is None:
        return case
    return replace(case, team=replace(case.team, **changes))
