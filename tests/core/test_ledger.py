"""Each page is in exactly one state, and changes hands only as the table says."""

from __future__ import annotations

from array import array
from itertools import product

import pytest
from hypothesis import given, strategies as st

from asyncache.core import InvariantError, PageState
from asyncache.core._ledger import Ledger

FREE, REQUEST, TREE, TRANSIT, QUARANTINE = PageState


def test_a_new_pool_is_free_and_gives_out_ascending_pages():
    ledger = Ledger(4)
    assert ledger.num_free == ledger.count(FREE) == 4
    assert list(ledger.take(3, REQUEST)) == [0, 1, 2]
    assert list(ledger.take(0, REQUEST)) == []
    assert (ledger.num_free, ledger.count(REQUEST)) == (1, 3)
    assert [ledger.state(page) for page in range(4)] == [REQUEST] * 3 + [FREE]


def test_pages_given_back_come_out_in_their_order_again():
    ledger = Ledger(6)
    pages = ledger.take(4, REQUEST)
    ledger.give(pages, REQUEST)
    assert list(ledger.take(6, TRANSIT)) == [0, 1, 2, 3, 4, 5]


def test_more_pages_than_are_free_cannot_be_taken():
    ledger = Ledger(2)
    with pytest.raises(InvariantError, match="pages are free 3 2"):
        ledger.take(3, REQUEST)


def test_a_page_that_its_holder_does_not_hold_is_noticed():
    ledger = Ledger(2)
    pages = ledger.take(1, REQUEST)
    with pytest.raises(InvariantError, match="a page is where its holder says 0 1"):
        ledger.give(pages, TREE)


def test_a_page_cannot_be_given_back_twice():
    ledger = Ledger(2)
    pages = ledger.take(1, REQUEST)
    ledger.give(pages, REQUEST)
    with pytest.raises(InvariantError, match="a page is where its holder says 0 0"):
        ledger.give(pages, REQUEST)


def test_pages_become_free_through_give_alone():
    ledger = Ledger(2)
    pages = ledger.take(1, REQUEST)
    with pytest.raises(InvariantError, match="pages become free through give"):
        ledger.move(pages, REQUEST, FREE)


LEGAL = {
    (FREE, REQUEST),
    (FREE, TRANSIT),
    (REQUEST, TREE),
    (TRANSIT, TREE),
    (REQUEST, QUARANTINE),
    (TRANSIT, QUARANTINE),
}


@pytest.mark.parametrize(
    ("was", "now"), list(product(PageState, [REQUEST, TREE, TRANSIT, QUARANTINE]))
)
def test_pages_change_hands_only_as_the_table_says(was, now):
    ledger = Ledger(1)
    pages = array("i", [0])
    if was in {REQUEST, TRANSIT}:
        ledger.take(1, was)
    elif was in {TREE, QUARANTINE}:
        ledger.take(1, REQUEST)
        ledger.move(pages, REQUEST, was)
    if (was, now) in LEGAL:
        ledger.move(pages, was, now)
        assert ledger.state(0) is now
    else:
        with pytest.raises(InvariantError, match="a page may change hands so"):
            ledger.move(pages, was, now)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), max_size=30))
def test_the_sum_over_states_is_the_pool(moves):
    ledger, held = Ledger(8), []
    for num_pages, choice in moves:
        if choice < 3 and ledger.num_free >= num_pages:
            held.append((ledger.take(num_pages, REQUEST), REQUEST))
        elif held:
            pages, was = held.pop(choice % len(held))
            if was is REQUEST and choice == 3:
                ledger.move(pages, REQUEST, TREE)
                held.append((pages, TREE))
            else:
                ledger.give(pages, was)
        places = bytearray(8)
        for pages, was in held:
            for page in pages:
                places[page] = was
        ledger.check(bytes(places))
        assert sum(ledger.count(state) for state in PageState) == 8
        out = [page for pages, _ in held for page in pages]
        assert len(set(out)) == len(out) == 8 - ledger.num_free


@pytest.mark.parametrize(
    ("harm", "law"),
    [
        (lambda ledger: ledger._num.__setitem__(FREE, 9), "counts match"),
        (lambda ledger: ledger._free.append(0), "free pages are listed once"),
        (lambda ledger: ledger._free.__setitem__(0, 0), "listed pages are free"),
        (lambda ledger: ledger._state.__setitem__(0, TREE), "knows the place.*TREE"),
    ],
)
def test_a_ledger_that_lost_count_is_noticed(harm, law):
    ledger = Ledger(4)
    ledger.take(1, REQUEST)
    harm(ledger)
    with pytest.raises(InvariantError, match=law):
        ledger.check(bytes([REQUEST, FREE, FREE, FREE]))
