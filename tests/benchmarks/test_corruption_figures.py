"""The corruption benchmark counts missed flips, wrongly accused ranks and false alarms."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.corruption_figures import FlipResult, check_share, corruption_summary, flip_result

APART = 6
FLIP = {"rank": 1, "step": 9, "tensor": "moment"}


def incident(restored: int, lost: int = 0, *ranks: int, cause: str = "corruption") -> Any:
    return {
        "cause": cause,
        "restored_step": restored,
        "steps_lost": lost,
        "lost": [{"rank": rank, "cause": "corruption"} for rank in ranks],
    }


def test_a_flip_is_found_in_the_step_after_the_last_applied_step() -> None:
    assert flip_result("m", FLIP, [incident(8, 0, 1)], APART) == FlipResult(
        "m", "moment", 1, 9, 0, (1,)
    )
    assert flip_result("m", FLIP, [incident(8, 2, 1)], APART).within == 2


def test_the_accused_ranks_of_all_incidents_of_a_flip_are_combined() -> None:
    assert flip_result("m", FLIP, [incident(8), incident(8, 0, 1)], APART).named == (1,)
    assert flip_result("m", FLIP, [incident(8, 0, 0), incident(8, 0, 1)], APART).named == (0, 1)


def test_incidents_of_other_flips_and_other_causes_are_ignored() -> None:
    others = [incident(14, 0, 1), incident(2, 0, 1), incident(8, 0, 1, cause="crash")]
    assert flip_result("m", FLIP, others, APART).within is None


def test_missed_flips_wrong_accusations_and_unexplained_incidents_are_reported() -> None:
    right = FlipResult("m", "moment", 1, 9, 1, (1,))
    figures = corruption_summary(
        [
            right,
            FlipResult("m", "moment", 1, 15, None),
            FlipResult("m", "moment", 1, 21, 2, (0, 1)),
        ],
        others=1,
        healthy_steps=100,
        false_alarms=2,
        shares=[0.01, 0.02, 0.03],
        ratios=[1.1],
    )
    assert (figures.found_share, figures.named_share, figures.within_steps) == (
        0.6667,
        0.3333,
        2,
    )
    assert (figures.false_alarms, figures.overhead, figures.flips) == (3, 0.02, 3)


def test_the_check_time_is_divided_by_the_rest_of_the_step() -> None:
    assert check_share([(9.0, 8.0), (1.1, 0.1), (1.1, 0.1)], skip=1) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no step"):
        check_share([(1.0, 0.1)], skip=1)
