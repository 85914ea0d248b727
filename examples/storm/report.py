"""What a person reads, and sees, of a storm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from asyncache import Statistics
from asyncache.core import PoolStatistics
from examples.storm.inside import Owner
from examples.storm.lag import Lag, quantile
from examples.storm.storm import State, Tally

# From the ground up: what is cached, what is used, what is free.
_COLORS = {
    "tree": "#4c956c",
    "request": "#2c6fbb",
    "transit": "#f2a541",
    "quarantine": "#d1495b",
    "free": "#ced4da",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The pages at one moment, ``at_s`` after the start."""

    at_s: float
    pages: PoolStatistics
    num_requests: int
    num_waiting: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """All that is known of a storm once it is over.

    Attributes:
        failures: What must not be; empty if all is well.
    """

    seconds: float
    tally: Tally
    statistics: Statistics
    read_bytes: int
    wrong_bytes: int
    samples: list[Sample]
    lag: Lag
    failures: list[str] = field(default_factory=list)


def requests_table(outcome: Outcome) -> Table:
    """Return what became of the requests and of their pages."""
    tally, counters = outcome.tally, outcome.statistics.counters
    table = Table(title="Requests", box=SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("served", f"{tally.served:,}")
    for state in State:
        table.add_row(f"aborted while {state.value}", f"{tally.aborted[state]:,}")
    table.add_row(
        "  by a scope, by task.cancel()", f"{tally.by_scope}, {tally.by_task}"
    )
    table.add_row("refused: larger than the pool", f"{tally.refused:,}")
    table.add_row("a second", f"{tally.num_ended / outcome.seconds:,.0f}")
    table.add_section()
    asked = max(1, counters.lookup_tokens)
    table.add_row("tokens of prompts", f"{counters.lookup_tokens:,}")
    table.add_row("found on the device", f"{counters.device_tokens / asked:.0%}")
    table.add_row("found in the store", f"{counters.store_tokens / asked:.0%}")
    table.add_row("hits that were cut", f"{counters.shortened:,}")
    table.add_row("suspended: out of pages", f"{tally.out_of_pages:,}")
    table.add_section()
    most = max((sample.pages.quarantine for sample in outcome.samples), default=0)
    table.add_row("pages loaded", f"{counters.loaded_pages:,}")
    table.add_row("pages stored", f"{counters.stored_pages:,}")
    table.add_row("pages evicted", f"{counters.evicted_pages:,}")
    table.add_row("  of them unsaved", f"{counters.evicted_unsaved_pages:,}")
    table.add_row("most pages in quarantine", f"{most:,}")
    table.add_section()
    table.add_row("bytes read and compared", f"{outcome.read_bytes:,}")
    table.add_row("wrong bytes", f"{outcome.wrong_bytes:,}")
    table.add_row("pages leaked", f"{outcome.statistics.leaked_pages:,}")
    return table


def lag_table(lag: Lag) -> Table:
    """Return how late the loop was, and how long whose callbacks were, in ms."""
    table = Table(title="Event loop, ms", box=SIMPLE)
    table.add_column("", no_wrap=True)
    for header in ("p50", "p99", "max", "sum"):
        table.add_column(header, justify="right")
    _, lates, inside, worked = zip(*lag.ticks, strict=True)
    table.add_row(f"lag of {len(lag.ticks):,} ticks", *_spread(lates), "")
    table.add_row("  of it inside the cache", *_spread(inside), "")
    table.add_row("  of that, not kept from working", *_spread(worked), "")
    table.add_section()
    for owner in Owner:
        runs = lag.inside.runs_s[owner]
        table.add_row(f"callback: {owner.value}", *_spread(runs), _ms(sum(runs)))
    stops = lag.collections_s
    table.add_row("garbage collection", *_spread(stops), _ms(sum(stops)))
    return table


def _spread(values_s: Sequence[float]) -> tuple[str, str, str]:
    return (
        _ms(quantile(values_s, 0.5)),
        _ms(quantile(values_s, 0.99)),
        _ms(max(values_s, default=0.0)),
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def plot(path: Path, outcome: Outcome) -> None:
    """Draw pages by state, requests, and the loop's lag over time.

    Raises:
        OSError: If the file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import

    samples = outcome.samples
    times = [sample.at_s for sample in samples]
    # Not pyplot, which would keep the figure and ask for a display.
    figure = Figure(figsize=(10, 8), layout="constrained")
    pages, requests, lag = figure.subplots(3, sharex=True, height_ratios=(3, 1, 1))
    pages.stackplot(
        times,
        [[getattr(sample.pages, name) for sample in samples] for name in _COLORS],
        labels=list(_COLORS),
        colors=list(_COLORS.values()),
        step="post",
    )
    pages.set_ylabel("pages")
    pages.margins(0)
    pages.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
    tally = outcome.tally
    pages.set_title(
        f"{tally.num_ended:,} requests, {tally.aborted.total():,} of them aborted:"
        f" {outcome.statistics.leaked_pages} pages leaked,"
        f" {outcome.wrong_bytes} wrong bytes"
    )
    requests.plot(times, [s.num_requests for s in samples], label="open")
    requests.plot(times, [s.num_waiting for s in samples], label="waiting for room")
    requests.set_ylabel("requests")
    requests.set_ylim(bottom=0)
    requests.legend(loc="upper left", bbox_to_anchor=(1, 1))
    ticks = outcome.lag.ticks
    for name, of, color in (("lag", 1, "#adb5bd"), ("inside the cache", 2, "#d1495b")):
        values_ms = [1e3 * tick[of] for tick in ticks]
        label = f"{name}\np99: {quantile(values_ms, 0.99):.1f} ms"
        times = [tick.at_s for tick in ticks]
        lag.plot(times, values_ms, ".", ms=2, color=color, label=label)
    lag.legend(loc="upper left", bbox_to_anchor=(1, 1), markerscale=4)
    lag.set_yscale("log")
    lag.set_ylim(bottom=0.03)
    lag.set_ylabel("loop lag, ms")
    lag.set_xlabel("seconds")
    figure.savefig(path, dpi=110)
