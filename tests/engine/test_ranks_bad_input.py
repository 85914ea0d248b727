"""What nobody should say to a cache of several ranks: it names what is wrong, and why.

Nothing has changed then, on no rank: the same group goes on to serve.
"""

from __future__ import annotations

import functools
import math

import anyio
import pytest

from asyncache.core import ClosedError, OrderError, OutOfPagesError, RankError, lru
from asyncache.devices import CpuDevice
from asyncache.engine import BlockingCache, KVCache, Limits, Prompt
from asyncache.engine._prompt import ScopeId
from asyncache.ranks import LocalGroup
from asyncache.stores import MemoryStore
from tests.engine.scene import LAYOUT, PAGE, prompt
from tests.engine.team import LIMITS, MODES, Rank, Team, team

pytestmark = pytest.mark.anyio
A, B = prompt(4, seed=1), prompt(4, seed=2)
ONE = b"\1\0\0\0"


@pytest.fixture(params=MODES, ids=lambda mode: "-".join(mode.values()))
def mode(request) -> dict[str, str]:
    return request.param


async def refused(ranks: Team, call, error: type[Exception], text: str) -> None:
    """Raise unless every rank refuses a call alike, and nothing has changed."""
    before = [rank.replica.look.dump() for rank in ranks.ranks]
    waiting = [rank.cache.waiting() for rank in ranks.ranks]
    for rank in ranks.ranks:
        with pytest.raises(error, match=text):
            await rank.do(call)
    assert [rank.replica.look.dump() for rank in ranks.ranks] == before
    assert [rank.cache.waiting() for rank in ranks.ranks] == waiting


def new_cache(**arguments) -> KVCache:
    return KVCache(LAYOUT, device=CpuDevice(LAYOUT, 8), limits=LIMITS, **arguments)


# Groups.


@pytest.mark.parametrize("face", [KVCache, BlockingCache])
@pytest.mark.parametrize("group", ["ranks", 0, [], LocalGroup, LocalGroup.of(2)])
def test_what_is_no_group_is_refused_when_it_is_given(face, group):
    with pytest.raises(TypeError, match="group must be this rank's Group, not"):
        face(LAYOUT, device=CpuDevice(LAYOUT, 8), group=group)


async def test_a_group_serves_one_cache_and_the_first_one_keeps_it():
    async with team(2) as ranks:
        for rank in ranks.ranks:
            other = new_cache(group=rank.cache._group, store=MemoryStore(2**20))
            with pytest.raises(OrderError, match="is another cache's: each has its"):
                await other.open()
            await other.aclose()
        assert await ranks.serve(A) == 0
        assert await ranks.serve(A) == 4 * PAGE


async def test_a_group_that_is_closed_opens_no_cache():
    [group] = LocalGroup.of(1)
    await group.aclose()
    cache = new_cache(group=group)
    with pytest.raises(RankError, match="rank 0 has left its group"):
        await cache.open()
    await cache.aclose()


def test_a_blocking_cache_runs_one_rank_and_leaves_a_group_alone():
    [group] = LocalGroup.of(1)
    cache = BlockingCache(LAYOUT, device=CpuDevice(LAYOUT, 8), group=group)
    with pytest.raises(OrderError, match="runs one rank, and none of <LocalGroup 0"):
        cache.open()
    cache.close()

    async def serve() -> None:
        async with new_cache(group=group):
            pass

    anyio.run(serve)


class Coldest:
    """A policy that is no function, and so has no name of its own."""

    def __call__(self, node):
        return lru(node)


@pytest.mark.parametrize("policy", [Coldest(), functools.partial(lru)])
async def test_a_policy_may_be_any_callable(policy):
    async with team(2, policy=policy) as ranks:
        assert await ranks.serve(A) == 0


async def test_policies_of_two_kinds_are_told_apart():
    errors = []

    async def one(group, policy) -> None:
        cache = new_cache(group=group, policy=policy)
        try:
            await cache.open()
        except RankError as error:
            errors.append(str(error))
        await cache.aclose()

    async with anyio.create_task_group() as tasks:
        for group, policy in zip(LocalGroup.of(2), (Coldest(), lru), strict=True):
            tasks.start_soon(one, group, policy)
    assert errors == ["ranks differ in policy"] * 2


@pytest.mark.parametrize("name", ["barrier", "aborts"])
@pytest.mark.parametrize("value", ["", "Sync", None, 1, True])
def test_a_mode_that_is_none_is_refused(name, value):
    with pytest.raises(ValueError, match=f'{name} must be "'):
        new_cache(**{name: value})


@pytest.mark.parametrize("name", ["step_s", "barrier_s"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-1.0, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        (True, TypeError),
        ("1", TypeError),
        (None, TypeError),
    ],
)
def test_a_bound_that_is_none_is_refused(name, value, error):
    with pytest.raises(error, match=f"{name} must be "):
        Limits(**{name: value})


# Prompts.

BAD_PROMPTS = [
    ("text", TypeError, "not a prompt, but str: 'text'"),
    (A, TypeError, "not a prompt, but list"),
    (None, TypeError, "not a prompt, but NoneType"),
    (Prompt("text"), TypeError, "packed bytes, not str"),
    (Prompt(b""), ValueError, "at least 1"),
    (Prompt(b"abc"), ValueError, "4 bytes each, not 3 in all"),
    (Prompt(b"\xff" * 4), ValueError, r"\[0, 2147483647\], got -1 at 0"),
    (Prompt(ONE, namespace=3), TypeError, "int"),
    (Prompt(ONE, namespace="\ud800"), ValueError, "cannot be encoded"),
    (Prompt(ONE, num_reserve_tokens=-1), ValueError, "at least 0, not -1"),
    (Prompt(ONE, num_reserve_tokens="1"), TypeError, "must be an int, not '1'"),
    (Prompt(ONE, priority=1.5), TypeError, "must be an int, not 1.5"),
    (Prompt(ONE, priority=2**31), ValueError, f"not {2**31}"),
    (Prompt(ONE, scope=(0, 0, 0)), TypeError, r"a ScopeId, not \(0, 0, 0\)"),
    (Prompt(ONE, scope=ScopeId(1, 2, 0)), ValueError, "rank must be at most 1, not 2"),
    (Prompt(ONE, scope=ScopeId(1, -1, 0)), ValueError, "at least 0, not -1"),
    (Prompt(ONE, scope=ScopeId(1, 0, "a")), TypeError, "number must be an int"),
    (Prompt(ONE, is_prefetch=1), TypeError, "is_prefetch is a bool, not 1"),
]


@pytest.mark.parametrize(("bad", "error", "text"), BAD_PROMPTS, ids=repr)
async def test_one_bad_prompt_opens_none_of_them(bad, error, text):
    async with team(2) as ranks, anyio.create_task_group() as group:
        good = ranks.ranks[0].cache.prompt(B)
        waits = ranks.ranks[0].cache.request(A)
        with waits:
            mine = ranks.ranks[0].cache.waiting()
            batch = [*mine, good, bad]
            await refused(ranks, lambda rank: rank.cache.admit(batch), error, text)
            [seq] = await ranks.admit(mine)
            assert ranks.ranks[0].requests[seq] is waits
        await ranks.until(lambda: not ranks.ranks[0].requests, "it ends")
        group.cancel_scope.cancel()


async def test_prompts_of_other_caches_are_refused_on_every_rank():
    """Both have a first scope on their first rank: by number, it would get an answer
    to somebody else's prompt."""
    async with team(2) as ranks, team(2) as others:
        with ranks.ranks[0].cache.request(A), others.ranks[0].cache.request(B):
            strange = others.ranks[0].cache.waiting()
            own = ranks.ranks[0].cache.waiting()
            text = r"of other caches: ScopeId\(cache=\d+, rank=0, number=0\), not of"
            for batch in (strange, [*own, *strange]):
                await refused(
                    ranks, lambda r, b=batch: r.cache.admit(b), ValueError, text
                )
            assert len(await ranks.admit(own)) == 1
            assert len(await others.admit(strange)) == 1
        for view in (ranks, others):
            await view.until(lambda v=view: not v.ranks[0].requests, "it ends")


async def test_prompts_may_come_one_by_one():
    async with team(2) as ranks:
        made = [ranks.ranks[0].cache.prompt(tokens) for tokens in (A, B)]
        first, second = await ranks.everywhere(
            lambda rank: rank.cache.admit(iter(made))
        )
        ids = [[request.id for request in own] for own in (first, second)]
        assert ids[0] == ids[1]
        assert len(ids[0]) == 2
        await ranks.everywhere(lambda r: r.cache.dismiss(dict.fromkeys(ids[0], True)))


@pytest.mark.parametrize("prompts", [None, 7, Prompt(ONE)], ids=repr)
async def test_what_holds_no_prompts_is_refused(prompts):
    async with team(2) as ranks:
        await refused(
            ranks, lambda rank: rank.cache.admit(prompts), TypeError, "not iterable"
        )


async def test_a_prompt_that_a_stranger_tries_to_admit_still_waits(mode):
    async with team(2, **mode) as ranks:
        first = await ranks.open(B)
        rank = ranks.ranks[0]
        with rank.cache.request(A) as waits:
            mine = rank.cache.waiting()
            with pytest.raises(OrderError, match="calls come from one task, the loop"):
                rank.cache.admit(mine)
            assert rank.cache.waiting() == mine
            [seq] = await ranks.admit(mine)
            assert rank.requests[seq] is waits
        await ranks.dismiss()
        await ranks.until(lambda: seq not in rank.requests, "it ends")
        await ranks.end(first)


async def test_what_was_refused_is_no_scope_that_waits():
    async with team(2, num_pages=4) as ranks:

        def act(rank: Rank) -> None:
            [request] = rank.cache.admit([rank.cache.prompt(prompt(9))])
            with (
                pytest.raises(OutOfPagesError, match="cannot fit a pool of 4"),
                request,
            ):
                pass
            assert rank.cache.waiting() == []

        await ranks.everywhere(act)
        kept = await ranks.errors(lambda rank: rank.cache.prefetch(prompt(9)))
        assert [type(error) for error in kept] == [OutOfPagesError] * 2
        assert [rank.cache.waiting() for rank in ranks.ranks] == [[], []]


# Other calls.

BAD_LEFT = [
    (None, TypeError, "must map ids to bools, not be NoneType"),
    ([1], TypeError, "must map ids to bools, not be list"),
    ({"1": True}, TypeError, "must be an int, not '1'"),
    ({1.0: True}, TypeError, "must be an int, not 1.0"),
    ({True: True}, TypeError, "must be an int, not True"),
    ({-1: True}, ValueError, "at least 0, not -1"),
    ({1: 1}, TypeError, "aborted must be a bool, not 1, of 1"),
]


@pytest.mark.parametrize(("left", "error", "text"), BAD_LEFT, ids=repr)
async def test_what_was_not_left_dismisses_nobody(mode, left, error, text):
    async with team(2, **mode) as ranks:
        seqs = [await ranks.open(tokens) for tokens in (A, B)]
        batch = {seqs[1]: True} | left if isinstance(left, dict) else left
        await refused(ranks, lambda rank: rank.cache.dismiss(batch), error, text)
        # Whoever is not there any more, or never was, is left alone.
        await ranks.everywhere(lambda rank: rank.cache.dismiss({10**6: True}))
        for seq in seqs:
            await ranks.end(seq)


@pytest.mark.parametrize("what", ["text", None, 3, KVCache], ids=repr)
@pytest.mark.parametrize("name", ["abort", "gates", "forward"])
async def test_what_is_no_request_is_refused(name, what):
    def call(rank: Rank) -> None:
        given = rank.cache if what is KVCache else what
        if name == "abort":
            rank.cache.abort(given)
        elif name == "gates":
            rank.cache.gates([given])
        else:
            with rank.cache.forward([given]):
                pass

    async with team(2) as ranks:
        await refused(ranks, call, TypeError, "not a request, but")


async def test_a_request_that_waits_or_is_of_other_caches_is_not_aborted():
    async with team(2) as ranks, team(2) as others:
        seq = await others.open(A)
        with ranks.ranks[0].cache.request(A) as waits:
            rank = ranks.ranks[0]
            with pytest.raises(OrderError, match="has yet to admit"):
                await rank.do(lambda r: r.cache.abort(waits))
            strange = others.ranks[0].requests[seq]
            with pytest.raises(ValueError, match="is of another cache"):
                await rank.do(lambda r: r.cache.abort(strange))
        await others.end(seq)


@pytest.mark.parametrize(
    ("timeout_s", "error"),
    [
        (-1, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        ("1", TypeError),
        (True, TypeError),
    ],
)
async def test_a_timeout_that_is_none_is_refused_and_no_step_is_owed(timeout_s, error):
    async with team(2) as ranks:
        await refused(
            ranks,
            lambda rank: rank.cache.step(timeout_s=timeout_s),
            error,
            "timeout_s must be",
        )
        await refused(
            ranks,
            lambda rank: rank.cache.drain(deadline_s=timeout_s),
            error,
            "deadline_s must be",
        )
        await refused(
            ranks,
            lambda rank: rank.cache.prefetch(A, deadline_s=timeout_s),
            error,
            "deadline_s must be",
        )
        assert await ranks.serve(A) == 0


async def test_calls_of_several_ranks_are_refused_by_one():
    async with KVCache(LAYOUT, device=CpuDevice(LAYOUT, 8)) as cache:
        assert cache.waiting() == []
        for call in (lambda: cache.admit([]), cache.left, lambda: cache.dismiss({})):
            with pytest.raises(OrderError, match="without a group of ranks"):
                call()


async def test_no_call_is_made_on_a_cache_that_is_not_open_or_closed():
    cache = new_cache(group=LocalGroup.of(1)[0])
    calls = [
        cache.waiting,
        cache.left,
        lambda: cache.admit([]),
        lambda: cache.dismiss({}),
        lambda: cache.prompt(A),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="not open"):
            call()
    await cache.open()
    await cache.aclose()
    for call in calls:
        with pytest.raises(ClosedError, match="is closed"):
            call()


async def test_a_restore_with_a_deadline_that_is_none_is_not_begun(mode):
    async with team(2, **mode) as ranks:
        seq = await ranks.open(A)
        for deadline_s in (-1, math.nan, math.inf):
            await refused(
                ranks,
                lambda r, d=deadline_s: r.requests[seq].restore_nowait(deadline_s=d),
                ValueError,
                "deadline_s must be",
            )
        await ranks.end(seq)
