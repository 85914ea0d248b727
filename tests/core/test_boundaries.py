"""Which boundaries can be restored, against brute force over random presence."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from asyncache.core import Asked, LookupPlan, PageHash, restorable
from tests.core.cluster import FULL, Cluster, layout_of, pack, state_pool, window_pool

NOTHING = PageHash(b"")


class Window(NamedTuple):
    """A pool of which a boundary needs the last ``pages``: a state pool is one of 1."""

    pages: int
    stored: list[int]


def ask(full: list[int], *windows: Window) -> list[int]:
    """Return what can be restored of a prompt of which nothing is resident."""
    end = len(full)
    asks = [Asked(0, 0, [NOTHING] * end)]
    asks += [Asked(at, 0, [NOTHING] * end) for at in range(1, len(windows) + 1)]
    rows = [(at + 1, window.pages, 0, bytes(end)) for at, window in enumerate(windows)]
    plan = LookupPlan(7, 0, end, tuple(asks), tuple(rows))
    return restorable(plan, [full, *(window.stored for window in windows)])


def legal(full: list[int], *windows: Window) -> list[int]:
    """Return the same by trying each boundary."""
    return [
        end
        for end in range(1, len(full) + 1)
        if all(full[:end])
        and all(all(row[max(0, end - pages) : end]) for pages, row in windows)
    ]


@pytest.mark.parametrize(
    ("present", "window", "expected"),
    [
        # Of six pages, p1 p2 p4 p5: sglang.md 2.10.
        ([0, 1, 1, 0, 1, 1], 2, [3, 6]),
        ([0, 1, 1, 0, 1, 0], 2, [3]),
        ([0, 1, 1, 0], 2, [3]),
        ([1, 0, 0, 1], 2, [1]),
        ([0, 1, 0, 1], 1, [2, 4]),
        ([0, 0, 0], 1, []),
    ],
)
def test_a_boundary_needs_its_window_or_its_state(present, window, expected):
    assert ask([1] * len(present), Window(window, present)) == expected


def test_the_longest_of_all_pools_is_no_minimum_of_each_ones_longest():
    """A file backend said [3, 2, 2] here, where 2 is legal nowhere."""
    prompts = [([1, 1, 1], [0, 0, 1]), ([1, 1, 0], [0, 0, 1]), ([1, 1, 0], [1, 0, 1])]
    longest = [max(ask(full, Window(1, has)), default=0) for full, has in prompts]
    assert longest == [3, 0, 1]


@given(st.data(), st.integers(1, 9))
def test_all_pools_must_allow_a_boundary(data, end):
    flags = st.lists(st.integers(0, 1), min_size=end, max_size=end)
    full = data.draw(flags)
    windows = data.draw(
        st.lists(st.builds(Window, st.integers(1, 4), flags), max_size=3)
    )
    assert ask(full, *windows) == legal(full, *windows)


POOLS = (state_pool("slow"), window_pool(4), FULL, state_pool("fast"))
PAGES = (1, 2, None, 1)


@settings(max_examples=60)
@given(st.data(), st.integers(1, 3), st.integers(1, 8))
def test_ranks_restore_the_longest_boundary_that_all_of_them_can(data, num_ranks, end):
    cluster = Cluster(layout_of(*POOLS), num_pages=20, num_ranks=num_ranks)
    pages = cluster.learn(pack([1] * (2 * end)), None)
    flags = st.lists(st.integers(0, 1), min_size=end, max_size=end)
    boundaries = set(range(1, end + 1))
    for rank in cluster.ranks:
        rows = [data.draw(flags) for _ in POOLS]
        # Or else most have no first page.
        rows[2] = [int(at < data.draw(st.integers(0, end))) for at in range(end)]
        rank.store |= {
            (pool, page)
            for pool, row in enumerate(rows)
            for page, is_there in zip(pages, row, strict=True)
            if is_there
        }
        windows = [
            Window(size, row) for size, row in zip(PAGES, rows, strict=True) if size
        ]
        boundaries &= set(legal(rows[2], *windows))
    seq = cluster.open([1] * (2 * end + 1))
    assert cluster.restore(seq) == 2 * max(boundaries, default=0)
    cluster.end(seq)
    cluster.settle()
    cluster.check_rest()
