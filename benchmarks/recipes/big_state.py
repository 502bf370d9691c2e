"""A recipe with a large state and a short step, which makes the cost of checkpoints visible.

The state of a rank is `layers` square float32 matrices of `dim` rows, not shared with other ranks.
A step multiplies small matrices (`sequence_length` times), reads no data, and then changes every
byte of the state, as an optimizer does.
"""

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

SIDE = 384  # of the matrices multiplied in a step


class BigState(Recipe):
    """A job selects this recipe with `recipe: benchmarks.recipes.big_state:BigState`."""

    tensors: list[torch.Tensor]

    def build(self, world: World) -> None:
        model = self.spec.model
        self._world = world
        self.tensors = [torch.zeros(model.dim, model.dim) for _ in range(model.layers)]
        pieces = []
        for index, tensor in enumerate(self.tensors):
            shape = (world.world_size * model.dim, model.dim)
            box = ShardBox(shape, (world.rank * model.dim, 0), tuple(tensor.shape), primary=True)
            pieces.append(StateTensor(f"model.{index}", tensor, box))
        self._state = RankState(pieces, [])
        self._factor = torch.full((SIDE, SIDE), 1.0 / SIDE)

    def initialize(self) -> None:
        for index, tensor in enumerate(self.tensors):
            tensor.fill_(index + self._world.rank)
        self.applied_step = 0

    def rebind(self, world: World) -> None:
        self._world = world

    def abandon_step(self) -> None:
        pass

    def layout(self) -> StateLayout:
        return self._state.layout

    def freeze(self, step: int) -> Snapshot:
        return self._state.freeze({"step": step})

    def read_state(self, payload: memoryview) -> int:
        self.applied_step = int(self._state.read(payload)["step"])
        return self.applied_step

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        phase("forward", step)
        product = self._factor
        for _ in range(self.spec.model.sequence_length):
            product = product @ self._factor
        phase("agree", step)
        agreed = agree(
            Contribution(
                loss_sum=float(product[0, 0]),
                count=1,
                grad_sq=0.0,
                data_index=self._world.rank,
                samples=self._world.rank,
                sample_count=1,
            )
        )
        gate(step)
        phase("optimizer", step)
        for tensor in self.tensors:
            tensor.add_(1e-3)
        self.applied_step = step
        return StepOutcome(agreed=agreed, lr=1e-3, tokens=1)
