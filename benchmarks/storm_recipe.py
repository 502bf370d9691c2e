"""The recipe of the storm: a small model whose step is made to take `STEP_S` by waiting."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn

from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.training.recipe import World

STEP_S = 1.0
FORWARD_SHARE = 1.0 / 3.0
SLICE_S = 0.005
"""No kernel of an accelerator takes so long; between two of them a rank can leave."""


class OneSecondSteps(PretrainRecipe):
    """Each block waits before its forward and after its gradient came, in all `STEP_S`, as an
    accelerator would compute: on a machine with fewer cores than ranks, computing for a second
    would measure the cores. torchft's replicas wait as long."""

    def build(self, world: World) -> None:
        super().build(world)
        blocks = next(item for item in self.model.children() if isinstance(item, nn.ModuleList))
        train = self.spec.train
        passes = train.global_batch // (train.micro_batch * world.size("dp_shard")) * len(blocks)
        forward_s = STEP_S * FORWARD_SHARE / passes
        backward_s = STEP_S * (1.0 - FORWARD_SHARE) / passes

        def wait_forward(_block: nn.Module, _inputs: Any) -> None:
            self._wait(forward_s)

        def wait_backward(_block: nn.Module, _inputs: Any, output: Tensor) -> None:
            output.register_hook(lambda _gradient: self._wait(backward_s))  # type: ignore[no-untyped-call]

        for block in blocks:
            block.register_forward_pre_hook(wait_forward)
            block.register_forward_hook(wait_backward)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.leave_if_over()
            time.sleep(min(left, SLICE_S))
