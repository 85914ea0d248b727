"""The coverage of a simulation: which mishap befell what, and which never did.

A pair that cannot be is a dot, one that could and was never seen a 0, which is a hole
in the workload; what was seen against the rule is a mistake in the rule, or in the
simulator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from asyncache.core import STAGES, Stage
from asyncache.testing.simulation import (
    CLIENT,
    DEVICE,
    RANK,
    STORE,
    Mishap,
    can_befall,
)

Seen = Counter[tuple[Stage, Mishap]]
OF_CLIENTS = (*CLIENT, Mishap.DEADLINE)
GROUPS: Mapping[str, Sequence[Mishap]] = {
    "store": STORE,
    "device": DEVICE,
    "client": OF_CLIENTS,
    "operator": [m for m in Mishap if m not in {*STORE, *DEVICE, *OF_CLIENTS, *RANK}],
    "rank": RANK,
}
"""Mishaps by who has them."""
# The store has as many as all others together, but for those of several ranks.
_PARTS = (("store",), ("device", "client", "operator"), ("rank",))


def table(seen: Seen, num_ranks: int = 1) -> str:
    """Return all that was seen with so many ranks, and below what was not."""
    possible = [(s, m) for s in STAGES for m in Mishap if can_befall(s, m, num_ranks)]
    unseen = [pair for pair in possible if not seen[pair]]
    wrong = [pair for pair in seen if pair not in possible]
    parts = _PARTS if num_ranks > 1 else _PARTS[:-1]
    blocks = ["\n".join(_block(seen, names)) for names in parts]
    blocks.append(
        "\n".join(_listed(f"never seen: {len(unseen)} of {len(possible)}", unseen))
    )
    if wrong:
        blocks.append("\n".join(_listed(f"seen, and cannot be: {len(wrong)}", wrong)))
    return "\n\n".join(blocks)


def _listed(title: str, pairs: Collection[tuple[Stage, Mishap]]) -> list[str]:
    lines = [title]
    for stage in STAGES:
        mishaps = [mishap.value for at, mishap in pairs if at == stage]
        if mishaps:
            lines.append(f"  {stage} x {', '.join(mishaps)}")
    return lines


def _block(seen: Seen, names: Sequence[str]) -> list[str]:
    groups = [GROUPS[name] for name in names]
    columns = [[m.name.lower() for group in groups for m in group]]
    columns += [
        [_cell(seen, stage, m) for group in groups for m in group] for stage in STAGES
    ]
    widths = [max(map(len, column)) for column in zip(*columns, strict=True)]
    heading = ""
    for name, group in zip(names, groups, strict=True):
        taken, widths_left = widths[: len(group)], widths[len(group) :]
        heading += f"  {name:<{sum(taken) + 2 * len(taken) - 2}}"
        widths = [*widths_left, *taken]
    margin = max(len(str(stage)) for stage in STAGES)
    lines = [f"{'':{margin}}{heading.rstrip()}"]
    for label, cells in zip(["", *map(str, STAGES)], columns, strict=True):
        line = "".join(f"  {c:>{w}}" for c, w in zip(cells, widths, strict=True))
        lines.append(f"{label:{margin}}{line}")
    return lines


def _cell(seen: Seen, stage: Stage, mishap: Mishap) -> str:
    count = seen[stage, mishap]
    is_possible = mishap in RANK or can_befall(stage, mishap)
    return compact(count) if count or is_possible else "·"


def compact(count: int) -> str:
    """Return a count in four characters at most, up to a billion."""
    for size, unit in ((1_000_000, "M"), (1000, "k")):
        if count >= size:
            return f"{count // size}{unit}"
    return str(count)
