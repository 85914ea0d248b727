"""The command line: which command runs, and what its failures look like.

0 is success, 1 a broken law of the cache or a broken page, 2 bad input; both fail with
one line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from asyncache.cli import _replay, _sim, _store
from asyncache.cli._errors import InputError
from asyncache.core import AsyncacheError

INTERRUPTED = 130
"""What a shell reports for a program that Ctrl-C ended."""
UNREAD = 141
"""What it reports for one whose output nobody reads any more."""


class _Parser(argparse.ArgumentParser):
    """Refuses bad arguments in one line, as everything here refuses bad input."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code.

    Args:
        arguments: In place of the process's own.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except InputError as error:
        return _fail(parser, str(error), 2)
    except AsyncacheError as error:
        return _fail(parser, f"{type(error).__name__}: {error}", 1)
    except BrokenPipeError:
        # Who read has gone; what Python still has to write at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="asyncache", description="Tools around asyncache."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _replay.add_command(commands)
    _sim.add_command(commands)
    _store.add_command(commands)
    return parser


def _fail(parser: argparse.ArgumentParser, message: str, code: int) -> int:
    sys.stderr.write(f"{parser.prog}: error: {' '.join(message.split())}\n")
    return code
