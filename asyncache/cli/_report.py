"""What a replay prints: a table for a person, one JSON object for a program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from asyncache.cli._outcome import Outcome
from asyncache.cli._traces import Trace


def as_text(trace: Trace, heading: str, outcomes: Sequence[Outcome]) -> str:
    """Return a table, a line a capacity; hit counts are plain, to be searched for."""
    first = outcomes[0].tally
    what = f"{trace.num_distinct} distinct pages of {trace.page_tokens} tokens"
    lines = [
        f"{trace.name}: {trace.format}, {len(trace.prompts)} requests, {what}",
        f"{heading}, {first.requests} served, {first.cancelled} cancelled",
        "",
    ]
    lines += _table([_row(trace, outcome) for outcome in outcomes])
    for outcome in outcomes:
        lines += _warnings(outcome)
    return "\n".join(lines) + "\n"


def _row(trace: Trace, outcome: Outcome) -> dict[str, str]:
    tally = outcome.tally
    is_infinite = outcome.num_pages >= trace.num_distinct
    row = {
        "device pages": f"{'inf ' * is_infinite}{outcome.num_pages}",
        "hit pages": f"{tally.hit_pages}/{tally.pages} = {outcome.page_ratio:.6f}",
        "hit tokens": f"{tally.hit_tokens}/{tally.tokens} = {outcome.token_ratio:.6f}",
    }
    if outcome.stored or tally.store_hit_pages:
        row["from device"] = str(tally.hit_pages - tally.store_hit_pages)
        row["from store"] = str(tally.store_hit_pages)
        row["stored"] = str(outcome.stored)
    row["fully hit"] = str(tally.fully_hit)
    row["evicted"] = str(outcome.evicted)
    row["resident"] = str(outcome.resident)
    row["leaked"] = str(outcome.leaked)
    row["seconds"] = f"{outcome.seconds:.2f}"
    return row


def _table(rows: list[dict[str, str]]) -> list[str]:
    names = max(rows, key=len)
    cells = [list(names), *([row.get(name, "-") for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]


def _warnings(outcome: Outcome) -> list[str]:
    found = {
        "requests are longer than the device: only their first pages were served": (
            outcome.tally.longer_than_device
        ),
        "transfers failed": outcome.failures,
        "pages leaked": outcome.leaked,
        "requests or transfers were left open": outcome.left_open,
        "hit pages held other bytes than theirs": outcome.wrong_pages,
    }
    return [
        f"device pages {outcome.num_pages}: {count} {what}"
        for what, count in found.items()
        if count
    ]


def as_json(
    trace: Trace, settings: dict[str, object], outcomes: Sequence[Outcome]
) -> str:
    """Return one JSON object."""
    report = {
        "trace": trace.name,
        "format": trace.format,
        "page_tokens": trace.page_tokens,
        "requests": len(trace.prompts),
        "distinct_pages": trace.num_distinct,
        **settings,
        "runs": [_run(trace, outcome) for outcome in outcomes],
    }
    return json.dumps(report, allow_nan=False) + "\n"


def _run(trace: Trace, outcome: Outcome) -> dict[str, object]:
    run = asdict(outcome)
    run |= run.pop("tally")
    return {
        "device_pages": run.pop("num_pages"),
        "is_infinite": outcome.num_pages >= trace.num_distinct,
        "page_ratio": outcome.page_ratio,
        "token_ratio": outcome.token_ratio,
        **run,
    }
