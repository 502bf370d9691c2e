"""What a step's row says beyond its fields."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.service.fake_cluster import row

ROW = replace(row(1, 1), step_time_s=2.0, loader_wait_s=0.0, compute_s=(1.0, 2.0))


def test_the_share_of_waiting_is_the_mean_of_the_ranks() -> None:
    assert ROW.waiting_share == pytest.approx(0.25)
    assert replace(ROW, step_time_s=1.0).waiting_share == 0.0


@pytest.mark.parametrize("compute_s", [(), (1.0,)])
def test_ranks_without_peers_or_times_have_no_share(compute_s: tuple[float, ...]) -> None:
    assert replace(ROW, compute_s=compute_s).waiting_share is None
