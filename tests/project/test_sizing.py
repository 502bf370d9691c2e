"""The formula of the page on sizes is that of the code."""

from __future__ import annotations

import pytest

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.node_needs import needs_of


@pytest.mark.parametrize("copies", [1, 2])
def test_the_formula_is_that_of_the_check_of_a_node(copies: int) -> None:
    model = {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "sequence_length": 2048}
    document = {
        "name": "sized",
        "model": model,
        "train": {"global_batch": 256, "micro_batch": 1},
        "parallel": {"dp_shard": 32},
        "resources": {"workers_per_node": 8, "gpus_per_worker": 1},
        "checkpoint": {"memory": {"copies": copies}},
    }
    spec = JobSpec.model_validate(document)
    memory = spec.mesh_limits.memory
    assert memory is not None
    parameters = memory.block * memory.blocks + memory.whole
    expected = 24 * (1 + copies) * parameters / 4
    assert needs_of(spec).shm_bytes == pytest.approx(expected, rel=0.01)
