"""A recipe that flips bits of its own state according to a test's plan."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.state.rank_state import local_of
from holdfast_workers.training.recipe import Agree, Gate, PhaseReporter, StepOutcome


class FlipsBits(PretrainRecipe):
    """Flips single bits of its own live tensors, according to the file HOLDFAST_TEST_FLIPS: a list
    of {rank, step, phase, tensor: parameter|moment|gradient, index, bit, times}. Each flip happens
    `times` times over all processes and attempts."""

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        plan = json.loads(Path(os.environ["HOLDFAST_TEST_FLIPS"]).read_text())

        def flipping(name: str, step: int, micro_batch: int = 0) -> None:
            phase(name, step, micro_batch)
            for number, flip in enumerate(plan):
                if self._is_due(flip, name, step) and _is_first(number, flip.get("times", 1)):
                    self._flip(flip)

        return super().train_step(step, agree, gate, flipping)

    def _is_due(self, flip: dict[str, Any], phase: str, step: int) -> bool:
        rank = self._require_built().world.rank
        return (flip["rank"], flip["step"], flip["phase"]) == (rank, step, phase)

    @torch.no_grad()
    def _flip(self, flip: dict[str, Any]) -> None:
        built = self._require_built()
        tensors: list[Tensor] = {
            "parameter": lambda: built.locals,
            "moment": lambda: [moment.tensor for moment in built.optimizer.moments],
            "gradient": lambda: [local_of(p.grad) for p in built.parameters],  # type: ignore[arg-type]
        }[flip["tensor"]]()
        # `data`, because no version counter of torch notices a real flip.
        chosen = tensors[flip["index"] % len(tensors)].data.view(-1)
        # The largest value: a flip in the smallest may be rounded away without any effect.
        chosen.view(torch.int32)[int(chosen.abs().argmax())] ^= 1 << flip["bit"]


def _is_first(number: int, times: int) -> bool:
    """Whether this flip has happened less than `times` times, over all processes."""
    for time_ in range(times):
        try:
            Path(f"{os.environ['HOLDFAST_TEST_FLIPS']}.{number}.{time_}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False


WHERE = {
    "parameter": ("forward", "backward", "agree", "optimizer"),
    "moment": ("forward", "backward", "agree", "optimizer"),
    "gradient": ("agree", "optimizer"),  # from here on it has been reduced
}
FIRST, APART = 3, 6
"""The step of the first flip, and the steps between two flips, so that findings stay separate."""


def random_flips(seed: int | str, ranks: int, count: int) -> list[dict[str, Any]]:
    """Random flips of all kinds, for `FlipsBits`."""
    draw = random.Random(seed)
    flips = []
    for number in range(count):
        tensor = list(WHERE)[number % len(WHERE)]
        flips.append(
            {
                "rank": draw.randrange(ranks),
                "step": FIRST + number * APART,
                "phase": draw.choice(WHERE[tensor]),
                "tensor": tensor,
                "index": draw.randrange(100),
                "bit": draw.randrange(16, 31),
            }
        )
    return flips
