"""A rank of a Ray Train function is killed: the run goes on from the newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.nodes.supervised import SupervisedRun, supervised

from holdfast.integrations.ray_train.run_folder import read_list, read_result
from holdfast_workers.spec import (
    CheckpointSpec,
    MemoryTierSpec,
    ParallelSpec,
    RayRunSpec,
    RemoteTierSpec,
    TrainingSpec,
)

pytestmark = pytest.mark.chaos
EPOCHS = 8


def training(folder: Path, memory: int, **config: Any) -> TrainingSpec:
    return TrainingSpec(
        ray_train="tests.support.programs.ray_functions:train",
        config={"epochs": EPOCHS, **config},
        ray_run=RayRunSpec(storage_path=str(folder), name="run", num_to_keep=2),
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
    with supervised(folder, spec, standbys=0, config={"runs_program": True}, **options) as run:
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
    assert {row.attempt for row in run.all_rows} == {1, 2, 3}, run.story()
    folder = tmp_path / "b" / "s" / "run"
    assert [each.index for each in read_list(folder)] == [EPOCHS - 1, EPOCHS]
    result = read_result(folder)
    assert result is not None
    assert result["return_value"] == {"loss": losses[EPOCHS]}
