"""Ray Train's side has as many workers as the job has ranks, whatever else its spec says."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.conditions import load_job, world_size
from benchmarks.elastic import ELASTIC_JOB
from benchmarks.recovery import SMALL_JOB, ray_train_spec


@pytest.mark.parametrize(
    "parallel",
    [
        {"dp_shard": 4},
        {"pp": 2, "dp_shard": 2, "schedule": "1f1b", "stages_per_rank": None, "zero": None},
        {"pp": 2, "tp": 2, "schedule": "zero_bubble", "stages_per_rank": 2},
        {"dp_shard": 4, "zero": 3},
        {"dp_replicate": 2, "tp": 2, "sequence_parallel": True, "vocabulary_parallel": False},
        {"dp_shard": 2, "cp": 2, "context_method": "ring"},
    ],
    ids=" ".join,
)
def test_only_the_axes_of_a_mesh_make_ranks(parallel: dict[str, Any]) -> None:
    assert world_size({"parallel": parallel}) == 4
    job = {**load_job(SMALL_JOB), "parallel": parallel}
    assert world_size(ray_train_spec(job)) == 4


def test_a_mesh_that_is_not_in_numbers_has_no_world_size() -> None:
    with pytest.raises(ValueError, match="dp_shard"):
        world_size(load_job(ELASTIC_JOB))
