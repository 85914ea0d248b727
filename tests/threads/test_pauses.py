"""Pauses: a short read is let pass whole, and nothing takes more than four fifths."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from asyncache.threads import _pauses as pauses
from asyncache.threads._pauses import Pauses

MOST_S = pauses._MOST_S


class Clock:
    """A clock, and an event of it: whoever waits has the time pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.idle_at_s = 0.0
        self.waited_s: list[float] = []
        monkeypatch.setattr(pauses.time, "monotonic", lambda: self.now_s)

    def is_set(self) -> bool:
        return self.now_s >= self.idle_at_s

    def wait(self, timeout_s: float) -> bool:
        self.waited_s.append(min(timeout_s, self.idle_at_s - self.now_s))
        self.now_s += self.waited_s[-1]
        return self.is_set()

    def read(self, read_s: float) -> None:
        """Have somebody read for so long from now on."""
        self.idle_at_s = max(self.idle_at_s, self.now_s + read_s)


@pytest.fixture
def clock():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Clock(monkeypatch)


def test_reads_that_are_short_and_rare_are_let_pass_whole(clock):
    writer = Pauses(clock)
    for _ in range(100):
        clock.read(0.002)
        writer.pause()
        assert clock.is_set()
        clock.now_s += 0.003  # a page is written, and then another
        writer.pause()
    assert sum(clock.waited_s) == pytest.approx(0.2)


@pytest.mark.parametrize("read_s", [0.0005, 0.005, 0.015, 0.019, 0.06, 1e9])
def test_a_fifth_of_the_time_is_left_whatever_reads_there_are(clock, read_s):
    writer, page_s = Pauses(clock), 0.0003
    begin_s = clock.now_s
    for _ in range(1000):
        if clock.is_set():
            clock.read(read_s)  # at once after the one before
        writer.pause()
        clock.now_s += page_s
    assert clock.now_s - begin_s <= MOST_S + 5 * 1000 * page_s + 1e-6


def test_those_that_wait_at_once_pay_once(clock):
    writer, second = Pauses(clock), 0
    clock.read(1e9)

    def wait(timeout_s: float) -> bool:
        nonlocal second
        if not second:
            second += 1
            clock.now_s += timeout_s / 2
            writer.pause()  # another thread comes to its next page
        clock.now_s = max(clock.now_s, 100.0 + MOST_S)
        return False

    clock.wait = wait
    writer.pause()
    assert second == 1
    assert writer._left_s == pytest.approx(0.0)


@given(
    st.lists(
        st.tuples(st.floats(0.0, 0.01), st.floats(0.0, 0.1), st.booleans()),
        max_size=40,
    )
)
def test_no_wait_is_longer_than_the_budget_nor_than_the_reads(steps):
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = Clock(monkeypatch)
        writer, worked_s = Pauses(clock), 0.0
        for work_s, read_s, is_read in steps:
            clock.now_s += work_s
            worked_s += work_s
            if is_read:
                clock.read(read_s)
            writer.pause()
            if clock.waited_s:
                assert clock.waited_s[-1] <= MOST_S + 1e-9
            assert sum(clock.waited_s) <= MOST_S + 4 * worked_s + 1e-6
