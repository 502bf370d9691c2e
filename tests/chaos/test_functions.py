"""A rank of a user function is killed: the survivors are called again and yield the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.nodes.history_proof import incidents, not_fired
from tests.support.nodes.supervised import SupervisedRun, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.spec import (
    CheckpointSpec,
    MemoryTierSpec,
    ParallelSpec,
    RemoteTierSpec,
    TrainingSpec,
    TrainSpec,
)

pytestmark = pytest.mark.chaos
STEPS = 24


def training(name: str) -> TrainingSpec:
    return TrainingSpec(
        function=f"tests.support.ranks.functions:{name}",
        train=TrainSpec(steps=STEPS, global_batch=8, micro_batch=2),
        parallel=ParallelSpec(dp_shard=2),
        checkpoint=CheckpointSpec(
            memory=MemoryTierSpec(every_steps=1), remote=RemoteTierSpec(every_steps=0)
        ),
    )


def finished_digests(run: SupervisedRun) -> dict[int, str]:
    end = run.wait_end()
    assert end["outcome"] == "SUCCEEDED", run.story()
    assert sorted(run.digests) == list(range(STEPS + 1)), run.story()
    return dict(run.digests)


def kill(point: str, rank: int, step: int) -> dict[str, Any]:
    return {"point": point, "rank": rank, "step": step, "action": "kill"}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("everything", [kill("forward", 1, 6), kill("agree", 0, 12), kill("optimizer", 1, 18)]),
        ("sharded", [kill("backward", 0, 9)]),
    ],
)
def test_a_rank_of_a_function_may_die(
    tmp_path: Path, name: str, plan: list[dict[str, Any]]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with supervised(tmp_path / "a", training(name), standbys=0, workers_per_node=1) as run:
        undisturbed = finished_digests(run)
        samples = {step: row.samples for step, row in run.rows.items()}
    with supervised(
        tmp_path / "b", training(name), standbys=0, workers_per_node=1, chaos=plan
    ) as run:
        assert finished_digests(run) == undisturbed
        assert {step: row.samples for step, row in run.rows.items()} == samples
        assert not not_fired(run, plan)
        assert len(incidents(run)) == len(plan), run.story()
        assert max(incident["steps_lost"] for incident in incidents(run)) <= 1


def test_a_user_error_in_a_function_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    with supervised(tmp_path, training("mistaken"), standbys=0, workers_per_node=1) as run:
        end = run.wait_end()
    assert end["outcome"] == "FAILED"
    assert end["code"] == "user_error"
    assert "the user's own mistake" in end["traceback"]
    assert "in mistaken" in end["traceback"]
    assert len(run.of(EventKind.ATTEMPT_FORMING)) <= 2
    log = "\n".join(run.logs)
    assert "INFO    attempt 1: rank 1 of dp_shard 2 starts" in log
    assert 'ERROR   attempt 1: failed after step 4: KeyError: "the user\'s own mistake"' in log
    assert "in mistaken" in log
    assert "a name that is no text: \\udcff" in log
