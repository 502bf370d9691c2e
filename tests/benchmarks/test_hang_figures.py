"""The detection benchmark reports the maximum, and a missed hang counts as the worst result."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from benchmarks.hang_figures import HangTrial, detection_summary, high
from benchmarks.recipes.hang_recipe import phase_times

RIGHT = HangTrial("stop", "dp_shard 4", 1, "forward", 0.2, 1.5, suspects=(1, 3), accused=(1,))


def test_a_verdict_is_divided_by_the_phase_or_the_floor_whichever_is_longer() -> None:
    assert RIGHT.over(floor_s=1.0) == 1.5
    assert replace(RIGHT, p999_s=3.0).over(floor_s=1.0) == 0.5
    assert replace(RIGHT, verdict_s=None).over(floor_s=1.0) == inf


def test_a_second_accused_rank_beside_the_right_one_is_not_exact() -> None:
    both = replace(RIGHT, accused=(1, 3))
    wrong = replace(RIGHT, suspects=(2,), accused=(2,))
    found = detection_summary([RIGHT, both, wrong, RIGHT], 1.0, 0, 1000)
    assert found.hangs is not None
    assert (found.hangs.suspect_share, found.hangs.exact_share) == (0.75, 0.5)


def test_an_undetected_hang_is_missed_and_the_worst_result() -> None:
    found = detection_summary([RIGHT, replace(RIGHT, verdict_s=None)], 1.0, 2, 1000)
    assert found.hangs is not None and found.false_alarms == 2
    assert (found.hangs.missed, found.hangs.greatest_s, found.hangs.greatest_over) == (
        1,
        None,
        None,
    )


def test_the_high_quantile_of_few_values_is_the_maximum() -> None:
    assert high([3.0, 1.0, 2.0]) == 3.0
    assert high([0.0] * 1998 + [5.0, 9.0]) == 0.0
    with pytest.raises(ValueError, match="nothing"):
        high([])


def test_phase_times_exclude_the_first_steps_of_each_process(tmp_path: Path) -> None:
    (tmp_path / "0-1").write_text("forward 9.0 agree 8.0\nforward 1.0 agree 2.0\n")
    (tmp_path / "1-2").write_text("forward 7.0\nforward 3.0 forward 4.0\n")
    found = phase_times(tmp_path, cold_steps=1)
    assert {name: sorted(times) for name, times in found.items()} == {
        "forward": [1.0, 3.0, 4.0],
        "agree": [2.0],
    }
