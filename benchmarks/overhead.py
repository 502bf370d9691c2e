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

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks import holdfast_side
from benchmarks.conditions import (
    EXAMPLE,
    describe_model,
    load_job,
    parser,
    print_json,
    report,
    report_conditions,
    torchrun,
    world_size,
)
from benchmarks.cpu_use import CpuUse, of_holdfast
from benchmarks.figures import overhead_summary, steady
from benchmarks.recipes.hang_recipe import CHECKS, TIMES_ENV, phase_times

RUN_S = 600.0
TAIL = 60
"""Steps after the measured ones, so that CPU use is read before the job ends."""
POLL_S = 10.0
"""Between two polls of the running job, unless an option says otherwise: a job that a user looks at
costs more."""


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    job = without_checkpoints(load_job(options.job), options.skip + options.steps + TAIL)
    report_conditions()
    report(
        f"model: {describe_model(job)}; no checkpoints; {options.rounds} rounds of "
        f"{options.steps} steps, after {options.skip} skipped steps"
    )
    ours, theirs = [], [steady(bare(job), options.skip, options.steps)]
    shares: dict[str, float] = {}
    for number in range(options.rounds):
        times, shares = under_holdfast(job, options.poll_s)
        ours.append(steady(times, options.skip, options.steps))
        theirs.append(steady(bare(job), options.skip, options.steps))
        before, loaded, after = (median(item) * 1e3 for item in (theirs[-2], ours[-1], theirs[-1]))
        report(
            f"{number + 1}/{options.rounds} median step: bare {before:.2f} ms, holdfast "
            f"{loaded:.2f} ms, bare {after:.2f} ms, ratio {2 * loaded / (before + after):.4f}"
        )
    report("share of one core, last round: " + _shares(shares))
    summary = overhead_summary(ours, theirs, shares, check_share(job, options.skip))
    report(f"share of the checks {summary.check_share:.4f}")
    if options.json:
        print_json(summary)
    else:
        report(f"ratio {summary.ratio}")
    return 0


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
    """Time of the checks over that of the rest of the step's phases, on two replicas."""
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


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


def _options(arguments: list[str] | None) -> argparse.Namespace:
    options = parser("overhead", __doc__)
    options.add_argument("--rounds", type=int, default=5, help="runs under Holdfast; default 5")
    options.add_argument("--steps", type=int, default=60, help="measured per run; default 60")
    options.add_argument("--skip", type=int, default=10, help="first steps left out; default 10")
    options.add_argument("--job", type=Path, default=EXAMPLE, help="default: the example")
    options.add_argument(
        "--poll-s",
        type=float,
        default=POLL_S,
        help=f"between two looks at the running job; default {POLL_S:g}",
    )
    return options.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
