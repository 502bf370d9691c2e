"""The recipe of `benchmarks.storm`: a small model with waits that make a step take a second, or
`step_s` of the spec's `config`."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn

from holdfast_workers.recipes import World
from holdfast_workers.recipes.pretrain import PretrainRecipe

STEP_S = 1.0
FORWARD_SHARE = 1.0 / 3.0
SLICE_S = 0.005
"""Longer than any accelerator kernel; a rank can leave the step between two slices."""


class OneSecondSteps(PretrainRecipe):
    """Each block waits before its forward and after its gradient, for a step's time in total.

    The waits stand for the computation of an accelerator: on a machine with fewer cores than ranks,
    computing for a second would measure the cores. torchft's replicas wait equally long.
    """

    def build(self, world: World) -> None:
        super().build(world)
        blocks = list(self.model.blocks.values())
        train = self.spec.train
        passes = train.global_batch // (train.micro_batch * world.size("dp_shard")) * len(blocks)
        step_s = float(self.spec.config.get("step_s", STEP_S))
        forward_s = step_s * FORWARD_SHARE / passes
        backward_s = step_s * (1.0 - FORWARD_SHARE) / passes

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
