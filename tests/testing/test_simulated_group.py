"""Simulated ranks leave a round at moments of their own, and fail as they are told."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from array import array

import anyio
import pytest

from asyncache.core import ClosedError, OrderError, RankError
from asyncache.testing.simulation import SimulatedNetwork, StuckError, run


def network(num_ranks=2, *, delays=None, seed=0, **options):
    """Return a network; ``delays`` are those of its messages as they are sent, then 1.

    A round's messages: each rank's part as it calls, and once the last has called what
    each rank, in order, learns.
    """
    script = itertools.chain(delays or (), itertools.repeat(1.0))
    delay_s = script.__next__ if delays is not None else (0.5, 1.5)
    dice = random.Random(seed)
    return SimulatedNetwork(
        num_ranks, dice=dice, **{"delay_s": delay_s, "silence_s": 60.0, **options}
    )


class Log(list):
    """What came of each rank's calls, and when."""

    async def call(self, group, *vectors):
        for items in vectors:
            vector = array("i", items)
            try:
                await group.all_min(vector)
            except (RankError, ClosedError) as error:
                outcome = str(error)
            else:
                outcome = vector.tolist()
            self.append((group.rank, outcome, anyio.current_time()))


def play(net, *vectors, meanwhile=None):
    """Let rank r make its calls with ``vectors[r]``; return a sorted log."""
    log = Log()

    async def main():
        async with anyio.create_task_group() as tasks:
            for rank, calls in enumerate(vectors):
                tasks.start_soon(log.call, net.group(rank), *calls)
            if meanwhile is not None:
                await meanwhile(log)

    run(main, dice=None)
    return sorted(log, key=lambda entry: (entry[2], entry[0]))


async def give_up(group, items, *, after_s):
    """Cancel a call; return what is left of the vector."""
    vector = array("i", items)
    with anyio.move_on_after(after_s) as scope:
        await group.all_min(vector)
    assert scope.cancelled_caught
    return vector.tolist()


def test_ranks_leave_a_round_at_moments_of_their_own():
    net = network(delays=[1, 2, 10, 20])
    assert play(net, [[3, -1]], [[2, 5]]) == [(0, [2, -1], 12.0), (1, [2, -1], 22.0)]


def test_a_fast_rank_takes_part_in_the_next_round_while_a_slow_one_is_in_the_last():
    # Rank 0 is through after 2 s, and its next part there after 3 s.
    net = network(delays=[1, 1, 1, 20, 1, 1, 1, 1])
    log = play(net, [[1], [4]], [[2], [3]])
    assert log == [(0, [1], 2.0), (1, [1], 21.0), (0, [3], 23.0), (1, [3], 23.0)]


def test_a_part_may_overtake_the_one_before_it():
    net = network(delays=[50, 1, 1])

    async def meanwhile(log):
        assert await give_up(net.group(0), [1], after_s=2) == [1]
        # The second part is there at 3 s, the first at 50 s.
        await log.call(net.group(0), [4])

    log = play(net, [], [[2], [3]], meanwhile=meanwhile)
    assert log == [(1, [1], 51.0), (0, [3], 53.0), (1, [3], 53.0)]


def test_one_rank_is_a_group_as_well():
    assert play(network(1, delays=[]), [[7, -7]]) == [(0, [7, -7], 2.0)]


def test_without_delays_no_time_passes():
    net = network(3, delay_s=(0, 0))
    assert play(net, [[1]], [[2]], [[3]]) == [(rank, [1], 0.0) for rank in range(3)]


def test_a_part_is_what_the_vector_held_as_the_call_began():
    net, vector = network(delays=[]), array("i", [5])

    async def meanwhile(log):
        await anyio.sleep(1)
        vector[0] = 0

    async def main():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(net.group(0).all_min, vector)
            tasks.start_soon(meanwhile, None)
            await anyio.sleep(2)
            other = array("i", [6])
            await net.group(1).all_min(other)
        assert (vector.tolist(), other.tolist()) == ([5], [5])

    run(main, dice=None)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_same_dice_make_the_same_order(num_ranks):
    def log(seed):
        rounds = [[number] for number in range(20)]
        return play(network(num_ranks, seed=seed), *[rounds] * num_ranks)

    assert log(1) == log(1)
    orders = [[rank for rank, *_ in log(seed)] for seed in range(3)]
    assert orders[0] != orders[1] != orders[2]


def test_who_waits_for_a_silent_rank_gives_up_in_time():
    net = network(3, delays=[], silence_s=5.0)
    silent = "nothing of ranks [1] within 5.0 s"

    async def meanwhile(log):
        net.silence(1)
        await anyio.sleep(10)
        for rank in range(3):
            await log.call(net.group(rank), [0])

    log = play(net, [[1]], [[2]], [[3]], meanwhile=meanwhile)
    assert log[:3] == [(rank, silent, 5.0) for rank in range(3)]
    assert log[3:] == [(rank, silent, 10.0) for rank in range(3)]


def test_who_gives_up_tells_the_others():
    net = network(3, delays=[], silence_s=5.0)

    async def meanwhile(log):
        await anyio.sleep(4)
        await log.call(net.group(1), [0])

    log = play(net, [[1]], meanwhile=meanwhile)
    missing = "nothing of ranks [2] within 5.0 s"
    assert log == [(0, missing, 5.0), (1, missing, 6.0)]


def test_a_silent_rank_tells_nobody_that_it_gives_up_or_leaves():
    net = network(delays=[], silence_s=5.0)

    async def meanwhile(log):
        net.silence(1)
        await log.call(net.group(1), [0])
        await net.group(1).aclose()
        await log.call(net.group(0), [0])

    assert play(net, meanwhile=meanwhile) == [
        (1, "nothing of ranks [0, 1] within 5.0 s", 5.0),
        (0, "nothing of ranks [1] within 5.0 s", 10.0),
    ]


@pytest.mark.parametrize(
    ("vectors", "outcome"),
    [([[[1]], [[2]]], [1]), ([[[1]]], "nothing of ranks [1] within 5.0 s")],
)
def test_a_loop_that_is_busy_does_not_change_what_came_first(vectors, outcome):
    net = network(delays=[], silence_s=5.0)

    async def meanwhile(log):
        await anyio.sleep(0.5)
        asyncio.get_running_loop().spend(100.0)

    assert play(net, *vectors, meanwhile=meanwhile)[0] == (0, outcome, 100.5)


def test_a_busy_loop_does_not_let_a_minimum_win_over_earlier_news():
    net = network(delays=[1, 1, 1, 20, 1])

    async def meanwhile(log):
        await anyio.sleep(3)
        net.kill(0)
        asyncio.get_running_loop().spend(100.0)

    log = play(net, [[1]], [[2]], meanwhile=meanwhile)
    assert log[1:] == [(1, "rank 0 is dead", 103.0)]


def test_a_round_that_is_over_is_forgotten():
    net = network(3)
    play(net, *[[[number] for number in range(100)]] * 3)
    assert not net._wire._rounds


def test_what_a_rank_sent_before_it_fell_silent_arrives():
    net = network(delays=[])

    async def meanwhile(log):
        await anyio.sleep(0.5)
        net.silence(0)
        await log.call(net.group(1), [2])

    log = play(net, [[1]], meanwhile=meanwhile)
    assert [outcome for _, outcome, _ in log] == [[1], [1]]


@pytest.mark.parametrize("is_silent", [True, False])
def test_the_death_of_a_rank_is_heard_of_within_one_delay(is_silent):
    net = network(3, delays=[1, 1, 3, 7])

    async def meanwhile(log):
        await anyio.sleep(20)
        if is_silent:
            net.silence(1)
        net.kill(1)
        await anyio.sleep(10)
        for rank in (0, 2):
            await log.call(net.group(rank), [0])

    dead = "rank 1 is dead"
    assert play(net, [[1]], [[2]], meanwhile=meanwhile) == [
        (1, dead, 20.0),
        (0, dead, 23.0),
        (0, dead, 30.0),
        (2, dead, 30.0),
    ]


def test_the_news_of_a_death_may_overtake_a_minimum():
    net = network(delays=[1, 1, 1, 20, 1])

    async def meanwhile(log):
        await anyio.sleep(3)
        net.kill(0)

    log = play(net, [[1]], [[2]], meanwhile=meanwhile)
    assert log == [(0, [1], 2.0), (1, "rank 0 is dead", 4.0)]


def test_who_leaves_ends_the_waits_of_the_others_and_its_own():
    net = network(3, delays=[1, 1, 3, 7])

    async def meanwhile(log):
        await anyio.sleep(20)
        await net.group(0).aclose()
        await net.group(0).aclose()
        await anyio.sleep(10)
        for rank in range(3):
            await log.call(net.group(rank), [0])

    left = "rank 0 has left"
    assert play(net, [[1]], [[2]], meanwhile=meanwhile) == [
        (0, f"{left} its group", 20.0),
        (1, left, 23.0),
        (0, f"{left} its group", 30.0),
        (1, left, 30.0),
        (2, left, 30.0),
    ]


def test_leaving_does_not_overtake_a_minimum():
    net = network(delays=[1, 1, 1, 20, 1])

    async def meanwhile(log):
        await anyio.sleep(3)
        await net.group(0).aclose()
        await anyio.sleep(30)
        await log.call(net.group(1), [0])

    log = play(net, [[1]], [[2]], meanwhile=meanwhile)
    assert log == [(0, [1], 2.0), (1, [1], 21.0), (1, "rank 0 has left", 33.0)]


def test_a_rank_leaves_though_its_last_part_was_lost():
    net = network(delays=[])

    async def meanwhile(log):
        net.silence(1)
        await anyio.sleep(5)
        await net.group(0).aclose()

    log = play(net, [[1]], [[2]], meanwhile=meanwhile)
    assert log == [(0, "rank 0 has left its group", 5.0), (1, "rank 0 has left", 6.0)]


def test_another_length_is_refused_once_both_parts_are_there():
    net = network(3, delays=[4, 1, 1, 2, 3])

    async def meanwhile(log):
        await anyio.sleep(10)
        await log.call(net.group(2), [])

    uneven = "rank 1 sent 2 items, others 1"
    assert play(net, [[1]], [[2, 2]], meanwhile=meanwhile) == [
        (0, uneven, 5.0),
        (1, uneven, 6.0),
        (2, uneven, 10.0),
    ]


@pytest.mark.parametrize("after_s", [0, 0.5, 1.5])
def test_a_cancelled_call_has_been_its_part(after_s):
    net = network(3, delays=[])

    async def meanwhile(log):
        assert await give_up(net.group(0), [0, 9], after_s=after_s) == [0, 9]
        await log.call(net.group(0), [6, 6])

    log = play(net, [], [[1, 1], [7, 7]], [[2, 2], [8, 8]], meanwhile=meanwhile)
    outcomes = [(rank, outcome) for rank, outcome, _ in log]
    assert outcomes[:2] == [(1, [0, 1]), (2, [0, 1])]
    assert sorted(outcomes[2:]) == [(rank, [6, 6]) for rank in range(3)]


def test_a_second_call_at_a_time_is_refused_and_the_first_goes_on():
    net = network(delays=[])

    async def meanwhile(log):
        await anyio.sleep(0.5)
        with pytest.raises(OrderError, match="rank 0 is still in another call"):
            await net.group(0).all_min(array("i", [0]))
        await log.call(net.group(1), [2], [3])

    log = play(net, [[1], [4]], meanwhile=meanwhile)
    assert [outcome for _, outcome, _ in log] == [[1], [1], [3], [3]]


def test_who_has_no_patience_limit_waits_for_ever():
    net = network(silence_s=math.inf)
    with pytest.raises(StuckError, match="nothing can ever happen"):
        play(net, [[1]])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_ranks": 0}, "num_ranks must be at least 1, not 0"),
        ({"delay_s": (-1, 1)}, r"delay_s must be bounds in order, not \(-1, 1\)"),
        ({"delay_s": (2, 1)}, r"delay_s must be bounds in order, not \(2, 1\)"),
        ({"delay_s": (0, math.nan)}, "delay_s must be bounds in order"),
        ({"silence_s": 0}, "silence_s must be positive, not 0"),
        ({"silence_s": math.nan}, "silence_s must be positive, not nan"),
    ],
)
def test_what_makes_no_network(options, match):
    with pytest.raises(ValueError, match=match):
        network(**options)


async def test_items_must_be_int32():
    with pytest.raises(ValueError, match="items must be int32, 'i', not 'q'"):
        await network().group(0).all_min(array("q", [1]))


def test_a_network_shows_its_ranks():
    net, seen = network(delays=[]), []

    async def meanwhile(log):
        await anyio.sleep(0.5)
        seen.append(repr(net))
        net.kill(1)
        seen.append(repr(net.group(1)))

    play(net, [[1]], meanwhile=meanwhile)
    ranks = "<SimulatedGroup 0, 1 calls, waits>, <SimulatedGroup 1, 0 calls, idle>"
    over = "<SimulatedGroup 1, 0 calls, over: rank 1 is dead>"
    assert seen == [f"<SimulatedNetwork [{ranks}]>", over]
