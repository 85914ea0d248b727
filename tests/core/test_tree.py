"""The tree finds the longest resident prefix, and splits without anyone noticing."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, strategies as st

from asyncache.core import InvariantError, hash_pages, root_hash
from asyncache.core._agenda import Load
from asyncache.core._boundaries import servable
from asyncache.core._node import Node
from asyncache.core._tree import Tree
from tests.core.cluster import FULL, layout_of, pack, window_pool

LAYOUT = layout_of()
NAME = root_hash(LAYOUT)


def grow(tree: Tree, parent: Node, tokens: list[int], first_page: int = 0) -> Node:
    """Attach a resident node."""
    node = tree.attach(parent, pack(tokens))
    for pool in range(tree.num_pools):
        pages = range(first_page, first_page + node.end - node.start)
        node.pages[pool] = array("i", pages)
    return node


@pytest.fixture
def tree() -> Tree:
    return Tree(LAYOUT)


@pytest.fixture
def node(tree) -> Node:
    return grow(tree, tree.root(NAME), [1, 2, 3, 4, 5, 6])


def test_a_walk_of_an_unknown_namespace_covers_nothing(tree):
    assert tree.walk(None, pack([1, 2])) == ([], 0)


def test_a_walk_ends_where_the_key_does(tree, node):
    assert tree.walk(tree.root(NAME), pack([1, 2, 3, 4])) == ([node], 2)
    assert tree.walk(tree.root(NAME), pack([1, 2, 3, 4, 5])) == ([node], 2)
    assert tree.walk(tree.root(NAME), pack([1])) == ([], 0)


def test_a_walk_ends_in_the_middle_of_an_edge(tree, node):
    assert tree.walk(tree.root(NAME), pack([1, 2, 3, 4, 9, 9, 9])) == ([node], 2)
    assert tree.walk(tree.root(NAME), pack([1, 2, 9, 4, 5, 6])) == ([node], 1)
    assert tree.walk(tree.root(NAME), pack([9, 2, 3, 4, 5, 6])) == ([], 0)


def test_a_walk_goes_on_below(tree, node):
    below = grow(tree, node, [7, 8])
    key = pack([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert tree.walk(tree.root(NAME), key) == ([node, below], 4)
    assert list(tree.pages_on(below, 0)) == [0, 1, 2, 0]


def test_walking_changes_nothing(tree, node):
    tree.walk(tree.root(NAME), pack([1, 2, 9, 9]))
    assert (node.start, node.end, tree.num_nodes, node.used) == (0, 3, 1, 0)


def test_the_lower_part_of_a_split_stays_the_same_node(tree, node):
    below = grow(tree, node, [7, 8], 3)
    tree.lock(below)
    hashes = list(tree.hashes(node))
    node.used, node.stored, node.written, node.hits = 5, True, 4, 3
    upper = tree.split(node, 1)
    assert (upper.start, upper.end, node.start, node.end) == (0, 1, 1, 3)
    assert below.parent is node
    assert node.parent is upper
    assert upper.parent is tree.root(NAME)
    assert list(tree.pages_on(below, 0)) == [0, 1, 2, 3]
    assert upper.hashes + node.hashes == hashes
    for name in ("used", "stored", "written", "hits", "locks", "loads"):
        assert getattr(upper, name) == getattr(node, name)
    assert tree.locked_pages == 4
    tree.unlock(below)
    assert tree.locked_pages == 0


def test_a_boundary_is_cut_out_of_its_walk_once(tree, node):
    root = tree.root(NAME)
    key = pack([1, 2, 3, 4])
    assert tree.end_at(root, tree.walk(root, key), 0) is root
    upper = tree.end_at(root, tree.walk(root, key), 2)
    assert (upper.end, node.start) == (2, 2)
    assert tree.end_at(root, tree.walk(root, key), 2) is upper
    with pytest.raises(InvariantError, match="a boundary lies on its walk 3 2"):
        tree.end_at(root, tree.walk(root, key), 3)


def test_two_children_cannot_begin_with_the_same_page(tree, node):
    with pytest.raises(InvariantError, match="a first page names one child"):
        tree.attach(tree.root(NAME), pack([1, 2]))


def test_locks_reach_up_to_the_root_and_count_pages_once(tree, node):
    one, other = grow(tree, node, [7, 8]), grow(tree, node, [9, 9])
    tree.lock(one)
    tree.lock(other)
    assert (node.locks, one.locks, other.locks) == (2, 1, 1)
    assert tree.locked_pages == 5
    tree.unlock(one)
    assert (node.locks, tree.locked_pages) == (1, 4)
    tree.unlock(other)
    with pytest.raises(InvariantError, match="an unlocked node was locked"):
        tree.unlock(other)


def test_a_namespace_without_pages_is_forgotten_unless_it_is_pinned(tree, node):
    tree.lock(tree.root(NAME))
    tree.detach(node)
    assert (tree.num_nodes, node.attached, NAME in tree.roots) == (0, False, True)
    tree.unlock(tree.root(NAME))
    assert NAME not in tree.roots


def test_hashes_are_made_when_asked_for_from_the_nearest_that_has_some(tree, node):
    below = grow(tree, node, [7, 8])
    key = pack([1, 2, 3, 4, 5, 6, 7, 8])
    assert node.hashes is None
    whole = hash_pages(key, page_tokens=2, parent=NAME)
    assert tree.hashes(below) == whole[3:]
    assert node.hashes == whole[:3]
    assert tree.last_hash(tree.root(NAME)) == NAME


def test_a_node_shows_its_state(tree, node):
    assert repr(node) == "<Node 1 [0,3) R x0>"
    node.loads[0] = Load(0, 3)
    assert repr(node) == "<Node 1 [0,3) L x0>"
    node.pages[0] = None
    assert repr(node) == "<Node 1 [0,3) A x0>"


# Boundaries, against brute force.

ABSENT, LOADING, RESIDENT = range(3)


@given(
    backbone=st.integers(0, 9),
    states=st.lists(st.lists(st.integers(0, 2), min_size=9, max_size=9), min_size=2),
    windows=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    cuts=st.sets(st.integers(1, 8)),
    limit=st.integers(0, 10),
    short=st.integers(0, 2),
    resident=st.booleans(),
)
# Alone, the first window would end at 4 and the second at 3; both allow 1 only.
@example(
    backbone=9,
    states=[[RESIDENT, ABSENT, *[RESIDENT] * 7], [*[RESIDENT] * 3, *[ABSENT] * 6]],
    windows=[2, 1],
    cuts={1, 2, 3},
    limit=4,
    short=0,
    resident=False,
)
def test_a_boundary_is_the_longest_that_every_pool_can_serve(
    *, backbone, states, windows, cuts, limit, short, resident
):
    """``backbone`` pages are RESIDENT, the rest are LOADING; windows are anything."""
    pools = [window_pool(2 * size, f"w{at}") for at, size in enumerate(windows)]
    tree = Tree(layout_of(FULL, *pools))
    load, node, edges = Load(0, 9), tree.root(NAME), sorted(cuts | {0, 9, backbone})
    edges = [edge for edge in edges if edge <= 9]
    # State is uniform over a node, so it is that of the node's first page.
    found = [[0] * 9 for _ in windows]
    for start, end in pairwise(edges):
        node = grow(tree, node, [0] * (2 * (end - start)))
        node.loads[0] = load if start >= backbone else None
        for pool, row in enumerate(states[: len(windows)], 1):
            node.loads[pool] = load if row[start] == LOADING else None
            node.pages[pool] = None if row[start] == ABSENT else node.pages[pool]
            found[pool - 1][start:end] = [row[start]] * (end - start)
    walk = tree.walk(tree.root(NAME), pack([0] * (18 - 2 * short)))
    assert walk.covered == 9 - short

    def is_legal(end: int) -> bool:
        if resident and end > backbone:
            return False
        least = RESIDENT if resident else LOADING
        return all(
            all(state >= least for state in row[max(0, end - window) : end])
            for row, window in zip(found, windows, strict=False)
        )

    legal = [end for end in range(min(limit, walk.covered) + 1) if is_legal(end)]
    assert servable(tree, walk, limit, resident=resident) == max(legal)


def test_a_window_wider_than_the_prompt_needs_all_of_it():
    tree = Tree(layout_of(FULL, replace(window_pool(100), name="wide")))
    node = grow(tree, tree.root(NAME), [1, 2, 3, 4])
    walk = tree.walk(tree.root(NAME), pack([1, 2, 3, 4]))
    assert servable(tree, walk, 2) == 2
    node.pages[1] = None
    assert servable(tree, walk, 2) == 0
    assert list(tree.pages_on(node, 1)) == [-1, -1]
