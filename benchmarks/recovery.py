"""Training downtime after a rank is killed: Holdfast against Ray Train.

    python -m benchmarks.recovery --json [--faults N]

Both sides use the same model, data, mesh, step loop and checkpoint cadence (every step). One fault
is: a fresh cluster, a job of four ranks, and SIGKILL of one rank while the job runs. Measured are
the seconds from the kill to the first step beyond the last step applied before it. That includes
the whole new step, so the model is small (`benchmarks/recovery.yaml`, or `--job`). The sides
alternate, and in one round the same rank dies on each. All started processes are ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks import holdfast_side, ray_train_side
from benchmarks.conditions import ROOT, load_job, report, run, world_size
from benchmarks.figures import Recovery, RecoveryResult, recovery_summary
from benchmarks.ray_train_side import SETTINGS
from holdfast_workers.spec import TrainingSpec

ENDLESS = 1_000_000
HOLDFAST = "holdfast"
SMALL_JOB = ROOT / "benchmarks" / "recovery.yaml"
Settings = tuple[Literal["default", "best"], ...]
"""Of Ray Train."""
ALL: Settings = ("default", "best")


def measure(
    faults: int = 5, job: Path = SMALL_JOB, after_step: int = 10, settings: Settings = ALL
) -> RecoveryResult:
    """Measure the sides in turn.

    Args:
        faults: per side
        after_step: steps before the kill
        settings: of Ray Train; without a value it is left out
    """
    document = endless(load_job(job))
    report(f"holdfast: `serve` and REST, three raylets, one standby node: {document}")
    measures: dict[str, Callable[[int, int], Recovery]] = {
        HOLDFAST: partial(holdfast_side.measure, document)
    }
    spec = ray_train_spec(document)
    for setting in (SETTINGS[name] for name in settings):
        report(f"Ray Train, one raylet: {setting}")
        measures[setting.name] = partial(ray_train_side.measure, spec, setting)
    found: dict[str, list[Recovery]] = {name: [] for name in measures}
    for number in range(faults):
        for name, measure_one in measures.items():
            found[name].append(measure_one(number % world_size(document), after_step + number))
            report(f"{number + 1}/{faults} {name}: {found[name][-1]}")
    return recovery_summary(found.pop(HOLDFAST), found)


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


if __name__ == "__main__":
    run(measure)
