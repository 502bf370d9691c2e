"""Recipes that misbehave on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast_workers.recipes.base import Agree, Gate, Phase, StepOutcome
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.state import Snapshot


class RaisesAtStepTen(PretrainRecipe):
    """A user's mistake that shows itself at step 10, on every rank."""

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: Phase) -> StepOutcome:
        if step == 10:
            raise ValueError("the user's own mistake")
        return super().train_step(step, agree, gate, phase)


class SlowSnapshot(Snapshot):
    """Takes longer to be copied than the next forward and backward take."""

    def write(self, payload: memoryview, stopped: Callable[[], bool] = lambda: False) -> str:
        time.sleep(0.1)
        return super().write(payload, stopped)


class CopiesSlowly(PretrainRecipe):
    """Whoever changes the state before it is captured gets other digests."""

    def freeze(self, step: int) -> Snapshot:
        frozen = super().freeze(step)
        return SlowSnapshot(frozen.layout, frozen.sources)
