"""The prefix tree, from packed tokens: match, insert, and a deep chain."""

from __future__ import annotations

import itertools
import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from asyncache.core import Replica, root_hash
from asyncache.core._state import Bounds
from asyncache.core._tree import Tree
from tests.bench import inputs
from tests.bench.measure import Row, Stopwatch, Work, interleave, repeat
from tests.bench.peers import SglangTree, sglang_tree

SYSTEM, PROMPT = 4096, 6144
DEPTH, PIECE = 64, 512
PAGE = inputs.PAGE_TOKENS
NUM_INSERTS = 50
NUM_CALLS = 20
MISSING = "peer not installed: make bench-peers"


@dataclass(frozen=True, slots=True)
class Contest:
    """Our tree and another's at one job, done ``per`` times in one work."""

    name: str
    bound: float
    ours: Work
    theirs: Callable[[SglangTree], Work]
    per: int = 1

    def run(self, num_rounds: int) -> Row:
        """Run ours, and theirs if it is installed, in turns."""
        peer = sglang_tree(PAGE)
        works = [self.ours] if peer is None else [self.ours, self.theirs(peer)]
        times = interleave(*works, num_rounds=num_rounds)
        us = [1e6 * seconds / self.per for seconds in times]
        if peer is None:
            return Row(name=self.name, ours=us[0], against=MISSING)
        return Row(
            name=self.name,
            ours=us[0],
            baseline=us[1],
            against="SGLang",
            bound=self.bound,
        )


def run(num_rounds: int) -> Iterator[Row]:
    """Compare with SGLang's Python tree, if it is installed."""
    for contest in (_match(), _insert(), _deep()):
        yield contest.run(num_rounds)
    yield from _calls(num_rounds)


class OurTree:
    """Our tree, used as a request's restore and commit use it."""

    def __init__(self) -> None:
        layout = inputs.layout()
        self._tree = Tree(layout)
        self._root = self._tree.root(root_hash(layout))

    def match(self, key: bytes) -> array[int]:
        walk = self._tree.walk(self._root, key)
        return self._tree.pages_on(walk.path[-1], 0)

    def insert(self, key: bytes, pages: array[int]) -> None:
        tree = self._tree
        walk = tree.walk(self._root, key)
        above = tree.end_at(self._root, walk, walk.covered)
        leaf = tree.attach(above, key[above.end * tree.stride :])
        leaf.pages[0] = pages[leaf.start : leaf.end]


def _pages(num_tokens: int) -> array[int]:
    return array("i", range(num_tokens // PAGE))


def _match() -> Contest:
    prompt, key, ours = inputs.tokens(PROMPT), inputs.packed(PROMPT), OurTree()
    for end in (SYSTEM, PROMPT):
        ours.insert(key[: 4 * end], _pages(end))
    assert ours.match(key) == _pages(PROMPT)

    def theirs(tree: SglangTree) -> Work:
        for end in (SYSTEM, PROMPT):
            tree.insert(tree.pack(prompt[:end]), tree.slots(end))
        tokens = tree.pack(prompt)
        assert len(tree.match(tokens)) == PROMPT
        return repeat(lambda: tree.match(tokens), 100)

    name = f"match {PROMPT} tokens, 2 nodes"
    return Contest(name, 1 / 4, repeat(lambda: ours.match(key), 100), theirs)


def _insert() -> Contest:
    prompt, pages, ours = inputs.tokens(PROMPT), _pages(PROMPT), OurTree()
    ours.insert(inputs.packed(SYSTEM), _pages(SYSTEM))
    serial = itertools.count(1_000_000)

    def prompts() -> list[list[int]]:
        """Return prompts that leave the tree where the system prompt ends."""
        body, tail = prompt[:SYSTEM], prompt[SYSTEM + 1 :]
        return [[*body, next(serial), *tail] for _ in range(NUM_INSERTS)]

    def insert_ours() -> float:
        keys = [struct.pack(f"<{PROMPT}i", *tokens) for tokens in prompts()]
        with (watch := Stopwatch()):
            for key in keys:
                ours.insert(key, pages)
        return watch.seconds

    def theirs(tree: SglangTree) -> Work:
        tree.insert(tree.pack(prompt[:SYSTEM]), tree.slots(SYSTEM))
        slots = tree.slots(PROMPT)

        def insert_theirs() -> float:
            keys = [tree.pack(tokens) for tokens in prompts()]
            with (watch := Stopwatch()):
                for key in keys:
                    tree.insert(key, slots)
            return watch.seconds

        return insert_theirs

    name = f"insert {PROMPT} tokens, a new leaf of {PROMPT - SYSTEM}"
    return Contest(name, 1 / 5, insert_ours, theirs, NUM_INSERTS)


def _deep() -> Contest:
    num_tokens = DEPTH * PIECE
    prompt, key, ours = inputs.tokens(num_tokens), inputs.packed(num_tokens), OurTree()
    ends = range(PIECE, num_tokens + 1, PIECE)
    for end in ends:
        ours.insert(key[: 4 * end], _pages(end))
    assert ours.match(key) == _pages(num_tokens)

    def theirs(tree: SglangTree) -> Work:
        for end in ends:
            tree.insert(tree.pack(prompt[:end]), tree.slots(end))
        tokens = tree.pack(prompt)
        assert len(tree.match(tokens)) == num_tokens
        return repeat(lambda: tree.match(tokens), 5)

    name = f"match {DEPTH} nodes of {PIECE} tokens, a node"
    return Contest(name, 1 / 3, repeat(lambda: ours.match(key), 5), theirs, DEPTH)


def _calls(num_rounds: int) -> Iterator[Row]:
    """Say what the calls cost that reach the tree; for information."""
    replica = Replica(inputs.layout(), {"kv": 4 * PROMPT // PAGE}, Bounds())
    body, serial = inputs.packed(PROMPT), itertools.count(1_000_000)

    def key() -> bytes:
        """Return a prompt that leaves the tree where the system prompt ends."""
        return body[: 4 * SYSTEM] + struct.pack("<i", next(serial)) + body[4 * SYSTEM :]

    opened_s, committed_s = [], []
    for turn in range(num_rounds):
        opening, committing = Stopwatch(), Stopwatch()
        for _ in range(NUM_CALLS):
            prompt = key()
            with opening:
                request = replica.calls.open(prompt)
                replica.calls.restore(request)
            replica.calls.extend(request, PROMPT)
            with committing:
                replica.calls.commit(request, PROMPT)
            assert request.hit == SYSTEM // PAGE or not turn
            replica.calls.abort(request)
            replica.take_effects()
        opened_s.append(opening.seconds / NUM_CALLS)
        committed_s.append(committing.seconds / NUM_CALLS)
    yield Row(
        name=f"Replica open + restore, {SYSTEM} of {PROMPT} tokens resident",
        ours=1e6 * median(opened_s),
    )
    yield Row(
        name=f"Replica commit of {PROMPT} tokens, {PROMPT - SYSTEM} of them new",
        ours=1e6 * median(committed_s),
    )
