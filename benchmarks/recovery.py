"""Training downtime after a rank is killed: Holdfast against Ray Train.

    python -m benchmarks.recovery --json [--faults N]

Both sides use the same model, data, mesh, step loop and checkpoint cadence (every step). One fault
is: a fresh cluster, a job of four ranks, and SIGKILL of one rank while the job runs. Measured are
the seconds from the kill to the first step beyond the last step applied before it. That includes
the whole new step, so the model is small (`benchmarks/recovery.yaml`, or `--job`). The sides
alternate, and in one round the same rank dies on each. All started processes are ended.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import holdfast_side, ray_train_side
from benchmarks.conditions import (
    ROOT,
    describe_model,
    load_job,
    parser,
    print_json,
    report,
    report_conditions,
    world_size,
)
from benchmarks.figures import MeasuredFault, recovery_summary
from holdfast_workers.spec import TrainingSpec

ENDLESS = 1_000_000
HOLDFAST = "holdfast"
SMALL_JOB = ROOT / "benchmarks" / "recovery.yaml"

MeasureFault = Callable[[int, int], MeasuredFault]
"""(rank to kill, step to wait for first) -> the measured fault."""


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    job = endless(load_job(options.job))
    sides = _sides(job, options.settings)
    _print_conditions(job, options)
    faults = _rounds(sides, options.faults, options.after_step, world_size(job))
    summary = recovery_summary(faults.pop(HOLDFAST), faults)
    for name, found in {HOLDFAST: summary.holdfast, **summary.ray_train}.items():
        report(f"{name}: {found}")
    report(f"ratio {summary.ratio} against the setting {summary.ray_train_setting!r}")
    if options.json:
        print_json(summary)
    return 0


def endless(job: Mapping[str, Any]) -> dict[str, Any]:
    """The same job without an end and without remote checkpoints."""
    changed = deepcopy(dict(job))
    changed["train"]["steps"] = ENDLESS
    changed["checkpoint"] = {"memory": {"every_steps": 1}, "remote": {"every_steps": 0}}
    return changed


def ray_train_spec(job: Mapping[str, Any]) -> dict[str, Any]:
    """The training part of a job, without digests, which Ray Train does not use."""
    fields = {name: value for name, value in job.items() if name in TrainingSpec.model_fields}
    spec = TrainingSpec.model_validate(fields).model_dump(mode="json")
    spec["checkpoint"]["digest_every_steps"] = 0
    return spec


def _sides(job: Mapping[str, Any], settings: list[str]) -> dict[str, MeasureFault]:
    sides: dict[str, MeasureFault] = {HOLDFAST: partial(holdfast_side.measure, job)}
    spec = ray_train_spec(job)
    for setting in ray_train_side.SETTINGS:
        if setting.name in settings:
            sides[setting.name] = partial(ray_train_side.measure, spec, setting)
    return sides


def _rounds(
    sides: Mapping[str, MeasureFault], rounds: int, after_step: int, ranks: int
) -> dict[str, list[MeasuredFault]]:
    faults: dict[str, list[MeasuredFault]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, measure in sides.items():
            fault = measure(number % ranks, after_step + number)
            faults[name].append(fault)
            report(
                f"{number + 1}/{rounds} {name:<9} rank {fault.rank} killed after step "
                f"{fault.last_step}, restored step {fault.restored_step}: "
                f"{fault.recovery_s:.3f} s  {_phases(fault.phases_s)}"
            )
    return faults


def _print_conditions(job: Mapping[str, Any], options: argparse.Namespace) -> None:
    report_conditions()
    report(f"model: {describe_model(job)}; checkpoint every step; {options.faults} faults per side")
    report("holdfast: `serve` and REST, an embedded cluster of three raylets, one standby node")
    for setting in ray_train_side.SETTINGS:
        report(
            f"Ray Train, {setting.name}: {setting.why}; FailureConfig(max_failures=-1), one raylet"
        )


def _phases(phases_s: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.3f}" for name, seconds in phases_s.items())


def _options(arguments: list[str] | None) -> argparse.Namespace:
    options = parser("recovery", __doc__)
    options.add_argument("--faults", type=int, default=5, help="per side; default 5")
    options.add_argument("--job", type=Path, default=SMALL_JOB, help=f"default: {SMALL_JOB.name}")
    options.add_argument(
        "--after-step", type=int, default=10, help="steps before the kill; default 10"
    )
    options.add_argument(
        "--settings",
        nargs="*",
        default=[setting.name for setting in ray_train_side.SETTINGS],
        choices=[setting.name for setting in ray_train_side.SETTINGS],
        help="settings of Ray Train; default: all; without a value: Ray Train is left out",
    )
    return options.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
