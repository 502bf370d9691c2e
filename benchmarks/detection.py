"""Detection delay of hanging ranks, and accuracy of the accused rank.

    python -m benchmarks.detection --json [--trials N] [--healthy-steps N]

A real supervisor with real node agents and workers as local processes (no Ray, no REST) trains on
each mesh. In each trial one rank hangs in one way in one phase, both drawn by the seed: stopped, in
a C call that holds the GIL, in a loop, before a collective that the other ranks enter, or in a read
that is never answered. Measured is the time from the onset to the verdict, divided by the 99.9th
percentile of the phase, or by the floor of the learned limits if that is longer. The same job
continues with the next trial.

Then a healthy run: evaluations and loader stalls of some seconds on all ranks, an occasional remote
save, and in the last part (`--loaded`) twice as many busy processes as the machine has processors.
Every incident in it is a false alarm, of hangs or of differing replicas; the floor must stay above
the longest of its phases. Stock settings are described, not run: they wait for ten minutes and
more.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

from tests.support.nodes.supervised import SupervisedRun, supervised

from benchmarks.conditions import beside_load, describe_mesh, report, run
from benchmarks.hang_figures import DetectionResult, HangTrial, detection_summary, high
from benchmarks.recipes.hang_recipe import DELAY_ENV, TIMES_ENV, phase_times
from holdfast_service.job_model.supervisor_protocol import EventKind, SupervisorEvent
from holdfast_workers.spec import (
    CheckpointSpec,
    MemoryTierSpec,
    ModelSpec,
    ParallelSpec,
    RemoteTierSpec,
    TrainingSpec,
    TrainSpec,
)

Kind = Literal["stop", "gil", "loop", "collective", "read"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PHASES = ("forward", "backward", "agree", "optimizer")
MESHES = ({"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 8}, {"dp_shard": 4, "tp": 2})
MODEL = ModelSpec(dim=64, layers=2, heads=4, kv_heads=2, sequence_length=64)
TINY = ModelSpec(dim=16, layers=1, heads=4, kv_heads=2, sequence_length=16)
SMALL_MESH, HEALTHY_ON_FOUR = {"dp_replicate": 2}, 20
"""Most healthy steps run on two replicas, which compare their states. One in `HEALTHY_ON_FOUR` runs
on four ranks, where a step takes five times as long on two cores."""
ENDLESS = 10_000_000
RANKS_PER_NODE = 2
LEARN_STEPS, BETWEEN_STEPS, COLD_STEPS = 60, 12, 3
START_S, VERDICT_S, RECOVER_S = 180.0, 150.0, 120.0
DELAY_EVERY, SAVE_EVERY = 500, 400
RECOVERY = {"max_failures": ENDLESS}
STOCK = (
    "PyTorch aborts a collective after 10 min (NCCL) or 30 min (gloo) and names no rank; Ray "
    "Train 2.60 checks for hangs only if configured, needs 600 s to confirm one, and reports it"
)


def measure(
    trials: int = 20,
    meshes: int = len(MESHES),
    kinds: tuple[Kind, ...] = KINDS,
    healthy_steps: int = 100_000,
    loaded: float = 0.25,
    seed: int = 7,
) -> DetectionResult:
    """Measure hangs, then healthy steps.

    Args:
        trials: per kind and mesh
        meshes: use only the first of the four
        kinds: of hangs
        loaded: share of the healthy steps beside busy processes
    """
    report(f"stock, not run: {STOCK}")
    found: list[HangTrial] = []
    for mesh in MESHES[:meshes]:
        found += _hangs(mesh, list(kinds * trials), seed)
    on_four = healthy_steps // HEALTHY_ON_FOUR
    false_alarms = _healthy(MESHES[1], on_four, loaded)
    false_alarms += _healthy(SMALL_MESH, healthy_steps - on_four, loaded)
    floor_s = TrainingSpec().detection.hang_floor_s
    return detection_summary(found, floor_s, false_alarms, healthy_steps)


def _hangs(mesh: Mapping[str, int], kinds: list[str], seed: int) -> list[HangTrial]:
    """Run a hang of each element of `kinds` on one mesh, in an order drawn by the seed."""
    rng = random.Random(f"{seed} {sorted(mesh.items())}")
    rng.shuffle(kinds)
    found: list[HangTrial] = []
    with _training(mesh, {}) as (job, times):
        job.wait_step(LEARN_STEPS, START_S)
        for number, kind in enumerate(kinds):
            rank, phase = rng.randrange(job.training.parallel.world_size), rng.choice(PHASES)
            found.append(_hang(job, times, number, kind, rank, phase))
            report(f"{number + 1}/{len(kinds)} {found[-1]}")
            if found[-1].verdict_s is None:
                break
    return found


def _hang(
    job: SupervisedRun, times: Path, number: int, kind: str, rank: int, phase: str
) -> HangTrial:
    p999_s = high(phase_times(times, COLD_STEPS)[phase])
    events = len(job.events)
    _plan(job, number, {"point": phase, "rank": rank, "action": kind})
    trial = HangTrial(kind, describe_mesh(job.training.parallel.mesh), rank, phase, p999_s, None)
    verdict = _verdict(job, events)
    if verdict is None:
        return trial
    # All incidents are closed, and the first steps after them are over.
    ended = EventKind.INCIDENT_CLOSED
    job.wait(lambda: len(job.of(ended)) == _alarms(job), RECOVER_S)
    job.wait_step(max(job.rows) + BETWEEN_STEPS, RECOVER_S)
    onset = float((job.folder / f"chaos.json.{number}.0").read_text().split()[1])
    suspects = verdict.data["suspects"]
    most = max(suspect["score"] for suspect in suspects)
    return replace(
        trial,
        verdict_s=verdict.at - onset,
        suspects=tuple(suspect["rank"] for suspect in suspects),
        accused=tuple(suspect["rank"] for suspect in suspects if suspect["score"] == most),
    )


def _plan(job: SupervisedRun, number: int, fault: Mapping[str, Any]) -> None:
    """Add one fault, due at once, after the `number` faults already injected."""
    plan = job.folder / "chaos.json"
    faults = [*json.loads(plan.read_text())[:number], fault]
    fresh = plan.with_suffix(".new")
    fresh.write_text(json.dumps(faults))
    fresh.replace(plan)


def _verdict(job: SupervisedRun, after: int) -> SupervisorEvent | None:
    """The first event with suspects of the next incident; None if there is none in time."""

    def verdicts() -> list[SupervisorEvent]:
        kinds = (EventKind.INCIDENT_OPENED, EventKind.INCIDENT_UPDATED)
        found = [event for event in job.events[after:] if event.kind in kinds]
        return [event for event in found if event.data["suspects"]]

    with contextlib.suppress(TimeoutError):
        job.wait(lambda: bool(verdicts()), VERDICT_S)
        return verdicts()[0]
    return None


def _healthy(mesh: Mapping[str, int], steps: int, loaded: float) -> int:
    """Count the incidents in healthy steps, a share `loaded` of them beside busy processes."""
    if steps == 0:
        return 0
    with _training(mesh, {DELAY_ENV: str(DELAY_EVERY)}, TINY) as (job, times):
        job.wait_step(int(steps * (1 - loaded)), START_S + steps)
        _report_healthy(job, times)
        with beside_load(1.0, per_core=2):
            job.wait_step(steps, START_S + 4 * steps)
        _report_healthy(job, times)
        return _alarms(job)


def _report_healthy(job: SupervisedRun, times: Path) -> None:
    """Report the durations so far of the phases without injected delays."""
    stalls, mesh = len(job.of(EventKind.STALLED)), describe_mesh(job.training.parallel.mesh)
    report(f"{mesh}: {job.newest_step()} steps, {_alarms(job)} false alarms, {stalls} stalls")
    for phase, took in sorted(phase_times(times, COLD_STEPS).items()):
        if phase in PHASES:
            report(f"healthy {phase}: P99.9 {high(took):.3f} s, longest {max(took):.3f} s")


def _alarms(job: SupervisedRun) -> int:
    return len(job.of(EventKind.INCIDENT_OPENED))


@contextlib.contextmanager
def _training(
    mesh: Mapping[str, int], environment: Mapping[str, str], model: ModelSpec = MODEL
) -> Iterator[tuple[SupervisedRun, Path]]:
    """A job without an end, and the folder with its phase times."""
    parallel = ParallelSpec.model_validate(mesh)
    data_ranks = parallel.world_size // parallel.tp
    per_node = min(RANKS_PER_NODE, parallel.world_size // 2)
    training = TrainingSpec(
        recipe="benchmarks.recipes.hang_recipe:TimedPretrain",
        model=model,
        train=TrainSpec(steps=ENDLESS, global_batch=16, micro_batch=16 // data_ranks),
        parallel=parallel,
        checkpoint=CheckpointSpec(
            memory=MemoryTierSpec(every_steps=1), remote=RemoteTierSpec(every_steps=SAVE_EVERY)
        ),
    )
    # The supervisor's thread may still write there after everything else has ended.
    with tempfile.TemporaryDirectory(
        prefix="holdfast-detection-", ignore_cleanup_errors=True
    ) as folder:
        times = Path(folder) / "times"
        times.mkdir()
        with (
            patch.dict(os.environ, {TIMES_ENV: str(times), **environment}),
            supervised(
                Path(folder), training, standbys=0, workers_per_node=per_node, config=RECOVERY
            ) as job,
        ):
            yield job, times


if __name__ == "__main__":
    run(measure)
