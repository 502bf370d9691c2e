"""The built-in recipe with timed phases and with delays that are not hangs.

Each rank appends the durations of its phases to a file in `HOLDFAST_BENCH_TIMES`, a line per step,
with the seconds of them that went into the checks for silent corruption (`checks`).
With `HOLDFAST_BENCH_DELAY_EVERY` set to N, all ranks spend some seconds in an evaluation or in
waiting for data every N steps, each rank a little longer than another: slow but healthy.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from holdfast_workers.progress import beacon
from holdfast_workers.recipes import Agree, Gate, PhaseReporter, StepOutcome, World
from holdfast_workers.recipes.pretrain import PretrainRecipe

P = ParamSpec("P")
T = TypeVar("T")
TIMES_ENV = "HOLDFAST_BENCH_TIMES"
CHECKS = "checks"
DELAY_ENV = "HOLDFAST_BENCH_DELAY_EVERY"
DELAYS_S = (0.5, 4.0)
APART_S = 0.5
"""Largest difference between the ranks in the same delay."""


class TimedPretrain(PretrainRecipe):
    _rank = 0
    _checks_s = 0.0

    def build(self, world: World) -> None:
        self._rank = world.rank
        super().build(world)
        checksum = self._require_built().checksum
        checksum.record = self._timed(checksum.record)  # type: ignore[method-assign]
        checksum.has_changed = self._timed(checksum.has_changed)  # type: ignore[method-assign]

    def state_digest(self, step: int) -> str:
        return self._timed(super().state_digest)(step)

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        self._delay(step, phase)
        stopwatch = _Stopwatch(phase)
        outcome = super().train_step(step, agree, gate, stopwatch)
        stopwatch.record_phase()
        stopwatch.took.append((CHECKS, self._checks_s))
        self._checks_s = 0.0
        folder = Path(os.environ[TIMES_ENV])
        with (folder / f"{self._rank}-{os.getpid()}").open("a") as file:
            file.write(" ".join(f"{name} {took:.6f}" for name, took in stopwatch.took) + "\n")
        return outcome

    def _timed(self, call: Callable[P, T]) -> Callable[P, T]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._checks_s += time.perf_counter() - began

        return timed

    def _delay(self, step: int, phase: PhaseReporter) -> None:
        every = int(os.environ.get(DELAY_ENV, "0"))
        if not every or step % every:
            return
        rng = random.Random(step)
        takes_s = rng.uniform(*DELAYS_S) + random.Random(step * 64 + self._rank).uniform(
            0.0, APART_S
        )
        if rng.random() < 0.5:
            with beacon.phase("evaluate"):
                time.sleep(takes_s)
        else:
            phase("load", step)
            time.sleep(takes_s)


class _Stopwatch:
    def __init__(self, phase: PhaseReporter) -> None:
        self._phase = phase
        self._name = ""
        self._since = 0.0
        self.took: list[tuple[str, float]] = []

    def __call__(self, name: str, step: int, micro_batch: int = 0) -> None:
        self.record_phase()
        self._name, self._since = name, time.perf_counter()
        self._phase(name, step, micro_batch)

    def record_phase(self) -> None:
        if self._name:
            self.took.append((self._name, time.perf_counter() - self._since))


def phase_times(folder: Path, cold_steps: int) -> dict[str, list[float]]:
    """Phase durations of all ranks, without the first `cold_steps` steps of each process."""
    found: dict[str, list[float]] = {}
    for path in folder.iterdir():
        for line in path.read_text().splitlines()[cold_steps:]:
            fields = line.split()
            for name, took in zip(fields[::2], fields[1::2], strict=False):
                found.setdefault(name, []).append(float(took))
    return found
