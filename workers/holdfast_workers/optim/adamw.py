"""AdamW over the local shards of a rank.

The update is elementwise, so it runs directly on each rank's local tensors: no dispatch through
DTensor, no collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast_workers.optim.elementwise import TorchOptimizer, groups_of
from holdfast_workers.optim.local_optimizer import LocalParameter
from holdfast_workers.spec import OptimizerSpec


class LocalAdamW(TorchOptimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), fused."""

    def __init__(self, parameters: Sequence[LocalParameter], spec: OptimizerSpec) -> None:
        assert spec.betas is not None and spec.eps is not None
        groups = groups_of(parameters)
        optimizer = torch.optim.AdamW(groups, spec.lr, spec.betas, spec.eps, fused=True)
        super().__init__(parameters, optimizer)
        exp_avg = self._add_moments("exp_avg", parameters)
        exp_avg_sq = self._add_moments("exp_avg_sq", parameters)
        # The fused kernel would increment a shared counter once per tensor.
        self._counters = [
            torch.zeros((), dtype=torch.float32, device=each.tensor.device) for each in parameters
        ]
        rows = zip(parameters, self._counters, exp_avg, exp_avg_sq, strict=True)
        for parameter, counter, first, second in rows:
            optimizer.state[parameter.tensor] = {
                "step": counter,
                "exp_avg": first,
                "exp_avg_sq": second,
            }

    def set_steps_taken(self, steps: int) -> None:
        super().set_steps_taken(steps)
        for counter in self._counters:
            counter.fill_(float(steps))
