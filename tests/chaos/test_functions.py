"""A rank of a user function is killed: the survivors are called again and yield the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.nodes.history_proof import incidents, not_fired
from tests.support.nodes.supervised import SupervisedRun, supervised
from tests.support.ranks.functions import LAST_LINES

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.world_shape import WorldShape
from holdfast_workers.protocol.messages import StepRow
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


@dataclass(frozen=True)
class CalmRun:
    sharded: bool
    rows: dict[int, StepRow]


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
        ("replicated", [kill("backward", 0, 9)]),
        ("grows", [kill("memory", 1, 11), kill("agree", 0, 13), kill("committed", 1, 22)]),
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


def test_replicas_with_running_statistics_of_their_own_survive_a_killed_rank_and_a_lost_node(
    tmp_path: Path,
) -> None:
    """Each gets its own back, from its own memory or from its partner's."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    spec = training("everything").model_copy(update={"parallel": ParallelSpec(dp_replicate=2)})
    plan = [kill("agree", 1, 5), {**kill("agree", 1, 12), "action": "stop"}]
    with supervised(tmp_path / "a", spec, standbys=0, workers_per_node=1) as run:
        undisturbed = finished_digests(run)
    with supervised(tmp_path / "b", spec, standbys=1, workers_per_node=1, chaos=plan) as run:
        run.wait_step(11)
        run.agents.kill_node(run.seat_of(1))
        assert finished_digests(run) == undisturbed
        tiers = [incident["tiers"]["1"] for incident in incidents(run)]
        assert tiers == ["own_ram", "partner_ram"], run.story()
        assert max(incident["steps_lost"] for incident in incidents(run)) <= 1


def test_no_line_of_a_function_that_writes_much_at_its_end_is_lost(tmp_path: Path) -> None:
    spec = training("talkative")
    with supervised(tmp_path, spec, standbys=0, workers_per_node=1) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        run.wait(lambda: any(f"last line {LAST_LINES - 1}" in text for text in run.logs))
        assert sum("last line" in text for text in run.logs) == LAST_LINES


ELASTIC_STEPS = 120


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="sharded", marks=pytest.mark.soak),
        pytest.param(False, id="whole"),
    ],
)
def calm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CalmRun:
    """An undisturbed run on four ranks."""
    spec = elastic_training(sharded=request.param)
    folder = tmp_path_factory.mktemp("calm")
    with supervised(folder, spec, standbys=0, workers_per_node=1) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        return CalmRun(request.param, dict(run.rows))


@pytest.mark.parametrize("fewer", [3, pytest.param(2, marks=pytest.mark.soak)])
def test_a_function_is_called_again_on_fewer_and_on_more_ranks(
    tmp_path: Path, calm: CalmRun, fewer: int
) -> None:
    """Its state is resharded, and the global batch is the same although three ranks do not divide
    its four micro-batches."""
    spec = elastic_training(sharded=calm.sharded)
    shapes = tuple(WorldShape.of({"dp_shard": ranks, "tp": 1}, 1) for ranks in (4, fewer))
    config = {"shapes": shapes, "grow_after_s": 1.0}
    with supervised(tmp_path, spec, standbys=0, workers_per_node=1, config=config) as run:
        run.wait_step(15)
        lost = run.seat_of(3)
        run.agents.kill_node(lost)
        run.wait(lambda: len(incidents(run)) == 1)
        assert set(incidents(run)[0]["tiers"].values()) == {"reshard"}
        run.wait_step(run.newest_step() + 5)
        run.agents.return_node(lost)
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        sizes = [event["world_size"] for event in run.of(EventKind.ATTEMPT_FORMING)]
        assert sizes == [4, fewer, 4], run.story()
        assert run.logs.count("the loop has ended") == 4, "a change of the mesh ends no loop"
    assert sorted(run.rows) == list(range(1, ELASTIC_STEPS + 1))
    assert {row.own["world"] for row in run.rows.values()} == {4, fewer}
    for step, row in run.rows.items():
        undisturbed = calm.rows[step]
        assert row.samples == undisturbed.samples
        assert row.loss == pytest.approx(undisturbed.loss, rel=1e-4, abs=1e-6)
        assert row.grad_norm == pytest.approx(undisturbed.grad_norm, rel=1e-3, abs=1e-6)
        for name in ("turns", "average", "lr_of_schedule"):  # each a mean over the ranks
            assert row.own[name] == pytest.approx(undisturbed.own[name], rel=1e-12)


def elastic_training(*, sharded: bool) -> TrainingSpec:
    return training("elastic").model_copy(
        update={
            "train": TrainSpec(steps=ELASTIC_STEPS, global_batch=8, micro_batch=2),
            "parallel": ParallelSpec(dp_shard=4),
            "config": {"sharded": sharded, "slow_in": 2},
        }
    )
