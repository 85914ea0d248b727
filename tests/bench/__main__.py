"""``make bench``: a table of numbers and targets, and JSON as the last line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from tests.bench import (
    bookkeeping,
    cuda,
    decode,
    file_peers,
    files,
    hashing,
    mooncake,
    objects,
    pressure,
    ranks,
    segments,
    servers,
    stall,
    steps,
    storm,
    tree,
)
from tests.bench.measure import NUM_QUICK_ROUNDS, NUM_ROUNDS, Row

BENCHMARKS = {
    "tree": tree.run,
    "hashing": hashing.run,
    "bookkeeping": bookkeeping.run,
    "steps": steps.run,
    "files": files.run,
    "servers": servers.run,
    "objects": objects.run,
    "mooncake": mooncake.run,
    "segments": segments.run,
    "filepeers": file_peers.run,
    "pressure": pressure.run,
    "ranks": ranks.run,
    "cuda": cuda.run,
    "stall": stall.run,
    "storm": storm.run,
    "decode": decode.run,
}


def main() -> None:
    """Run the benchmarks that were asked for."""
    arguments = _parse()
    torch.set_num_threads(1)
    names = arguments.only or list(BENCHMARKS)
    num_rounds = NUM_QUICK_ROUNDS if arguments.quick else NUM_ROUNDS
    rows: list[Row] = []
    for place, name in enumerate(names, 1):
        start = time.monotonic()
        print(f"[{place}/{len(names)}] {name} ...", file=sys.stderr, flush=True)
        rows += BENCHMARKS[name](num_rounds)
        taken_s = time.monotonic() - start
        print(f"[{place}/{len(names)}] {name}: {taken_s:.1f} s", file=sys.stderr)
    print("\n".join(_table(rows)))
    _write_json(rows, arguments.json)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the JSON to a file")
    parser.add_argument(
        "--only", action="append", choices=BENCHMARKS, help="may be given several times"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds")
    return parser.parse_args()


def _table(rows: Iterable[Row]) -> list[str]:
    lines = [("", "ours", "", "baseline", "ratio", "target", "", "against")]
    lines += [_line(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = {0, 2, 6, 7}
    return [
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _line(row: Row) -> tuple[str, ...]:
    sign = ">=" if row.at_least else "<="
    return (
        row.name,
        _number(row.ours),
        row.unit,
        "" if row.baseline is None else _number(row.baseline),
        "" if row.ratio is None else f"{row.ratio:.2f}x",
        "" if row.bound is None else f"{sign} {row.bound:.3g}",
        row.verdict,
        row.against,
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def _write_json(rows: Iterable[Row], path: Path | None) -> None:
    found = [asdict(row) | {"ratio": row.ratio, "verdict": row.verdict} for row in rows]
    text = json.dumps({"benchmarks": found})
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
