"""``store``: look after the pages that are in a directory, or on a server."""

from __future__ import annotations

import argparse
import re

from asyncache.cli._errors import InputError
from asyncache.core import PageSpace

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"([0-9]{1,18})([KMGT]?)")

_HELP = """\
Look after a store, also while engines use it. PLACE is the directory of a FileStore or
a SegmentStore, or a URL: redis://, rediss://, unix://, or an object store's. Nothing is
changed but what the command is there to change, and pages that are found corrupt: the
store removes them."""
_PLACE_HELP = "a store's directory or URL"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command, its own commands, and their arguments."""
    parser = commands.add_parser(
        "store", help="list, check, tidy up and carry stored pages", description=_HELP
    )
    actions = parser.add_subparsers(metavar="COMMAND", required=True, dest="action")
    ls = _add(actions, "ls", "print the hash, space and bytes of each page")
    ls.add_argument("--limit", type=_whole, metavar="N", help="print no more pages")
    _add(actions, "stat", "count pages by space, and say how full it is")
    _add(actions, "verify", "read every page; 1 if one was corrupt")
    _add(actions, "gc", "give back what dead writers left")
    export = _add(actions, "export", "copy all pages into a tar file")
    export.add_argument("file", metavar="FILE", help="the tar file; -: stdout")
    add = actions.add_parser(
        "import",
        help="put the pages of a tar file",
        description="Where there is no room, a SegmentStore drops what was used"
        " longest ago for what comes, and other stores refuse it.",
    ).add_argument
    add("file", metavar="FILE", help="a tar file of page files; -: stdin")
    add("place", metavar="PLACE", help=_PLACE_HELP)
    add("--create", choices=("files", "segments"), help="make PLACE, a directory")
    add("--max-bytes", type=_size, metavar="N[KMGT]", help="of --create segments")
    add("--segment-bytes", type=_size, metavar="N[KMGT]", help="the same (256M)")
    for action in actions.choices.values():
        action.set_defaults(run=run)
        action.add_argument(
            "--prefix", metavar="P", help="of all keys on a server or in a bucket"
        )
        action.add_argument("--json", action="store_true", help="print JSON only")


def _add(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, does: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=does)
    parser.add_argument("place", metavar="PLACE", help=_PLACE_HELP)
    if name not in {"gc", "stat"}:
        parser.add_argument(
            "--space", type=_space, metavar="S", help="only pages of this space"
        )
    return parser


def run(options: argparse.Namespace) -> int:
    """Do what was asked for; return the exit code."""
    _check_together(options)
    # With the stores comes anyio, and what else they are made of.
    from asyncache.cli._store_commands import collect, ls, stat, verify  # noqa: PLC0415
    from asyncache.cli._store_export import export_pages  # noqa: PLC0415
    from asyncache.cli._store_import import import_pages  # noqa: PLC0415
    from asyncache.cli._store_place import run_at  # noqa: PLC0415

    commands = {
        "ls": ls,
        "stat": stat,
        "verify": verify,
        "gc": collect,
        "export": export_pages,
        "import": import_pages,
    }
    return run_at(options, commands[options.action])


def _check_together(options: argparse.Namespace) -> None:
    """Refuse arguments that do not go together before anything is opened."""
    if options.action == "export" and options.file == "-" and options.json:
        raise InputError("--json and FILE - do not go together: both are for stdout")
    if options.action == "import":
        if options.create == "segments" and options.max_bytes is None:
            raise InputError("--create segments needs --max-bytes")
        for name in ("max_bytes", "segment_bytes"):
            if options.create != "segments" and vars(options)[name] is not None:
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"{option} needs --create segments")


# Arguments.


def _space(text: str) -> PageSpace:
    try:
        return PageSpace.from_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):  # noqa: PLR2004
        raise argparse.ArgumentTypeError(f"{text!r} is not an int from 0 on")
    return int(text)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not bytes, such as 4096 or 100G")
    return int(match[1]) * _UNITS[match[2]]
