"""Nodes join, leave and drain in any order, and faults occur: each sample is read once, the global
batch is constant, and an undisturbed replay of the same meshes has the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.faults.elastic_storm import ElasticStorm
from tests.support.nodes.history_proof import meshes, scheduled
from tests.support.nodes.supervised import MICRO_BATCH, SupervisedRun, small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_service.placement.world_shape import WorldShape
from holdfast_workers.spec import CheckpointSpec, MemoryTierSpec, ParallelSpec, RemoteTierSpec

pytestmark = [pytest.mark.chaos, pytest.mark.soak]

SHAPES = tuple(WorldShape.of({"dp_shard": shards, "tp": 2}, 2) for shards in (4, 3, 2, 1))
TRAINING = small_training(
    100_000,  # more than a test waits for
    blocks=2,
    parallel=ParallelSpec(dp_shard=4, tp=2),
    checkpoint=CheckpointSpec(
        memory=MemoryTierSpec(every_steps=1), remote=RemoteTierSpec(every_steps=20, keep=2)
    ),
)
PATIENT = {
    "shapes": SHAPES,
    "grow_after_s": 0.2,
    "window_s": 1.0,
    "max_failures": 100_000,
    "max_preemptions": 100_000,
    "max_without_progress": 100_000,
    "wait_for_replacement_s": 600.0,
}


@pytest.mark.parametrize(
    ("seed", "events"),
    [
        pytest.param(1, 12, id="short", marks=pytest.mark.timeout(600)),
        pytest.param(2, 220, id="long", marks=pytest.mark.timeout(7200)),
    ],
)
def test_a_storm_of_joins_losses_drains_and_faults_has_the_bits_of_its_replay(
    tmp_path: Path, seed: int, events: int
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with supervised(first, TRAINING, standbys=0, config=PATIENT) as run:
        run.wait_step(5)
        storm = ElasticStorm(run, seed, events)
        storm.cause_all()
        made = len(run.all_rows)
        run.wait(lambda: len(run.all_rows) >= made + 8, 240.0)
        last = end(run)
        history, plan = meshes(run), scheduled(run, SHAPES)
        sizes = [event["world_size"] for event in run.of(EventKind.ATTEMPT_FORMING)]
        root = run.agents.root
    print(f"{storm.summary()}; {last} steps, {len(history)} spans, {len(sizes)} attempts")
    assert not root.exists()
    assert len(set(sizes)) >= 2, sizes
    config = {**PATIENT, "schedule": plan}
    with supervised(second, TRAINING, standbys=0, config=config) as replay:
        replay.wait_step(last, 120.0 + last)
        end(replay)
        assert [span for span in meshes(replay) if span.after_step < last] == [*history]
        assert not any(incident["steps_lost"] for incident in replay.of(EventKind.INCIDENT_CLOSED))
    known = run.digests.items() & replay.digests.items()
    differing = {step for step, digest in run.digests.items() if replay.digests[step] != digest}
    assert not differing
    # A step before an unplanned change of the mesh has no digest if the fault came first.
    assert last + 1 - len(known) <= len(history)
    for step, row in run.rows.items():
        if step <= last:
            assert (row.samples, row.loss) == (replay.rows[step].samples, replay.rows[step].loss)
            assert row.tokens == 4 * MICRO_BATCH * TRAINING.model.sequence_length


def end(run: SupervisedRun) -> int:
    """Cancel the run; the number of its last step."""
    run.stop(StopKind.CANCEL, 120.0)
    return int(run.wait_end(180.0)["step"])
