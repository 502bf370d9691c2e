"""Rows contain each rank's compute time without waits, in a world of real workers."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from tests.support.nodes.supervised import small_training, supervised
from tests.support.ranks.recipes import SlowRankOne

pytestmark = pytest.mark.chaos


@pytest.mark.cell("P5", "slow rank")
def test_a_slow_rank_is_distinguished_from_waiting_ranks(tmp_path: Path) -> None:
    training = small_training(
        30, blocks=2, micro_batches=2, recipe="tests.support.ranks.recipes:SlowRankOne"
    )
    with supervised(tmp_path, training, standbys=0) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
    rows = [row for step, row in run.rows.items() if step > 5]
    by_rank = [median(row.compute_s[rank] for row in rows) for rank in range(4)]
    assert by_rank[1] >= SlowRankOne.takes_s
    others = [by_rank[rank] for rank in (0, 2, 3)]
    assert by_rank[1] - max(others) > SlowRankOne.takes_s / 2
    assert all(least > 0.0 for least in by_rank)
    assert all(sum(row.compute_s) / 4 <= row.step_time_s * 1.5 for row in rows)
    assert median(sum(row.compute_s) / 4 / row.step_time_s for row in rows) <= 1.0
