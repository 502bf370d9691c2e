"""Detection delay of flipped bits, accuracy of the accused rank, and cost of the checks.

    python -m benchmarks.corruption --json [--flips N] [--healthy-steps N] [--rounds N]

Three measurements, none with Ray or REST:

- Flips: jobs of two and three replicas, and of two replicas sharded in two, under a real supervisor
  with real agents. Single bits flip in a gradient, parameter or optimizer moment in use on one
  rank, in some phase of a step; the seed decides where. The figures count the steps until
  detection, and whether exactly that rank was accused.
- Healthy: three replicas without flips; every incident is a false alarm.
- Cost: the example's model on two replicas under `torchrun`, without memory checkpoints, whose
  digest the checks would otherwise reuse. The ranks time the checks relative to the rest of the
  step (`overhead`). Runs with and without the checks alternate (`step_ratio`); that ratio is only
  as reliable as the machine is idle.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised
from tests.support.ranks.flips import APART, FIRST, random_flips

from benchmarks.conditions import (
    EXAMPLE,
    add_idle_options,
    describe_mesh,
    load_job,
    machine,
    print_json,
    report,
    torchrun,
    wait_for_idle_machine,
)
from benchmarks.corruption_figures import FlipResult, check_share, corruption_summary, flip_result
from benchmarks.recipes.checks_recipe import TIMES_ENV
from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.spec import (
    ModelSpec,
    ParallelSpec,
    ScheduleSpec,
    TrainingSpec,
    TrainSpec,
)

MESHES = ({"dp_replicate": 2}, {"dp_replicate": 3}, {"dp_replicate": 2, "dp_shard": 2})
MODEL = ModelSpec(dim=32, layers=2, heads=2, sequence_length=32, dropout=0.1)
FLIPS_ENV = "HOLDFAST_TEST_FLIPS"
RUN_S = 3600.0
FAILURE_WINDOW_S = 0.05
"""Every flip is an independent trial: earlier flips on a node soon stop counting against it."""


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    report("conditions: " + ", ".join(f"{name} {value}" for name, value in machine().items()))
    wait_for_idle_machine(options.quiet, options.patience_s)
    job = load_job(options.job)
    job["train"]["steps"] = options.skip + options.steps
    shares, ratios = _cost(job, options.rounds, options.skip)
    found: list[FlipResult] = []
    others = 0
    for mesh in MESHES[: options.meshes] if options.flips else ():
        mesh_results, unexplained = _flips(mesh, options.flips, options.seed)
        found += mesh_results
        others += unexplained
    alarms = _healthy(options.healthy_steps)
    summary = corruption_summary(found, others, options.healthy_steps, alarms, shares, ratios)
    if options.json:
        print_json(summary)
    return 0


def _flips(mesh: Mapping[str, int], count: int, seed: int) -> tuple[list[FlipResult], int]:
    """Results of `count` flips on one mesh, and the number of incidents not caused by them."""
    training = _training(mesh, FIRST + (count + 1) * APART)
    flips = random_flips(f"{seed} {sorted(mesh.items())}", training.parallel.world_size, count)
    with _running(training, flips) as run:
        ended = run.wait_end(RUN_S)
        if ended["outcome"] != "SUCCEEDED":
            raise RuntimeError(f"the job with flips did not succeed: {run.story()}")
        incidents = run.of(EventKind.INCIDENT_CLOSED)
    name = describe_mesh(mesh)
    found = [flip_result(name, flip, incidents, APART) for flip in flips]
    for result in found:
        report(
            f"{name:<30} {result.tensor:<9} of rank {result.rank} in step {result.step:>4}: found "
            f"within {result.within} steps, accused {result.named}"
        )
    return found, sum(incident["cause"] != "corruption" for incident in incidents)


def _healthy(steps: int) -> int:
    """Number of incidents in `steps` steps of three healthy replicas."""
    if steps == 0:
        return 0
    with _running(_training({"dp_replicate": 3}, steps), []) as run:
        run.wait_end(RUN_S + steps)
        alarms = len(run.of(EventKind.INCIDENT_OPENED))
    report(f"healthy    {steps} steps, {alarms} false alarms")
    return alarms


def _training(mesh: Mapping[str, int], steps: int) -> TrainingSpec:
    """A job with small steps; only the bits matter here."""
    return small_training(
        steps,
        recipe="tests.support.ranks.flips:FlipsBits",
        model=MODEL,
        train=TrainSpec(
            steps=steps, global_batch=12, micro_batch=1, schedule=ScheduleSpec(warmup_steps=2)
        ),
        parallel=ParallelSpec.model_validate(mesh),
    )


@contextmanager
def _running(training: TrainingSpec, flips: Sequence[Mapping[str, Any]]) -> Iterator[SupervisedRun]:
    with tempfile.TemporaryDirectory(
        prefix="holdfast-corruption-", ignore_cleanup_errors=True
    ) as folder:
        plan = Path(folder) / "flips.json"
        plan.write_text(json.dumps(flips))
        os.environ[FLIPS_ENV] = str(plan)
        config = {"window_s": FAILURE_WINDOW_S, "max_failures": 1_000_000}
        with supervised(
            Path(folder), training, standbys=0, workers_per_node=1, config=config
        ) as run:
            yield run


# --- cost ---------------------------------------------------------------------------------------


def _cost(job: Mapping[str, Any], rounds: int, skip: int) -> tuple[list[float], list[float]]:
    """Share of the checks per rank and round, and per round the median step time with checks over
    the one without."""
    shares, ratios = [], []
    without = _timed(job, 0) if rounds else []
    for number in range(rounds):
        checked = _timed(job, 1)
        after = _timed(job, 0)
        shares += [check_share(rank, skip) for rank in checked]
        bare = (_median(without, skip) + _median(after, skip)) / 2
        loaded = _median(checked, skip)
        ratios.append(loaded / bare)
        without = after
        report(
            f"{number + 1}/{rounds} step with checks {loaded * 1e3:.1f} ms, without "
            f"{bare * 1e3:.1f} ms; share of the checks {median(shares):.4f}"
        )
    return shares, ratios


def _median(ranks: Sequence[Sequence[tuple[float, float]]], skip: int) -> float:
    return median(took for rank in ranks for took, _ in rank[skip:])


def _timed(job: Mapping[str, Any], every: int) -> list[list[tuple[float, float]]]:
    """Per rank and step: seconds of the step, and of the checks within it."""
    checked = {
        **job,
        "recipe": "benchmarks.recipes.checks_recipe:TimedChecks",
        "parallel": {"dp_replicate": 2},
        "checks": {"replica_digest_every_steps": every},
        "checkpoint": {
            "memory": {"every_steps": 0},
            "remote": {"every_steps": 0},
            "digest_every_steps": 0,
        },
    }
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        document, times = Path(folder) / "job.yaml", Path(folder) / "times"
        document.write_text(yaml.safe_dump(checked))
        times.mkdir()
        os.environ[TIMES_ENV] = str(times)
        done = torchrun(2, "holdfast_workers.standalone", str(document), timeout_s=RUN_S)
        if done.returncode:
            raise RuntimeError(f"the training core failed:\n{done.stderr[-4000:]}")
        return [_read(path) for path in times.iterdir()]


def _read(path: Path) -> list[tuple[float, float]]:
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(float(took), float(spent)) for took, spent in lines]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corruption", description=__doc__)
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.add_argument("--flips", type=int, default=20, help="per mesh; default 20")
    parser.add_argument(
        "--meshes", type=int, default=len(MESHES), help="use only the first N of the three"
    )
    parser.add_argument("--healthy-steps", type=int, default=20_000, help="default 20,000")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of the cost measurement; default 3"
    )
    parser.add_argument("--steps", type=int, default=60, help="measured per run; default 60")
    parser.add_argument("--skip", type=int, default=10, help="first steps left out; default 10")
    parser.add_argument("--job", type=Path, default=EXAMPLE, help="default: the example")
    parser.add_argument("--seed", type=int, default=7, help="default 7")
    add_idle_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
