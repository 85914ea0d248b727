"""``replay``: what a trace of requests would have found in a cache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from asyncache.cli._core_run import replay_core
from asyncache.cli._errors import InputError
from asyncache.cli._outcome import POLICIES, Job, Outcome, draw_cancelled
from asyncache.cli._progress import progress
from asyncache.cli._report import as_json, as_text
from asyncache.cli._traces import Trace, read_trace
from asyncache.core import MAX_TOKEN, StoreError

if TYPE_CHECKING:
    from asyncache.stores import Store

N = TypeVar("N", int, float)

INFINITE = "inf"
FILES = "files:"
PLOTS = (".png", ".svg", ".pdf")
BROKEN = 1
"""The exit code of a replay that leaked, or hit wrong pages."""

_HELP = """\
Replay a trace of requests, one after the other, and print the share of their pages and
tokens that were in the cache. A hit is the leading run of a prompt's pages that are
resident; when a request is served all its pages are."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "replay", help="print the hit ratio of a trace", description=_HELP
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("trace", type=Path, help="a JSONL file, or a directory: Mooncake or text")
    add(
        "--page-tokens",
        type=_positive,
        metavar="N",
        help="tokens a page; Mooncake: 512 or a divisor of it (512); text: bytes (16)",
    )
    add(
        "--device-pages",
        type=_capacities,
        action="extend",
        metavar="N[,N...]",
        help="pages of the device, or inf: all distinct pages (inf); may be repeated",
    )
    add("--policy", choices=POLICIES, default="lru", help="which leaf is evicted (lru)")
    add(
        "--store",
        type=_store,
        default="none",
        metavar="none|memory|files:DIR",
        help="where pages go besides the device, through a whole cache (none)",
    )
    add(
        "--cancel-rate",
        type=_rate,
        default=0.0,
        metavar="P",
        help="share of the requests that are aborted half-way, and then not counted",
    )
    add("--seed", type=int, default=0, metavar="N", help="of --cancel-rate (0)")
    add("--json", action="store_true", help="print one JSON object, and nothing else")
    add("--plot", type=Path, metavar="FILE.png", help="draw hit ratio against capacity")


def run(options: argparse.Namespace) -> int:
    """Replay the trace at each capacity and print what was found."""
    named: list[str] = options.device_pages or [INFINITE]
    _check_together(options, named)
    trace = read_trace(options.trace, page_tokens=options.page_tokens)
    sizes = dict.fromkeys(_num_pages(name, trace) for name in named)
    outcomes = [_replay(options, trace, num_pages) for num_pages in sizes]
    heading = f"policy {options.policy}, store {options.store}"
    if options.json:
        sys.stdout.write(as_json(trace, _settings(options), outcomes))
    else:
        sys.stdout.write(as_text(trace, heading, outcomes))
    if options.plot is not None:
        from asyncache.cli._plot import plot  # noqa: PLC0415 - its extra is optional

        plot(options.plot, trace, heading, outcomes)
    return 0 if all(outcome.is_clean for outcome in outcomes) else BROKEN


def _check_together(options: argparse.Namespace, named: list[str]) -> None:
    """Refuse arguments that do not go together before anything is read."""
    num_sizes = len(set(named))
    if options.store.startswith(FILES) and num_sizes > 1:
        raise InputError(
            f"--store files: takes one --device-pages, not {num_sizes}: what the first"
            " replay stored, the second would find"
        )
    if options.plot is None:
        return
    if num_sizes == 1:
        raise InputError("--plot needs several --device-pages")
    if find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install 'asyncache[plot]'")
    if options.plot.suffix not in PLOTS:
        raise InputError(
            f"--plot {options.plot}: must end in one of {', '.join(PLOTS)}"
        )
    if not options.plot.parent.is_dir():
        raise InputError(f"--plot {options.plot}: no such directory")


def _settings(options: argparse.Namespace) -> dict[str, object]:
    names = ("policy", "store", "cancel_rate", "seed")
    return {name: getattr(options, name) for name in names}


def _replay(options: argparse.Namespace, trace: Trace, num_pages: int) -> Outcome:
    cancelled = draw_cancelled(trace, rate=options.cancel_rate, seed=options.seed)
    job = Job(
        trace=trace,
        num_pages=num_pages,
        policy=POLICIES[options.policy],
        cancelled=cancelled,
    )
    with progress(trace.prompts, f"{num_pages} pages") as prompts:
        if options.store == "none":
            return replay_core(job, prompts)
        # With a store comes torch, and seconds of importing it.
        from asyncache.cli._engine_run import replay_engine  # noqa: PLC0415

        try:
            return replay_engine(job, prompts, _store_at(options.store))
        except StoreError as error:
            raise InputError(f"--store {options.store}: {error}") from error


def _store_at(name: str) -> Store:
    from asyncache.stores import FileStore, MemoryStore  # noqa: PLC0415 - as above

    if name == "memory":
        return MemoryStore(sys.maxsize)
    return FileStore(name.removeprefix(FILES))


# Arguments.


def _num_pages(name: str, trace: Trace) -> int:
    return max(1, trace.num_distinct) if name == INFINITE else int(name)


def _positive(text: str) -> int:
    return _parse(text, int, lambda value: 1 <= value <= MAX_TOKEN, "an int from 1 on")


def _rate(text: str) -> float:
    return _parse(text, float, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def _capacities(text: str) -> list[str]:
    return [
        INFINITE if part == INFINITE else str(_positive(part))
        for part in map(str.strip, text.split(","))
    ]


def _store(text: str) -> str:
    if text in ("none", "memory") or (text.startswith(FILES) and text != FILES):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not none, memory or files:DIR")


def _parse(
    text: str, kind: Callable[[str], N], is_legal: Callable[[N], bool], wanted: str
) -> N:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_legal(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value
