"""A recipe whose steps take some time, so that machines can come and go during a short job."""

from __future__ import annotations

import os
import time

from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.training.recipe import Agree, Gate, PhaseReporter, StepOutcome

PACE = "ROOM_PACE_S"
RECIPE = "tests.support.machine_room.paced:Paced"


class Paced(PretrainRecipe):
    """`pretrain`, after a pause of `ROOM_PACE_S` seconds before each step."""

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        time.sleep(float(os.environ.get(PACE, "0")))
        return super().train_step(step, agree, gate, phase)
