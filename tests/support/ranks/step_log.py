"""A recipe that logs each step on its own node right after the gate: the ranks' steps and times,
recorded locally, independent of any report to the supervisor."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.training.recipe import Agree, Gate, PhaseReporter, StepOutcome, World

FOLDER = "HOLDFAST_TEST_STEPS"
PACE = "HOLDFAST_TEST_PACE_S"


class LoggedStep(NamedTuple):
    """`at` is on the monotonic clock, which all processes of the machine share."""

    attempt: int
    rank: int
    step: int
    at: float


class LogsSteps(PretrainRecipe):
    """`pretrain` at a steady pace; appends a line to this process's file right after each gate."""

    _world: World | None = None

    def build(self, world: World) -> None:
        self._world = world
        super().build(world)

    def rebind(self, world: World) -> None:
        self._world = world
        super().rebind(world)

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        time.sleep(float(os.environ.get(PACE, "0")))

        def logged(number: int) -> None:
            gate(number)
            world = self._world
            assert world is not None
            path = Path(os.environ[FOLDER]) / f"{os.getpid()}.log"
            with path.open("a") as file:
                file.write(f"{world.attempt} {world.rank} {number} {time.monotonic()}\n")

        return super().train_step(step, agree, logged, phase)


def logged_steps(folder: Path) -> list[LoggedStep]:
    """Every step of any process, in order of time."""
    steps = []
    for path in folder.glob("*.log"):
        for line in path.read_text().splitlines():
            attempt, rank, step, at = line.split()
            steps.append(LoggedStep(int(attempt), int(rank), int(step), float(at)))
    return sorted(steps, key=lambda logged: logged.at)
