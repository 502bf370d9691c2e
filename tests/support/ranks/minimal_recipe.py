"""A recipe with the required methods only."""

from __future__ import annotations

import torch

from holdfast_workers.recipes import (
    Agree,
    Contribution,
    Gate,
    PhaseReporter,
    RankState,
    Recipe,
    ShardBox,
    Snapshot,
    StateLayout,
    StateTensor,
    StepOutcome,
    World,
)

SIZE = 64
LEARNING_RATE = 0.1


class MinimalRecipe(Recipe):
    """Every rank moves its own part of a vector towards a target that depends on the step."""

    def build(self, world: World) -> None:
        self._world = world
        self._vector = torch.empty(SIZE)
        whole, offset = (world.world_size * SIZE,), (world.rank * SIZE,)
        box = ShardBox(whole, offset, (SIZE,), primary=True)
        self._state = RankState([StateTensor("vector", self._vector, box)])

    def initialize(self) -> None:
        self._vector.fill_(self._world.rank + 1)
        self.applied_step = 0

    def abandon_step(self) -> None:
        pass  # nothing of a step exists before it is applied

    def layout(self) -> StateLayout:
        return self._state.layout

    def freeze(self, step: int) -> Snapshot:
        return self._state.freeze({"step": step})

    def read_state(self, payload: memoryview) -> int:
        self.applied_step = int(self._state.read(payload)["step"])
        return self.applied_step

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        phase("forward", step)
        difference = self._vector - torch.arange(SIZE) / step
        phase("agree", step)
        agreed = agree(
            Contribution(
                loss_sum=float(difference.square().mean()),
                count=1,
                grad_sq=float(difference.square().sum()),
                data_index=self._world.rank,
                samples=step * self._world.world_size + self._world.rank,
                sample_count=1,
            )
        )
        gate(step)
        phase("optimizer", step)
        self._vector -= LEARNING_RATE * difference
        self.applied_step = step
        return StepOutcome(agreed=agreed, lr=LEARNING_RATE, tokens=self._world.world_size)
