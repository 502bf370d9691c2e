"""The invariants after any fault: the same bits, and every sample exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.chaos.conftest import Undisturbed
from tests.support.nodes.supervised import SupervisedRun

from holdfast_service.job_model.mesh_history import MeshSpan, mesh_history, until
from holdfast_service.job_model.node_range import mesh_key, shapes_by_mesh
from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.world_shape import WorldShape
from holdfast_workers.data.corpus import open_corpus
from holdfast_workers.data.sample_order import samples_at, samples_digest
from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.spec import TrainingSpec


def assert_same_history(run: SupervisedRun, undisturbed: Undisturbed) -> None:
    """Per-step digests, losses and samples equal the undisturbed run's (P2, P3)."""
    steps = run.training.train.last_step
    assert sorted(run.rows) == list(range(1, steps + 1)), run.story()
    assert run.digests == {s: undisturbed.digests[s] for s in range(steps + 1)}, run.story()
    for step, row in run.rows.items():
        assert row.samples == undisturbed.rows[step].samples
        assert row.loss == undisturbed.rows[step].loss


def assert_each_sample_once(
    training: TrainingSpec, rows: Mapping[int, StepRow], cache_dir: Path
) -> None:
    """The rows from step 1 on have the samples that the seed alone gives their steps (P3)."""
    length = training.model.sequence_length
    count = open_corpus(training.data, cache_dir, length).samples(length)
    batch = training.train.global_batch
    seen: list[int] = []
    for step in range(1, len(rows) + 1):
        positions = np.arange((step - 1) * batch, step * batch)
        samples = samples_at(positions, count, training.train.seed)
        assert rows[step].samples == f"{samples_digest(positions, samples):016x}", step
        seen.extend(samples.tolist())
    assert len(set(seen[:count])) == len(seen[:count]) > 0  # no sample twice in an epoch


def incidents(run: SupervisedRun) -> list[dict[str, Any]]:
    return run.of(EventKind.INCIDENT_CLOSED)


def processes(run: SupervisedRun) -> list[dict[int, int]]:
    """The process id of each rank, for each attempt that ran."""
    return [
        {member["rank"]: member["pid"] for member in attempt["members"]}
        for attempt in run.of(EventKind.ATTEMPT_RUNNING)
    ]


def slept_on(incident: dict[str, Any]) -> int:
    """How many survivors had to be killed because gloo lost their wake-up (see `WorkerPool`)."""
    return str(incident["evidence"]).count("slept on after its connections were cut")


def not_fired(run: SupervisedRun, plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Planned faults that never fired: a test without its faults proves nothing."""
    fired = {int(path.name.split(".")[2]) for path in run.folder.glob("chaos.json.*.*")}
    return [fault for index, fault in enumerate(plan) if index not in fired]


def meshes(run: SupervisedRun) -> tuple[MeshSpan, ...]:
    """The mesh history of a run."""
    formed = run.of(EventKind.ATTEMPT_FORMING)
    history = mesh_history((event["restore"]["step"], event["mesh"]) for event in formed)
    return until(history, run.training.train.last_step)


def scheduled(
    run: SupervisedRun, shapes: Sequence[WorldShape]
) -> tuple[tuple[int, WorldShape], ...]:
    """The mesh history of a run as the schedule of its replay."""
    by_mesh = shapes_by_mesh(shapes)
    return tuple((span.after_step, by_mesh[mesh_key(span.mesh)]) for span in meshes(run))
