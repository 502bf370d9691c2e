"""Batches that are built ahead: the same as at their step, in a thread that starts late."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.recipes.batches_ahead import AHEAD, BatchesAhead


@given(st.lists(st.integers(0, 8), max_size=20))
def test_each_step_gets_the_batch_of_its_window_whatever_was_built_ahead(
    windows: list[int],
) -> None:
    batches = BatchesAhead(lambda window: window * window)
    for window in windows:
        later = [window + 1, window + 2, window + 3]
        assert batches.get(window, later).result(60) == window * window
    batches.close()


def test_the_next_batches_are_built_while_a_step_computes() -> None:
    built: list[int] = []
    batches = BatchesAhead(built.append)
    batches.get(0, [1, 2, 3]).result(60)
    batches.get(1, [2, 3, 4]).result(60)
    batches.get(2, [3, 4, 5]).result(60)
    batches.get(3, [4]).result(60)
    batches.get(2 + AHEAD, []).result(60)
    assert built == [0, 1, 2, 3, 4]
    batches.close()


def test_an_error_belongs_to_its_step_and_the_next_one_goes_on() -> None:
    def build(window: int) -> int:
        if window == 1:
            raise ValueError("shard 7 is damaged")
        return window

    batches = BatchesAhead(build)
    assert batches.get(0, [1, 2]).result(60) == 0
    with pytest.raises(ValueError, match="shard 7"):
        batches.get(1, [2]).result(60)
    assert batches.get(2, []).result(60) == 2
    batches.close()


def test_no_thread_is_started_before_the_first_batch() -> None:
    before = threading.active_count()
    batches = BatchesAhead(lambda window: window)
    assert threading.active_count() == before
    batches.close()
