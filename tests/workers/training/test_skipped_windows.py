"""Each window is read by one step or is in the ledger; a state stores the windows it skipped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.training.skipped_windows import Ledger

RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 6)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=8,
)


@given(ranges=RANGES, steps=st.integers(1, 60))
def test_each_window_is_read_once_or_is_in_the_ledger(
    ranges: list[tuple[int, int]], steps: int
) -> None:
    ledger = Ledger.of(ranges)
    read = [ledger.window(step) for step in range(1, steps + 1)]
    passed = [window for window in range(read[-1] + 1) if window in ledger]
    assert sorted(read + passed) == list(range(read[-1] + 1))
    assert read == sorted(read)


@given(ranges=RANGES)
def test_a_ledger_holds_exactly_the_given_windows(ranges: list[tuple[int, int]]) -> None:
    ledger = Ledger.of(ranges)
    windows = {window for start, end in ranges for window in range(start, end)}
    assert {window for window in range(100) if window in ledger} == windows
    assert ledger.windows == ledger.count(0, 100) == len(windows)
    neighbours = zip(ledger.ranges, ledger.ranges[1:], strict=False)
    assert all(before[1] < after[0] for before, after in neighbours)


@given(first=RANGES, second=RANGES)
def test_the_union_of_two_ledgers_holds_the_windows_of_both(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    assert Ledger.of(first) | Ledger.of(second) == Ledger.of([*first, *second])


@given(ranges=RANGES, step=st.integers(1, 40))
def test_windows_ahead_change_neither_past_windows_nor_the_state(
    ranges: list[tuple[int, int]], step: int
) -> None:
    ledger = Ledger.of(ranges)
    passed = ledger.passed(step)
    assert all(passed.window(s) == ledger.window(s) for s in range(1, step + 1))
    assert passed.passed(step) == passed
    assert (passed | ledger) == ledger


def test_the_state_of_step_0_has_skipped_no_window() -> None:
    assert Ledger(((0, 3),)).passed(0) == Ledger()
    assert Ledger(((0, 3),)).window(1) == 3


def test_a_window_before_the_first_is_refused() -> None:
    with pytest.raises(ValueError, match="no window -1"):
        Ledger.of([(-1, 2)])
