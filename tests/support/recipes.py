"""Recipes that misbehave on purpose."""

from __future__ import annotations

from holdfast_workers.recipes.base import Agree, Gate, Phase, StepOutcome
from holdfast_workers.recipes.pretrain import PretrainRecipe


class RaisesAtStepTen(PretrainRecipe):
    """A user's mistake that shows itself at step 10, on every rank."""

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: Phase) -> StepOutcome:
        if step == 10:
            raise ValueError("the user's own mistake")
        return super().train_step(step, agree, gate, phase)
