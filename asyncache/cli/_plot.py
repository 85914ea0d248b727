"""The plot: hit ratio against the pages of the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from asyncache.cli._errors import InputError
from asyncache.cli._outcome import Outcome
from asyncache.cli._traces import Trace


def plot(path: Path, trace: Trace, heading: str, outcomes: Sequence[Outcome]) -> None:
    """Draw one point a capacity, and how far no capacity can go.

    Raises:
        InputError: If the file cannot be written.
    """
    ordered = sorted(outcomes, key=lambda outcome: outcome.num_pages)
    sizes = [outcome.num_pages for outcome in ordered]
    # Not pyplot, which would keep the figure and ask for a display.
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(sizes, [o.token_ratio for o in ordered], marker="o", label="tokens")
    axes.plot(sizes, [o.page_ratio for o in ordered], marker="s", label="pages")
    axes.axvline(
        trace.num_distinct, color="grey", linestyle="--", label="distinct pages"
    )
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"device pages of {trace.page_tokens} tokens")
    axes.set_ylabel("hit ratio")
    axes.set_title(f"{Path(trace.name).name}: {heading}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise InputError(f"--plot {path}: {error}") from error
