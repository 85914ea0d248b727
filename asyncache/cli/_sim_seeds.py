"""Seeds are played: in this process, or by workers, each a process of its own.

A worker is given a few seeds at a time and tells of each one as it has ended, so that
it is known which seed a worker died of.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from asyncache.core import AsyncacheError, Stage
from asyncache.testing.simulation import (
    Case,
    Mishap,
    Result,
    draw,
    simulate,
    torn_down_quietly,
    way_of,
)

CHUNK = 16
"""Seeds that a worker is given at once."""
NOTICE_S = 1.0
"""How often it is told that nothing has ended yet."""


class WorkerError(AsyncacheError):
    """A worker died of a seed, and could not say why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a seed.

    Args:
        seed: Which it was.
        steps: Changes of the state that were checked.
        seen: Which mishap befell what, and how often.
        failure: What was wrong, in a line; None if all held.
        way: The same, without what differs from run to run.
    """

    seed: int
    steps: int = 0
    seen: Counter[tuple[Stage, Mishap]] = field(default_factory=Counter)
    failure: str | None = None
    way: str = ""


def one_line(error: BaseException) -> str:
    """Return the type and the message of an error."""
    return " ".join([f"{type(error).__name__}:", *str(error).split()])


def play(case: Case, *, is_checked: bool, is_logged: bool = False) -> Result:
    """Play a case; if it is to be checked, twice, and a difference is what is wrong."""
    result = simulate(case, is_logged=is_checked or is_logged)
    if is_checked and result.error is None:
        again = simulate(case, is_logged=True)
        result.error = again.error or _difference(result.log, again.log)
    return result


def _difference(first: list[str], second: list[str]) -> Exception | None:
    if first == second:
        return None
    pairs = enumerate(zip(first, second, strict=False))
    number = next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))
    lines = [(log[number : number + 1] or ["the end"])[0] for log in (first, second)]
    return AssertionError(
        f"two runs of it differ from line {number + 1} of the log on: {lines[0]!r},"
        f" then {lines[1]!r}"
    )


@dataclass(frozen=True, slots=True)
class Player:
    """Plays seeds for so many ranks; checks that they are the same twice, or not."""

    num_ranks: int = 1
    is_checked: bool = False

    def play(self, seed: int) -> Outcome:
        """Play a seed; return what is worth telling other processes."""
        result = play(draw(seed, self.num_ranks), is_checked=self.is_checked)
        error = result.failure
        if error is None:
            return Outcome(seed, result.steps, result.seen)
        return Outcome(seed, result.steps, result.seen, one_line(error), way_of(error))


def play_all(seeds: range, *, jobs: int, player: Player) -> Generator[Outcome | None]:
    """Play seeds; yield each outcome as it comes, and None where none has for long.

    Args:
        seeds: Which.
        jobs: Workers; with one, seeds are played in this process.
        player: Plays them.

    Raises:
        WorkerError: If a worker dies.
    """
    if jobs == 1:
        for seed in seeds:
            yield player.play(seed)
        return
    starts = iter(range(0, len(seeds), CHUNK))
    chunks = (seeds[start : start + CHUNK] for start in starts)
    with ExitStack() as stack:
        workers = {}
        for _ in range(min(jobs, -(-len(seeds) // CHUNK))):
            worker = stack.enter_context(_worker(player))
            workers[worker.connection] = worker
            worker.take(next(chunks, None))
        while workers:
            ready = wait(list(workers), NOTICE_S)
            if not ready:
                yield None
            for connection in ready:
                worker = workers[connection]  # type: ignore[index]  # what was waited for
                yield worker.receive()
                if not worker.left and not worker.take(next(chunks, None)):
                    del workers[worker.connection]


@dataclass(slots=True)
class _Worker:
    """A process that plays seeds, as it is seen from here."""

    process: SpawnProcess
    connection: Connection
    left: range = range(0)
    """Seeds that it was given and has not told of, in its order."""

    def take(self, seeds: range | None) -> bool:
        """Give it seeds; return whether there are any."""
        self.left = seeds or range(0)
        if seeds:
            with suppress(BrokenPipeError):  # it is dead, as receive() will tell
                self.connection.send(seeds)
        return bool(seeds)

    def receive(self) -> Outcome:
        """Return the outcome of the first seed that it has left."""
        try:
            outcome: Outcome = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise WorkerError(
                f"seed {self.left[0]} ended its process,"
                f" exit code {self.process.exitcode}"
            ) from None
        self.left = self.left[1:]
        return outcome


@contextmanager
def _worker(player: Player) -> Iterator[_Worker]:
    """Start a worker; end it at once when left, whatever it does."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, player), daemon=True)
    process.start()
    there.close()
    try:
        yield _Worker(process, here)
    finally:
        process.kill()
        process.join()
        here.close()


def _work(connection: Connection, player: Player) -> None:
    """Play what comes until nothing does any more."""
    # Ctrl-C is the terminal's word to all; the one who started us ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    receive: Callable[[], range] = connection.recv
    with suppress(EOFError, BrokenPipeError), torn_down_quietly():
        while True:
            for seed in receive():
                connection.send(player.play(seed))
