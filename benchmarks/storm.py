"""Training efficiency under frequent SIGKILLs: Holdfast against torchft and the limit.

    python -m benchmarks.storm --json [--torchft-python PATH] [--storm-s N] [--torchft-s N]

Four ranks, steps of about a second, random ranks killed at exponential intervals whose mean M is
5.5 steps, then 1 step. Efficiency is the number of steps committed per second divided by the number
that the same ranks commit without kills, measured just before. The limit of any synchronous scheme
with steps of s seconds is `(s/M) / (exp(s/M) - 1)`: a step counts if no rank dies during it, and
recovery takes no time. Holdfast runs as a user runs it, and the kills use its fault injection;
torchft's replicas are restarted at once. Without `--torchft-python` the benchmark creates an
environment with torchft. It takes about six minutes. The intervals are stratified: each group of 40
has one interval from each fortieth of the exponential distribution, so that their mean is about M
even in a short storm. With independent intervals, randomness alone changes the efficiency at
M = 1 step by a tenth in four minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.conditions import (
    ROOT,
    BenchmarkFailed,
    awaited,
    load_job,
    parser,
    print_json,
    report,
    report_conditions,
)
from benchmarks.figures import StormFigure, StormResult, storm_limit, storm_rate
from benchmarks.holdfast_side import START_S, RunningJob, running
from benchmarks.recipes.storm_recipe import STEP_S
from benchmarks.recovery import SMALL_JOB, endless
from holdfast.client import fault_storm
from holdfast_workers.fault_injection.kinds import FaultKind, Injection

RANKS = 4
STEPS_BETWEEN_KILLS = {"5": 5.5, "1": 1.0}
TORCHFT = "torchft==0.2.0"
WARM_STEPS = 5
NO_END = 1_000_000
BLOCK = 40
ROWS_S = 3.0
"""Longest time until the rows of the last step have arrived."""
ROWS_POLL_S = 0.2
SLACK_S = 120.0
"""Extra time for torchft's side beyond its calm and storms."""


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    report_conditions()
    mtbf_s = {name: steps * options.step_s for name, steps in STEPS_BETWEEN_KILLS.items()}
    python = options.torchft_python
    if options.torchft_s and python is None:
        python = _environment_with_torchft(options.torchft_home)
    ours = _holdfast(options, mtbf_s)
    theirs = _best_torchft(python, options, mtbf_s) if options.torchft_s else {}
    if options.json:
        rates = {name: storm_rate(ours[name], theirs.get(name), mtbf_s[name]) for name in ours}
        print_json(StormResult(rates))
    return 0


def job(step_s: float = STEP_S) -> dict[str, Any]:
    """The recovery benchmark's job with steps of `step_s` and no limit on failures."""
    changed = endless(load_job(SMALL_JOB))
    changed["config"] = {"step_s": step_s}
    changed["recipe"] = "benchmarks.recipes.storm_recipe:OneSecondSteps"
    changed["recovery"] |= {"max_failures": NO_END, "max_without_progress": NO_END}
    return changed


def _holdfast(options: argparse.Namespace, mtbf_s: Mapping[str, float]) -> dict[str, StormFigure]:
    """Run one job through a calm and then all storms."""
    os.environ |= {
        "HOLDFAST_ALLOW_FAULT_INJECTION": "true",
        "HOLDFAST_QUARANTINE_INCIDENTS": "0",  # repeated kills on a node are expected here
    }
    with running(job(options.step_s)) as running_job:
        running_job.wait_step(WARM_STEPS + options.calm_steps, START_S)
        calm = [point for point in running_job.points() if point.step > WARM_STEPS]
        step_s = median(float(point.values["step_time_s"] or 0.0) for point in calm)
        found = {}
        for name, mean_s in mtbf_s.items():
            began = time.time()
            coming = stratified_strikes(mean_s, options.seed)
            kills = fault_storm.run(
                running_job.client, running_job.id, coming, options.storm_s, lambda _: None
            )
            committed = _committed(running_job, began, began + options.storm_s)
            found[name] = StormFigure(step_s, committed * step_s / options.storm_s, kills)
            _report_figure("holdfast", mean_s, found[name])
    return found


def stratified_strikes(mtbf_s: float, seed: int) -> Iterator[fault_storm.ScheduledFault]:
    """Kills of random ranks at exponential intervals, stratified: each group of `BLOCK` intervals
    has one from each `BLOCK`th part of the distribution."""
    rng = random.Random(seed)
    at_s = 0.0
    while True:
        for part in rng.sample(range(BLOCK), BLOCK):
            at_s -= mtbf_s * math.log(1.0 - (part + rng.random()) / BLOCK)
            yield fault_storm.ScheduledFault(
                at_s, Injection(FaultKind.KILL, rank=rng.randrange(RANKS))
            )


def _committed(running_job: RunningJob, since: float, until: float) -> int:
    """Steps in the final history between two times. Rows arrive in order: the last one before
    `until` has arrived once there is a later one."""

    def have_arrived() -> bool:
        return any(point.at >= until for point in running_job.points())

    with contextlib.suppress(BenchmarkFailed):  # the job stands still
        awaited(have_arrived, ROWS_S, lambda: "no later row", ROWS_POLL_S)
    points = running_job.points()
    return sum(since <= point.at < until for point in points)


def _best_torchft(
    python: str, options: argparse.Namespace, mtbf_s: Mapping[str, float]
) -> dict[str, StormFigure]:
    found = [_torchft(python, limit, options, mtbf_s) for limit in options.timeouts]
    best = {
        name: max((figures[name] for figures in found), key=lambda figure: figure.efficiency)
        for name in mtbf_s
    }
    for name, mean_s in mtbf_s.items():
        _report_figure("torchft", mean_s, best[name])
    return best


def _torchft(
    python: str, timeout_s: float, options: argparse.Namespace, mtbf_s: Mapping[str, float]
) -> dict[str, StormFigure]:
    calm_s, rates = options.calm_steps * options.step_s, list(mtbf_s.values())
    numbers = (options.step_s, calm_s, options.torchft_s, timeout_s, options.seed, RANKS, *rates)
    program = str(ROOT / "benchmarks" / "torchft_program.py")
    with tempfile.TemporaryDirectory(prefix="torchft-storm-") as folder:
        command = [python, program, "storm", f"{folder}/commits", *map(str, numbers)]
        done = _run_or_kill_group(command, calm_s + len(rates) * options.torchft_s + SLACK_S)
    if done.returncode != 0:
        raise RuntimeError(f"torchft's storm failed: {done.stderr[-2000:]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    calm = figures["calm_per_s"]
    if not calm:
        raise RuntimeError(f"torchft committed no step in the {calm_s:g} s without kills")
    return {
        name: StormFigure(RANKS / calm, storm["per_s"] / calm, storm["kills"])
        for name, storm in zip(mtbf_s, figures["storms"], strict=True)
    }


def _run_or_kill_group(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program; kill its whole process group if it does not end in time."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except BaseException:  # also KeyboardInterrupt
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def _environment_with_torchft(home: Path) -> str:
    """An interpreter with torchft and this interpreter's packages, created if it does not exist.
    Where an earlier installation failed, it is tried again."""
    python = home / "bin" / "python"
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    if not (site_packages / "torchft").is_dir():
        report(f"creating {home} for {TORCHFT}")
        venv.create(home, with_pip=True)
        (site_packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", TORCHFT], check=True)
    return str(python)


def _report_figure(side: str, mtbf_s: float, figure: StormFigure) -> None:
    report(
        f"{side:<9} M {mtbf_s:g} s: step {figure.step_s:.3f} s, {figure.kills} kills, "
        f"efficiency {figure.efficiency:.3f}, limit {storm_limit(figure.step_s, mtbf_s):.3f}"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser("storm", __doc__)
    options.add_argument("--torchft-python", help=f"an interpreter with {TORCHFT}")
    options.add_argument(
        "--torchft-home",
        type=Path,
        default=Path.home() / ".cache" / "holdfast-benchmarks" / "torchft",
        help="folder of the created environment",
    )
    options.add_argument(
        "--timeouts",
        type=float,
        nargs="+",
        default=[3.0, 5.0],
        help="timeouts of torchft in s; the best counts",
    )
    options.add_argument("--step-s", type=float, default=STEP_S, help="default: a second")
    options.add_argument("--calm-steps", type=int, default=10)
    options.add_argument("--storm-s", type=float, default=80.0, help="for each M")
    options.add_argument(
        "--torchft-s", type=float, default=30.0, help="for each M, for torchft; 0: leave it out"
    )
    options.add_argument("--seed", type=int, default=1)
    return options.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
