"""Every kind of mesh under faults, in real processes: named, recovered in place, the same bits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import Undisturbed
from tests.support.nodes.history_proof import (
    assert_same_history,
    incidents,
    not_fired,
    processes,
    slept_on,
)
from tests.support.nodes.supervised import small_training, supervised

from holdfast_workers.spec import DetectionSpec, ParallelSpec, TrainingSpec

pytestmark = pytest.mark.chaos

STEPS = 32
KILLS = [
    {"action": "kill", "point": "agree", "rank": 1, "step": 3},
    {"action": "kill", "point": "forward", "rank": 0, "step": 7},
    {"action": "kill", "point": "backward", "rank": 3, "step": 11},
    {"action": "kill", "point": "optimizer", "rank": 2, "step": 15},
    {"action": "kill", "point": "restore", "rank": 1, "step": None},  # in that recovery
]
HANGS = [
    {"action": "stop", "point": "backward", "rank": 2, "step": 20},
    {"action": "loop", "point": "forward", "rank": 1, "step": 26},
]
MESHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pipeline and shards": ({"pp": 2, "dp_shard": 2}, {}),
    "pipeline and tensors": ({"pp": 2, "tp": 2, "schedule": "zero_bubble"}, {"layers": 4}),
    "replicas and shards": ({"dp_replicate": 2, "dp_shard": 2}, {}),
    "replicas and tensors": ({"dp_replicate": 2, "tp": 2}, {}),
    "ring and shards": ({"dp_shard": 2, "cp": 2, "context_method": "ring"}, {}),
    "sequence, vocabulary, recomputed": (
        {"dp_shard": 2, "tp": 2, "sequence_parallel": True, "vocabulary_parallel": True},
        {"activation_checkpointing": "selective"},
    ),
}
"""Name -> the section `parallel`, and what the model has besides."""


def training_on(name: str) -> TrainingSpec:
    parallel, model = MESHES[name]
    spec = small_training(
        STEPS,
        blocks=2,
        micro_batches=2,
        parallel=ParallelSpec(**parallel),
        detection=DetectionSpec(hang_floor_s=0.5),
    )
    changes = {"sequence_length": 32, "dropout": 0.1, **model}
    return spec.model_copy(update={"model": spec.model.model_copy(update=changes)})


def undisturbed_run(folder: Path, training: TrainingSpec) -> Undisturbed:
    with supervised(folder, training, standbys=0) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        return Undisturbed(dict(run.digests), dict(run.rows))


IN_GATE = "pipeline and shards"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == IN_GATE else pytest.mark.soak) for name in MESHES],
)
def test_ranks_of_every_mesh_may_die_and_hang(tmp_path: Path, name: str) -> None:
    training, plan = training_on(name), [*KILLS, *HANGS]
    for folder in (quiet := tmp_path / "quiet", faults := tmp_path / "faults"):
        folder.mkdir()
    expected = undisturbed_run(quiet, training)
    with supervised(faults, training, standbys=0, chaos=plan) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert not not_fired(run, plan)
        assert_same_history(run, expected)
        closed = incidents(run)
        assert max(incident["steps_lost"] for incident in closed) <= 1
        lost = [loss for incident in closed for loss in incident["lost"]]
        assert {(loss["cause"], loss["rank"]) for loss in lost if loss["cause"] == "hang"} == {
            ("hang", hang["rank"]) for hang in HANGS
        }, run.story()
        pairs = pairwise(processes(run))
        replaced = sum(before[rank] != after[rank] for before, after in pairs for rank in before)
        assert replaced <= len(plan) + sum(map(slept_on, closed)), run.story()
