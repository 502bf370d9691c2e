"""The built-in recipe, which also times its checks for silent corruption.

Each rank appends a line per step to a file in `HOLDFAST_BENCH_TIMES`: the seconds since the
previous step, and how many of them went into the parameter checksum and the state digest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from holdfast_workers.recipes import Agree, Gate, PhaseReporter, StepOutcome, World
from holdfast_workers.recipes.pretrain import PretrainRecipe

TIMES_ENV = "HOLDFAST_BENCH_TIMES"

P = ParamSpec("P")
T = TypeVar("T")


class TimedChecks(PretrainRecipe):
    """Selected by `recipe: benchmarks.recipes.checks_recipe:TimedChecks`."""

    _spent_s = 0.0
    _since = 0.0

    def build(self, world: World) -> None:
        super().build(world)
        checksum = self._require_built().checksum
        checksum.record = self._timed(checksum.record)  # type: ignore[method-assign]
        checksum.has_changed = self._timed(checksum.has_changed)  # type: ignore[method-assign]

    def state_digest(self, step: int) -> str:
        return self._timed(super().state_digest)(step)

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        outcome = super().train_step(step, agree, gate, phase)
        now = time.perf_counter()
        file = Path(os.environ[TIMES_ENV]) / str(os.getpid())
        with file.open("a") as out:
            out.write(f"{now - self._since:.6f} {self._spent_s:.6f}\n")
        self._since, self._spent_s = now, 0.0
        return outcome

    def _timed(self, call: Callable[P, T]) -> Callable[P, T]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._spent_s += time.perf_counter() - began

        return timed
