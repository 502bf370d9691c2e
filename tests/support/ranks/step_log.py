"""A recipe that writes down, on its own node, each step that it is let make: who steps when, seen
from where it happens, whatever becomes of the news of it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.training.recipe import Agree, Gate, Phase, StepOutcome, World

FOLDER = "HOLDFAST_TEST_STEPS"
PACE = "HOLDFAST_TEST_PACE_S"


class Stepped(NamedTuple):
    """`at` by the monotonic clock, which all processes of the machine share."""

    attempt: int
    rank: int
    step: int
    at: float


class LogsSteps(PretrainRecipe):
    """`pretrain` at a steady pace; a line to this process's file right after each gate."""

    _world: World | None = None

    def build(self, world: World) -> None:
        self._world = world
        super().build(world)

    def rebind(self, world: World) -> None:
        self._world = world
        super().rebind(world)

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: Phase) -> StepOutcome:
        time.sleep(float(os.environ.get(PACE, "0")))

        def logged(number: int) -> None:
            gate(number)
            world = self._world
            assert world is not None
            path = Path(os.environ[FOLDER]) / f"{os.getpid()}.log"
            with path.open("a") as file:
                file.write(f"{world.attempt} {world.rank} {number} {time.monotonic()}\n")

        return super().train_step(step, agree, logged, phase)


def stepped(folder: Path) -> list[Stepped]:
    """Every step that any process made, in order of time."""
    found = []
    for path in folder.glob("*.log"):
        for line in path.read_text().splitlines():
            attempt, rank, step, at = line.split()
            found.append(Stepped(int(attempt), int(rank), int(step), float(at)))
    return sorted(found, key=lambda one: one.at)
