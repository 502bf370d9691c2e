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

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.nodes.supervised import SupervisedRun, supervised

from benchmarks.conditions import (
    beside_load,
    describe_mesh,
    parser,
    print_json,
    report,
    report_conditions,
)
from benchmarks.hang_figures import HangTrial, detection_summary, high
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

KINDS = ("stop", "gil", "loop", "collective", "read")
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


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    report_conditions()
    report(f"stock, not run: {STOCK}")
    floor_s = TrainingSpec().detection.hang_floor_s
    trials: list[HangTrial] = []
    for mesh in MESHES[: options.meshes]:
        trials += _hangs(mesh, options.kinds * options.trials, options.seed)
    on_four = options.healthy_steps // HEALTHY_ON_FOUR
    false_alarms = _healthy(MESHES[1], on_four, options.loaded)
    on_two = options.healthy_steps - on_four
    false_alarms += _healthy(SMALL_MESH, on_two, options.loaded)
    summary = detection_summary(trials, floor_s, false_alarms, options.healthy_steps)
    for kind, figures in summary.kinds.items():
        report(f"{kind:<10} {figures}")
    if options.json:
        print_json(summary)
    return 0


def _hangs(mesh: Mapping[str, int], kinds: list[str], seed: int) -> list[HangTrial]:
    """Run a hang of each element of `kinds` on one mesh, in an order drawn by the seed."""
    rng = random.Random(f"{seed} {sorted(mesh.items())}")
    kinds = list(kinds)
    rng.shuffle(kinds)
    found = []
    with _training(mesh, {}) as (run, times):
        run.wait_step(LEARN_STEPS, START_S)
        for number, kind in enumerate(kinds):
            rank, phase = rng.randrange(run.training.parallel.world_size), rng.choice(PHASES)
            trial = _hang(run, times, number, kind, rank, phase)
            found.append(trial)
            report(f"{describe_mesh(mesh):<20} {number + 1}/{len(kinds)} {_describe(trial)}")
            if trial.verdict_s is None:
                break
    return found


def _hang(
    run: SupervisedRun, times: Path, number: int, kind: str, rank: int, phase: str
) -> HangTrial:
    p999_s = high(phase_times(times, COLD_STEPS)[phase])
    events = len(run.events)
    _plan(run, number, {"point": phase, "rank": rank, "action": kind})
    verdict = _verdict(run, events)
    mesh = describe_mesh(run.training.parallel.mesh)
    if verdict is None:
        return HangTrial(kind, mesh, rank, phase, p999_s, None)
    _wait_recovered(run)
    onset = float((run.folder / f"chaos.json.{number}.0").read_text().split()[1])
    suspects = verdict.data["suspects"]
    most = max((suspect["score"] for suspect in suspects), default=0.0)
    return HangTrial(
        kind=kind,
        mesh=mesh,
        rank=rank,
        phase=phase,
        p999_s=p999_s,
        verdict_s=verdict.at - onset,
        suspects=tuple(suspect["rank"] for suspect in suspects),
        accused=tuple(suspect["rank"] for suspect in suspects if suspect["score"] == most),
    )


def _plan(run: SupervisedRun, number: int, fault: Mapping[str, Any]) -> None:
    """Add one fault, due at once, after the `number` faults already injected."""
    plan = run.folder / "chaos.json"
    faults = [*json.loads(plan.read_text())[:number], fault]
    fresh = plan.with_suffix(".new")
    fresh.write_text(json.dumps(faults))
    fresh.replace(plan)


def _verdict(run: SupervisedRun, after: int) -> SupervisorEvent | None:
    """The first event with suspects of the next incident; None if there is none in time."""

    def opened() -> list[SupervisorEvent]:
        kinds = (EventKind.INCIDENT_OPENED, EventKind.INCIDENT_UPDATED)
        return [event for event in run.events[after:] if event.kind in kinds]

    with contextlib.suppress(TimeoutError):
        run.wait(lambda: any(event.data["suspects"] for event in opened()), VERDICT_S)
        return next(event for event in opened() if event.data["suspects"])
    return None


def _wait_recovered(run: SupervisedRun) -> None:
    """Wait until all incidents are closed and the first steps after them are over."""
    run.wait(lambda: _open_incidents(run) == 0, RECOVER_S)
    run.wait_step(max(run.rows) + BETWEEN_STEPS, RECOVER_S)


def _open_incidents(run: SupervisedRun) -> int:
    return len(run.of(EventKind.INCIDENT_OPENED)) - len(run.of(EventKind.INCIDENT_CLOSED))


def _healthy(mesh: Mapping[str, int], steps: int, loaded: float) -> int:
    """Number of incidents in `steps` healthy steps; the share `loaded` of them runs beside busy
    processes."""
    if steps == 0:
        return 0
    name, delays = f"{describe_mesh(mesh):<20} healthy", {DELAY_ENV: str(DELAY_EVERY)}
    with _training(mesh, delays, TINY) as (run, times):
        unloaded_steps = int(steps * (1 - loaded))
        run.wait_step(unloaded_steps, START_S + steps)
        report(f"{name}: {unloaded_steps} steps, {_alarms(run)} false alarms; now under load")
        _report_longest_phases(times)
        with beside_load(1.0, per_core=2):
            run.wait_step(steps, START_S + 4 * steps)
        _report_longest_phases(times)
        stalls = len(run.of(EventKind.STALLED))
        report(f"{name}: {steps} steps, {_alarms(run)} false alarms; {stalls} stalls reported")
        return _alarms(run)


def _report_longest_phases(times: Path) -> None:
    """Report the durations of the phases without injected delays so far."""
    for phase, took in sorted(phase_times(times, COLD_STEPS).items()):
        if phase in PHASES:
            report(f"healthy    {phase}: P99.9 {high(took):.3f} s, longest {max(took):.3f} s")


def _alarms(run: SupervisedRun) -> int:
    return len(run.of(EventKind.INCIDENT_OPENED))


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
        os.environ.update({TIMES_ENV: str(times), **environment})
        try:
            with supervised(
                Path(folder), training, standbys=0, workers_per_node=per_node, config=RECOVERY
            ) as run:
                yield run, times
        finally:
            for name in (TIMES_ENV, *environment):
                os.environ.pop(name)


def _describe(trial: HangTrial) -> str:
    took = "no verdict" if trial.verdict_s is None else f"{trial.verdict_s:.2f} s"
    accused = "correct" if trial.accused == (trial.rank,) else f"accused {trial.accused}"
    return f"{trial.kind} in {trial.phase} of rank {trial.rank}: {took}, {accused}"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    options = parser("detection", __doc__)
    options.add_argument("--trials", type=int, default=20, help="per kind and mesh; default 20")
    options.add_argument(
        "--meshes", type=int, default=len(MESHES), help="use only the first N of the four"
    )
    options.add_argument(
        "--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="of hangs; default: all"
    )
    options.add_argument("--healthy-steps", type=int, default=100_000, help="default 100,000")
    options.add_argument(
        "--loaded",
        type=float,
        default=0.25,
        help="share of the healthy steps beside busy processes",
    )
    options.add_argument("--seed", type=int, default=7, help="default 7")
    return options.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
