"""A mesh with replicas of the whole state: the same bits after faults, from living replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.chaos.conftest import Undisturbed
from tests.support.nodes.history_proof import assert_same_history, incidents
from tests.support.nodes.supervised import small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.spec import ModelSpec, ParallelSpec, TrainingSpec

pytestmark = pytest.mark.chaos
STEPS = 24
DROPOUT = ModelSpec(dim=64, layers=2, heads=4, kv_heads=2, sequence_length=64, dropout=0.1)


def replicated(*, dp_shard: int = 1, tp: int = 1) -> TrainingSpec:
    parallel = ParallelSpec(dp_replicate=2, dp_shard=dp_shard, tp=tp)
    return small_training(STEPS, micro_batches=2, parallel=parallel, model=DROPOUT)


def undisturbed_run(folder: Path, training: TrainingSpec) -> Undisturbed:
    folder.mkdir()
    with supervised(folder, training, standbys=0) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        return Undisturbed(dict(run.digests), dict(run.rows))


def test_a_lost_node_is_replaced_from_its_living_replica(tmp_path: Path) -> None:
    """No partner copies state that a replica on another node has. The replacement has exactly the
    lost rank's state, including dropout."""
    training = replicated(tp=2)
    undisturbed = undisturbed_run(tmp_path / "undisturbed", training)
    with supervised(tmp_path, training, standbys=1) as run:
        run.wait_step(10)
        assert not any(run.of(EventKind.ATTEMPT_RUNNING)[0]["members"][0]["partners"])
        run.agents.kill_node(run.seat_of(3))
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        shards = sorted(run.remote_root.glob("step-*/__*_0.distcp"))
        sizes = [path.stat().st_size for path in shards]
        assert max(sizes[2:]) < min(sizes[:2]) / 10  # shared state is saved once
        (incident,) = incidents(run)
        assert incident["tiers"]["3"] == "reshard", run.story()
        assert incident["steps_lost"] <= 1
