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

import contextlib
import math
import os
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from cyclopts import Parameter

from benchmarks.conditions import ROOT, BenchmarkFailed, awaited, load_job, report, run
from benchmarks.environments import python_with
from benchmarks.figures import StormFigure, StormResult, storm_rate
from benchmarks.holdfast_side import START_S, RunningJob, running
from benchmarks.recipes.storm_recipe import STEP_S
from benchmarks.recovery import SMALL_JOB, endless
from benchmarks.step_files import scratch
from holdfast.client import fault_storm
from holdfast_service.embedded_cluster import processes
from holdfast_workers.fault_injection.kinds import FaultKind, Injection

RANKS = 4
STEPS_BETWEEN_KILLS = {"5": 5.5, "1": 1.0}
TORCHFT = "torchft==0.2.0"
TORCHFT_WARM_S = 20.0
TORCHFT_POLL_S = 0.02
WARM_STEPS = 5
NO_END = 1_000_000
BLOCK = 40
ROWS_S = 3.0
"""Longest time until the rows of the last step have arrived."""
ROWS_POLL_S = 0.2


@dataclass(frozen=True)
class Storms:
    """The options of the measurement.

    Attributes:
        torchft_python: an interpreter with torchft 0.2.0
        torchft_home: folder of the environment that is created without
        timeouts: of torchft, in s; the best counts
        storm_s: for each M
        torchft_s: for each M, for torchft; 0: it is left out
    """

    torchft_python: str | None = None
    torchft_home: Path = Path.home() / ".cache" / "holdfast-benchmarks" / "torchft"
    timeouts: tuple[float, ...] = (3.0, 5.0)
    step_s: float = STEP_S
    calm_steps: int = 10
    storm_s: float = 80.0
    torchft_s: float = 30.0
    seed: int = 1

    @property
    def mtbf_s(self) -> dict[str, float]:
        return {name: steps * self.step_s for name, steps in STEPS_BETWEEN_KILLS.items()}


def measure(storms: Annotated[Storms, Parameter(name="*")] = Storms()) -> StormResult:
    timeouts = storms.timeouts if storms.torchft_s else ()
    python = storms.torchft_python or ""
    if timeouts and not python:
        python = python_with(storms.torchft_home, "torchft", TORCHFT)
    ours = _holdfast(storms)
    theirs: dict[str, StormFigure] = {}
    for timeout_s in timeouts:
        for name, figure in torchft(python, timeout_s, storms).items():
            theirs[name] = max(figure, theirs.get(name, figure), key=lambda each: each.efficiency)
    rates = {n: storm_rate(ours[n], theirs.get(n), m_s) for n, m_s in storms.mtbf_s.items()}
    return StormResult(rates)


def job(step_s: float = STEP_S) -> dict[str, Any]:
    """The recovery benchmark's job with steps of `step_s` and no limit on failures."""
    changed = endless(load_job(SMALL_JOB))
    changed["config"] = {"step_s": step_s}
    changed["recipe"] = "benchmarks.recipes.storm_recipe:OneSecondSteps"
    changed["recovery"] |= {"max_failures": NO_END, "max_without_progress": NO_END}
    return changed


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


def _holdfast(storms: Storms) -> dict[str, StormFigure]:
    """Run one job through a calm and then all storms."""
    os.environ |= {
        "HOLDFAST_ALLOW_FAULT_INJECTION": "true",
        "HOLDFAST_QUARANTINE_INCIDENTS": "0",  # repeated kills on a node are expected here
    }
    with running(job(storms.step_s)) as running_job:
        running_job.wait_step(WARM_STEPS + storms.calm_steps, START_S)
        calm = [point for point in running_job.points() if point.step > WARM_STEPS]
        step_s = median(float(point.values["step_time_s"] or 0.0) for point in calm)
        found = {}
        for name, mean_s in storms.mtbf_s.items():
            began = time.time()
            coming = stratified_strikes(mean_s, storms.seed)
            kills = fault_storm.run(
                running_job.client, running_job.id, coming, storms.storm_s, lambda _: None
            )
            committed = _committed(running_job, began, began + storms.storm_s)
            found[name] = StormFigure(step_s, committed * step_s / storms.storm_s, kills)
            report(f"holdfast, M {mean_s:g} s: {found[name]}")
    return found


def _committed(running_job: RunningJob, since: float, until: float) -> int:
    """Steps in the final history between two times. Rows arrive in order: the last one before
    `until` has arrived once there is a later one."""

    def have_arrived() -> bool:
        return any(point.at >= until for point in running_job.points())

    with contextlib.suppress(BenchmarkFailed):  # the job stands still
        awaited(have_arrived, ROWS_S, lambda: "no later row", ROWS_POLL_S)
    return sum(since <= point.at < until for point in running_job.points())


def torchft(python: str, timeout_s: float, storms: Storms) -> dict[str, StormFigure]:
    """A calm and then all storms on torchft. Raises BenchmarkFailed; leaves no process behind."""
    with scratch() as folder:
        try:
            side = _Torchft(python, timeout_s, storms.step_s, folder)
            side.commits_per_s(TORCHFT_WARM_S, iter(()))
            calm, _ = side.commits_per_s(storms.calm_steps * storms.step_s, iter(()))
            if not calm:
                raise BenchmarkFailed(f"torchft made no step without kills: {side.output()}")
            found = {}
            for name, mean_s in storms.mtbf_s.items():
                strikes = stratified_strikes(mean_s, storms.seed)
                per_s, kills = side.commits_per_s(storms.torchft_s, strikes)
                found[name] = StormFigure(RANKS / calm, per_s / calm, kills)
                report(f"torchft, time-out {timeout_s:g} s, M {mean_s:g} s: {found[name]}")
            return found
        finally:
            processes.sweep(folder.name, [])


class _Torchft:
    """A lighthouse and a replica for each rank, all marked with the name of `folder`."""

    def __init__(self, python: str, timeout_s: float, step_s: float, folder: Path) -> None:
        self._python, self._folder, self._log = python, folder, folder / "commits"
        self._log.touch()
        mark = {"OMP_NUM_THREADS": "1", processes.CLUSTER_MARK: folder.name}
        self._variables = {**os.environ, **mark}
        self._replica = ("replica", str(self._log), str(step_s), str(timeout_s))
        address = folder / "lighthouse"
        lighthouse = self._start("lighthouse", str(address))

        def has_begun() -> bool:
            if lighthouse.poll() is not None:
                raise BenchmarkFailed(f"no lighthouse: {self.output()}")
            return address.exists()

        awaited(has_begun, START_S, lambda: "no lighthouse")
        self._variables["TORCHFT_LIGHTHOUSE"] = address.read_text()
        self._replicas = [self._start(*self._replica, str(rank)) for rank in range(RANKS)]

    def output(self) -> str:
        return (self._folder / "output").read_text(errors="replace")[-2000:]

    def commits_per_s(
        self, for_s: float, strikes: Iterator[fault_storm.ScheduledFault]
    ) -> tuple[float, int]:
        """With the number of kills; replicas are restarted at once when they die."""
        began, due, kills = time.time(), next(strikes, None), 0
        while (now := time.time()) < began + for_s:
            for rank, process in enumerate(self._replicas):
                if process.poll() is not None:
                    self._replicas[rank] = self._start(*self._replica, str(rank))
            if due is not None and now >= began + due.at_s:
                self._replicas[due.injection.rank or 0].kill()
                due, kills = next(strikes, None), kills + 1
            time.sleep(TORCHFT_POLL_S)
        commits = [float(line) for line in self._log.read_text().splitlines()]
        return sum(began <= at < began + for_s for at in commits) / for_s, kills

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [self._python, str(ROOT / "benchmarks" / "torchft_program.py"), *arguments]
        with (self._folder / "output").open("ab") as out:
            return subprocess.Popen(command, env=self._variables, stdout=out, stderr=out)


if __name__ == "__main__":
    run(measure)
