"""Holdfast's overhead without faults: its step time against the bare training core's.

    python -m benchmarks.overhead --json [--rounds N] [--steps N]

Both sides run the same job with memory and remote checkpoints off: under Holdfast, through serve
and REST, with its cluster, agents, supervisor, reconciler and standby node all running; and under
`torchrun -m holdfast_workers.standalone`. The sides alternate, and each run under Holdfast is
compared with the mean of the bare runs before and after it; the first steps are left out. The CPU
seconds of every Holdfast process that does not train are measured too.

Last, the ranks of two replicas of the job time their checks for silent corruption, relative to the
rest of the step (`check_share`; without memory checkpoints, whose digests the checks would reuse).

Other load on the machine distorts the side during which it occurs.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks import holdfast_side
from benchmarks.conditions import EXAMPLE, load_job, report, run, torchrun, world_size
from benchmarks.cpu_use import CpuUse, of_holdfast
from benchmarks.figures import OverheadResult, overhead_summary
from benchmarks.recipes.hang_recipe import CHECKS, TIMES_ENV, phase_times

RUN_S = 600.0
TAIL = 60
"""Steps after the measured ones, so that CPU use is read before the job ends."""


def measure(
    rounds: int = 5, steps: int = 60, skip: int = 10, job: Path = EXAMPLE, poll_s: float = 10.0
) -> OverheadResult:
    """Measure the sides in turn.

    Args:
        rounds: runs under Holdfast
        steps: measured per run
        skip: first steps left out: they compile, allocate and fill caches
        poll_s: between two looks at the running job; a job that a user looks at costs more
    """
    document = without_checkpoints(load_job(job), skip + steps + TAIL)
    report(f"{document}")
    measured = slice(skip, skip + steps)
    ours, theirs = [], [bare(document)[measured]]
    shares: dict[str, float] = {}
    for number in range(rounds):
        times, shares = under_holdfast(document, poll_s)
        ours.append(times[measured])
        theirs.append(bare(document)[measured])
        bare_s, our_s, after_s = (median(item) for item in (theirs[-2], ours[-1], theirs[-1]))
        report(f"{number + 1}/{rounds}: bare {bare_s:.4f} s, {our_s:.4f} s, bare {after_s:.4f} s")
    return overhead_summary(ours, theirs, shares, check_share(document, skip))


def without_checkpoints(job: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The same job for `steps` steps, with both checkpoint tiers off."""
    changed = deepcopy(dict(job))
    changed["train"]["steps"] = steps
    changed["checkpoint"] = {
        **changed.get("checkpoint", {}),
        "memory": {"every_steps": 0},
        "remote": {"every_steps": 0},
    }
    return changed


def under_holdfast(job: Mapping[str, Any], poll_s: float) -> tuple[list[float], dict[str, float]]:
    """Step times in s, and the share of a core used by each kind of other process."""
    with holdfast_side.running(job) as running:
        running.wait_step(1, holdfast_side.START_S)
        use = CpuUse(partial(of_holdfast, Path(running.data_dir)))
        running.wait_step(job["train"]["steps"] - TAIL, RUN_S, poll_s)
        shares = use.cores()
        points = running.points()
    times = [point.values["step_time_s"] for point in points]
    return [float(time) for time in times if time is not None], shares


def bare(job: Mapping[str, Any]) -> list[float]:
    """Step times in s of the training core under torchrun."""
    ranks = world_size(job)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        document, rows = Path(folder) / "job.yaml", Path(folder) / "rows.jsonl"
        document.write_text(yaml.safe_dump(dict(job)))
        module = "holdfast_workers.standalone"
        done = torchrun(ranks, module, str(document), "--json", str(rows), timeout_s=RUN_S)
        if done.returncode:
            raise RuntimeError(f"the bare training core failed:\n{done.stderr[-4000:]}")
        lines = [json.loads(line) for line in rows.read_text().splitlines()]
    return [float(line["row"]["step_time_s"]) for line in lines if "row" in line]


def check_share(job: Mapping[str, Any], skip: int) -> float:
    """Divide the time of the checks by that of the step's other phases, on two replicas."""
    checked = {
        **job,
        "recipe": "benchmarks.recipes.hang_recipe:TimedPretrain",
        "parallel": {"dp_replicate": 2},
        "checks": {"replica_digest_every_steps": 1},
        "checkpoint": {**job["checkpoint"], "digest_every_steps": 0},
    }
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ[TIMES_ENV] = folder
        bare(checked)
        spent = {name: sum(took) for name, took in phase_times(Path(folder), skip).items()}
    checks_s = spent.pop(CHECKS)
    return checks_s / (sum(spent.values()) - checks_s)


if __name__ == "__main__":
    run(measure)
