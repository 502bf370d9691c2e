"""The times of a program's ranks are compared over the same stretch, whatever polls bring them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.supervisor.rank_progress import ProgramRankTimes
from holdfast_workers.protocol.messages import Beat


def beat(rank: int, steps: int, computed_s: float, attempt: int = 1) -> Beat:
    return Beat(
        rank=rank,
        worker=f"w{rank}",
        pid=1,
        attempt=attempt,
        step=steps,
        phase="step",
        micro_batch=0,
        age_s=0.0,
        limit_s=1.0,
        steps_timed=steps,
        computed_s=computed_s,
    )


@given(
    seconds=st.lists(st.floats(0.01, 2.0), min_size=1, max_size=5),
    polls=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=60),
)
def test_a_rank_that_takes_the_same_time_for_every_step_is_measured_by_it(
    seconds: list[float], polls: list[tuple[int, int]]
) -> None:
    times, made, last = ProgramRankTimes(), [1] * len(seconds), 0
    for number, (any_rank, more) in enumerate(polls):
        rank = any_rank % len(seconds)
        made[rank] += more
        row = times.add([beat(rank, made[rank], made[rank] * seconds[rank])], len(seconds), number)
        if row is not None:
            assert row.compute_s == pytest.approx(seconds)
            assert row.step > last
            last = row.step


def test_nothing_is_compared_before_every_rank_has_stepped_or_across_attempts() -> None:
    times = ProgramRankTimes()
    assert times.add([beat(0, 5, 5.0), beat(1, 5, 5.0)], 2, 0.0) is None
    assert times.add([beat(0, 6, 6.0)], 2, 1.0) is None
    row = times.add([beat(1, 7, 9.0)], 2, 2.0)
    assert row is not None
    assert row.compute_s == (1.0, 2.0)
    assert times.add([beat(0, 1, 1.0, attempt=2), beat(1, 8, 11.0)], 2, 3.0) is None
    assert times.add([beat(0, 9, 9.0)], 2, 4.0) is None


def test_a_beat_without_times_changes_nothing() -> None:
    assert ProgramRankTimes().add([beat(0, 0, 0.0)], 1, 0.0) is None


def test_between_worlds_nothing_is_compared() -> None:
    assert ProgramRankTimes().add([], 0, 0.0) is None
    assert ProgramRankTimes().add([beat(0, 3, 1.0)], 0, 0.0) is None
