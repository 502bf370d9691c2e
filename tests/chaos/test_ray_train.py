"""A rank of a Ray Train function is killed: the run goes on from the newest checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.nodes.supervised import SupervisedRun, supervised

from holdfast.integrations.ray_train.run_folder import read_list, read_result
from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_workers.spec import (
    CheckpointSpec,
    MemoryTierSpec,
    ParallelSpec,
    ProgramSpec,
    RayRunSpec,
    RemoteTierSpec,
    TrainingSpec,
)

pytestmark = pytest.mark.chaos
EPOCHS = 8


def training(storage: Path, memory: int, **config: Any) -> TrainingSpec:
    return TrainingSpec(
        ray_train="tests.support.programs.ray_functions:train",
        config={"epochs": EPOCHS, **config},
        ray_run=RayRunSpec(storage_path=str(storage), name="run", num_to_keep=2),
        parallel=ParallelSpec(dp_shard=2),
        checkpoint=CheckpointSpec(
            memory=MemoryTierSpec(every_steps=memory), remote=RemoteTierSpec(every_steps=0)
        ),
    )


def run_to_end(
    folder: Path, spec: TrainingSpec, *, workers_per_node: int = 2
) -> tuple[SupervisedRun, dict[int, float]]:
    """The run, and the loss of each epoch."""
    folder.mkdir()
    options: dict[str, Any] = {"workers_per_node": workers_per_node}
    with supervised(folder, spec, standbys=0, **options) as run:
        end = run.wait_end()
        assert end["outcome"] == "SUCCEEDED", run.story()
        return run, {step: row.loss for step, row in run.rows.items()}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of an unbroken run."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    return run_to_end(folder, training(folder / "s", 0))[1]


@pytest.mark.parametrize(
    ("memory", "workers_per_node", "loses_storage"), [(0, 2, False), (1, 1, True)]
)
def test_a_run_with_killed_ranks_has_the_losses_of_an_unbroken_run(
    tmp_path: Path,
    calm: dict[int, float],
    memory: int,
    workers_per_node: int,
    loses_storage: bool,
) -> None:
    kills = [[1, 3, 0], [0, 6, 1]]
    spec = training(tmp_path / "b" / "s", memory, kills=kills, loses_storage=loses_storage)
    run, losses = run_to_end(tmp_path / "b", spec, workers_per_node=workers_per_node)
    assert losses == calm
    assert sorted(calm) == list(range(1, EPOCHS + 1))
    first = {row.attempt: row.step for row in reversed(run.all_rows)}
    assert first == {1: 1, 2: 4, 3: 7}, run.story()
    folder = tmp_path / "b" / "s" / "run"
    assert [each.index for each in read_list(folder)] == [EPOCHS - 1, EPOCHS]
    result = read_result(folder)
    assert result is not None
    assert result["return_value"] == {"loss": losses[EPOCHS]}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a run's ranks, one on each of two nodes, wrote of their calls."""
    folder = tmp_path_factory.mktemp("calls")
    spec = training(folder / "storage", 1, folder=str(folder)).model_copy(
        update={"ray_train": "tests.support.programs.ray_functions:all_calls"}
    )
    run_to_end(folder / "run", spec, workers_per_node=1)
    return folder


def test_the_context_has_the_attributes_of_each_rank(calls: Path) -> None:
    for rank in range(2):
        found = json.loads((calls / "describe" / f"{rank}.json").read_text())
        assert found == {
            "world_rank": rank,
            "world_size": 2,
            "local_rank": 0,
            "local_world_size": 1,
            "node_rank": rank,
            "experiment": "run",
            "storage": str(calls / "storage" / "run"),
            "device": "cpu",
            "word": "of 0",
            "preemption": None,
            "checkpoint": None,
            "reported": 0,
            "config": {"folder": str(calls / "describe")},
        }


def test_parts_of_any_ranks_become_one_checkpoint_with_the_metrics_of_rank_0(calls: Path) -> None:
    newest = calls / "storage" / "run" / "checkpoint_000002"
    for rank in range(2):
        found = json.loads((calls / "report_three" / f"{rank}.json").read_text())
        assert found["reported"] == [
            {"metrics": {"number": 1}, "files": ["part-1"]},
            {"metrics": {"number": 2}, "files": ["part-0", "part-1"]},
        ]
        assert found["newest"] == str(newest)
    assert (newest / "part-1").read_text() == "2 of 1"


def test_a_part_that_cannot_be_saved_fails_the_report_on_all_ranks(calls: Path) -> None:
    for rank in range(2):
        error = (calls / "fail_to_report" / f"{rank}.txt").read_text()
        assert error.startswith("ReportFailed: ")
        assert "rank 1: " in error and "gone" in error and "rank 0: " not in error


def test_a_function_that_does_not_look_ends_after_a_checkpoint_when_it_is_to_stop(
    tmp_path: Path,
) -> None:
    spec = training(tmp_path / "s", 0).model_copy(
        update={
            "ray_train": "tests.support.programs.ray_functions:report_for_ever",
            "program": ProgramSpec(grace_s=120),
        }
    )
    with supervised(tmp_path, spec, standbys=0) as run:
        run.wait_step(3)
        run.stop(StopKind.PAUSE, within_s=600.0)
        run.wait(lambda: bool(run.of(EventKind.ENDED)))  # long before the grace is over
        saved = read_list(tmp_path / "s" / "run")
        assert saved[-1].index >= run.newest_step() >= 3
        assert saved[-1].metrics == {"number": saved[-1].index}
