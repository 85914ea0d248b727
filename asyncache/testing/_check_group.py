"""What every group of ranks must do, whoever wrote it: run it on yours."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from asyncache.ranks import Group
from asyncache.testing._nth import cancel_nth, noting
from asyncache.testing._rounds import (
    INT32_MAX,
    INT32_MIN,
    MAX_TURNS,
    Call,
    Subject,
    all_but,
    expect,
    expect_in_step_or_over,
    expect_minimum,
    expect_over,
    expect_rank_errors,
    open_tasks,
    run,
    wait_turns,
)

GroupMaker = Callable[[], AbstractAsyncContextManager[Sequence[Group]]]


async def check_group(make_group: GroupMaker, *, patience_s: float = 60.0) -> None:
    """Check that a group keeps the contract of :class:`Group`, on each of its ranks.

    All ranks run in the caller's event loop. Laws that need two ranks are left out for
    a group of one. Needs no pytest.

    Args:
        make_group: Returns a group as a context manager: entered, it gives what each
            rank holds, in the order of the ranks. It is called many times, always for
            as many ranks; left, it takes down what the law has not closed.
        patience_s: Seconds of the loop's clock after which a call that has not ended
            hangs. Longer than the group itself waits for a silent rank.

    Raises:
        AssertionError: If the group breaks the contract; a note names the law, and the
            rank that left, fell silent or was cancelled.
    """
    async with make_group() as groups:
        num_ranks = len(groups)
    make = partial(_opened, make_group, patience_s)
    for law in _LAWS:
        with noting(f"{_in_words(law)}, {num_ranks} ranks"):
            async with make() as subject:
                await law(subject)
    for culprit in range(num_ranks):
        for fault in _FAULTS if num_ranks > 1 else ():
            with noting(f"{_in_words(fault)}, rank {culprit} of {num_ranks}"):
                async with make() as subject:
                    await fault(subject, culprit)
        with noting(f"cancelled: rank {culprit} of {num_ranks}"):
            await _check_cancellation(make, culprit)


async def _ranks_are_numbered(subject: Subject) -> None:
    for rank, group in enumerate(subject.groups):
        expect(group.rank == rank, f"rank {rank} says that it is {group.rank}")
        num_ranks = len(subject.groups)
        expect(group.num_ranks == num_ranks, f"rank {rank} knows of {group.num_ranks}")


async def _the_minimum_is_put_in_place(subject: Subject) -> None:
    for _ in range(10):
        calls = subject.round()
        await subject.play(calls)
        expect_minimum(calls)


async def _items_may_be_any_int32(subject: Subject) -> None:
    for extreme, other in ((INT32_MIN, INT32_MAX), (INT32_MAX, INT32_MIN), (-1, 0)):
        calls = [
            Call(group, [extreme if rank == place else other for place in range(4)])
            for rank, group in enumerate(subject.groups)
        ]
        await subject.play(calls)
        expect_minimum(calls)


async def _vectors_may_have_any_length(subject: Subject) -> None:
    for num_items in (0, 1, 4096, 0, 3):
        calls = subject.round(num_items=num_items)
        await subject.play(calls)
        expect_minimum(calls)


async def _rounds_do_not_mix(subject: Subject) -> None:
    rounds = [subject.round() for _ in range(50)]
    await subject.play(*rounds)
    for calls in rounds:
        expect_minimum(calls)


async def _leaving_takes_a_round_from_nobody_that_all_took_part_in(
    subject: Subject,
) -> None:
    calls = subject.round()

    async def run_and_leave(call: Call) -> None:
        await call.run()
        await call.group.aclose()

    with subject.patience():
        async with open_tasks() as tasks:
            for call in calls:
                tasks.start_soon(run_and_leave, call)
    expect_minimum(calls)


async def _closing_twice_is_harmless(subject: Subject) -> None:
    with subject.patience():
        for group in [*subject.groups, *subject.groups]:
            await group.aclose()


async def _unequal_lengths_end_the_group(subject: Subject, culprit: int) -> None:
    calls = subject.round(num_items=4)
    calls[culprit] = subject.round(num_items=5)[culprit]
    await subject.play(calls)
    expect_rank_errors(calls)
    await expect_over(subject, subject.groups)


async def _a_rank_that_leaves_ends_the_group(subject: Subject, culprit: int) -> None:
    await _the_minimum_is_put_in_place(subject)
    others = all_but(subject.round(), culprit)
    with subject.patience():
        async with open_tasks() as tasks:
            for call in others:
                tasks.start_soon(call.run)
            await wait_turns(MAX_TURNS)
            await subject.groups[culprit].aclose()
    expect_rank_errors(others)
    await expect_over(subject, [call.group for call in others])


async def _a_rank_that_never_calls_ends_the_group(
    subject: Subject, culprit: int
) -> None:
    others = all_but(subject.round(), culprit)
    await subject.play(others)
    expect_rank_errors(others)
    await expect_over(subject, subject.groups)


_LAWS: Sequence[Callable[[Subject], Awaitable[None]]] = (
    _ranks_are_numbered,
    _the_minimum_is_put_in_place,
    _items_may_be_any_int32,
    _vectors_may_have_any_length,
    _rounds_do_not_mix,
    _leaving_takes_a_round_from_nobody_that_all_took_part_in,
    _closing_twice_is_harmless,
)
_FAULTS: Sequence[Callable[[Subject, int], Awaitable[None]]] = (
    _unequal_lengths_end_the_group,
    _a_rank_that_leaves_ends_the_group,
    _a_rank_that_never_calls_ends_the_group,
)


@dataclass(frozen=True, slots=True)
class _Interruption:
    """Three rounds, in the first of which one rank's call is cancelled.

    That it was, must count as its part, or end the group: a part that comes a round
    late would be taken for another round's, on all ranks.
    """

    subject: Subject
    rounds: Sequence[Sequence[Call]]
    victim: int

    async def call(self) -> None:
        await self.rounds[0][self.victim].run()

    async def check(self) -> None:
        """Let the victim go on at once, while the others may be in the first round."""
        with self.subject.patience(len(self.rounds)):
            for calls in self.rounds[1:]:
                await calls[self.victim].run()
            for call in self.rounds[-1]:
                await call.ended.wait()
        expect_in_step_or_over(self.rounds)


async def _check_cancellation(
    make: Callable[[], AbstractAsyncContextManager[Subject]], victim: int
) -> None:
    @asynccontextmanager
    async def fresh(num_turns: int) -> AsyncIterator[_Interruption]:
        async with make() as subject, open_tasks() as tasks:
            rounds = [subject.round() for _ in range(3)]
            for calls in all_but(list(zip(*rounds, strict=True)), victim):
                tasks.start_soon(run, calls)
            await wait_turns(num_turns)
            yield _Interruption(subject, rounds, victim)

    # The victim's part is the first to be sent, and the last.
    for num_turns in (0, MAX_TURNS):
        await cancel_nth(
            _Interruption.call,
            fresh=partial(fresh, num_turns),
            check=_Interruption.check,
        )


def _in_words(law: Callable[..., object]) -> str:
    return law.__name__.replace("_", " ").strip()


@asynccontextmanager
async def _opened(make_group: GroupMaker, patience_s: float) -> AsyncIterator[Subject]:
    async with make_group() as groups:
        yield Subject(groups, patience_s)
