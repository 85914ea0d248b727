"""``sim``: seeds of the simulator, many at once, or one in every detail."""

from __future__ import annotations

import argparse
import os

from asyncache.cli._errors import InputError

NUM_SEEDS = 1000
MOST_RANKS = 8
NOBODY = "none"

_HELP = """\
Play simulated runs of a cache in virtual time, in which stores, devices, clients and
operators do what they should not, and check after each step that all holds that must.
A run goes by its seed alone. A seed that fails is told on stdout and made smaller; the
command that is printed then plays it again."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "sim", help="look for seeds on which a law breaks", description=_HELP
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--check", action="store_true", help="play each seed twice, and compare"
    )
    parser.add_argument(
        "--ranks",
        type=_ranks,
        default=1,
        metavar="R",
        help=f"ranks of one model, each with a cache, up to {MOST_RANKS} (1)",
    )
    _add_many(parser.add_argument_group("many seeds"))
    _add_one(parser.add_argument_group("one seed"))


def _add_many(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--seeds", type=_positive, metavar="N", help=f"how many ({NUM_SEEDS})")
    add("--first", type=_whole, metavar="S", help="the first of them (0)")
    add("--jobs", type=_positive, metavar="J", help="processes (one a core)")
    add("--stop", action="store_true", help="end at the first that fails")
    add("--no-shrink", action="store_true", help="leave what fails as large as it is")


def _add_one(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--seed", type=_whole, metavar="S", help="play this one only, as it is")
    add("--trace", action="store_true", help="print all that happens")
    add(
        "--only",
        type=_numbers,
        action="extend",
        metavar="N[,N...]",
        help=f"leave out all other actors; {NOBODY}: all",
    )
    add(
        "--without",
        action="append",
        metavar="MISHAP[,...]",
        help="let this never go wrong, such as corrupt, or 'page corrupt'",
    )
    add(
        "--plain",
        action="append",
        metavar="SETTING[,...]",
        help="make this as simple as it can be, such as order, limits or policy",
    )


def run(options: argparse.Namespace) -> int:
    """Play what was asked for; return the exit code."""
    _check_together(options)
    # With the simulator comes torch, and seconds of importing it.
    if options.seed is not None:
        from asyncache.cli._sim_one import play_one  # noqa: PLC0415

        return play_one(
            options.seed,
            num_ranks=options.ranks,
            only=options.only,
            without=options.without or [],
            made_plain=options.plain or [],
            is_traced=options.trace,
            is_checked=options.check,
        )
    from asyncache.cli._sim_many import play_many  # noqa: PLC0415

    first = options.first or 0
    return play_many(
        range(first, first + (options.seeds or NUM_SEEDS)),
        num_ranks=options.ranks,
        jobs=options.jobs or len(os.sched_getaffinity(0)),
        is_checked=options.check,
        is_shrunk=not options.no_shrink,
        stops=options.stop,
    )


def _check_together(options: argparse.Namespace) -> None:
    """Refuse what is for many seeds beside --seed, and what is for one without it."""
    many = {
        "--seeds": options.seeds is not None,
        "--first": options.first is not None,
        "--jobs": options.jobs is not None,
        "--stop": options.stop,
        "--no-shrink": options.no_shrink,
    }
    one = {
        "--trace": options.trace,
        "--only": options.only is not None,
        "--without": options.without is not None,
        "--plain": options.plain is not None,
    }
    is_one = options.seed is not None
    for name in (
        name for name, is_given in (many if is_one else one).items() if is_given
    ):
        raise InputError(f"{name} {'does not go with' if is_one else 'needs'} --seed")


def _positive(text: str) -> int:
    return _int(text, 1)


def _ranks(text: str) -> int:
    if (number := _positive(text)) > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{number} ranks are more than {MOST_RANKS}")
    return number


def _whole(text: str) -> int:
    return _int(text, 0)


def _int(text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r} is not an int from {least} on")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [] if text == NOBODY else [_whole(part) for part in text.split(",")]
