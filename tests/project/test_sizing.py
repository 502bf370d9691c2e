"""The figures of the page on sizes follow from its formulas, and those from the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.node_needs import needs_of

PAGE = (Path(__file__).parents[2] / "docs/deploy/sizing.md").read_text()
SHM = re.compile(
    r"^\| ([\d.]+) billion \| (\d+) \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) GB \|$", re.M
)
DATABASE = re.compile(r"^\| ([\d.]+) s \| ([\d,]+) \| ([\d.]+) MB \|$", re.M)


def test_the_table_of_shared_memory_follows_its_formula() -> None:
    rows = SHM.findall(PAGE)
    assert len(rows) == 5
    for row in rows:
        billions, nodes, one, two, saving = map(float, row)
        share = billions / nodes
        assert (one, two, saving) == pytest.approx((48 * share, 72 * share, 12 * share))


def test_the_formula_is_that_of_the_check_of_a_node() -> None:
    model = {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "sequence_length": 2048}
    for copies in (1, 2):
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


def test_the_table_of_the_database_follows_its_formula() -> None:
    rows = DATABASE.findall(PAGE)
    assert len(rows) == 3
    for seconds, steps, megabytes in rows:
        number = 86_400 / float(seconds)
        assert int(steps.replace(",", "")) == round(number)
        assert float(megabytes) == pytest.approx(300 * number / 1e6, rel=0.01)
