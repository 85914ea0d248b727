"""What the sections find: lines of one table, and of one JSON file."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from tests.bench.gpus import Gpu

MIN_ROUNDS, MAX_ROUNDS = 3, 25
COLUMNS = ("median us", "p99 us", "GB/s", "ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the table.

    Args:
        what: What was measured, or checked.
        median_us: Microseconds, the median.
        p99_us: What 99 of 100 stay below.
        gb_per_s: Gigabytes (of 10^9 bytes) a second.
        ratio: Of the line's main number to what ``note`` names.
        is_right: Whether a check passed; None where nothing was checked.
        note: What is compared with, or why something was not run.
    """

    what: str
    median_us: float | None = None
    p99_us: float | None = None
    gb_per_s: float | None = None
    ratio: float | None = None
    is_right: bool | None = None
    note: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The line as the table shows it."""
        numbers = (self.median_us, self.p99_us, self.gb_per_s, self.ratio)
        verdict = {None: "", True: "right", False: "WRONG"}[self.is_right]
        return (self.what, *map(_number, numbers), verdict, self.note)


@dataclass(slots=True)
class Run:
    """What a section is given.

    Attributes:
        gpu: What it runs on.
        until: When it should end, by ``time.monotonic()``.
    """

    gpu: Gpu
    until: float

    @property
    def is_small(self) -> bool:
        """Whether only the script is to be proved, on the software driver."""
        return self.gpu.soft is not None

    def share(self, parts: int) -> float:
        """Return the seconds that one of so many parts may still take."""
        return max(0.0, self.until - time.monotonic()) / parts


async def in_turns(
    works: Sequence[Callable[[], Awaitable[float]]], budget_s: float
) -> list[list[float]]:
    """Run works in turn until the time is over; return what each of them returned."""
    for work in works:
        await work()  # warm up
    until, rounds = time.monotonic() + budget_s, []
    while len(rounds) < MIN_ROUNDS or (
        len(rounds) < MAX_ROUNDS and time.monotonic() < until
    ):
        rounds.append([await work() for work in works])
    return [list(found) for found in zip(*rounds, strict=True)]


def table(sections: Iterable[tuple[str, Sequence[Line]]]) -> str:
    """Return the table: a heading a section, and columns of one width."""
    rows: list[tuple[str, ...]] = [("", *COLUMNS, "", "")]
    for name, lines in sections:
        rows += [(f"{name}:", *[""] * (len(COLUMNS) + 2))]
        rows += [(f"  {line.cells[0]}", *line.cells[1:]) for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 1 <= place <= len(COLUMNS) else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
