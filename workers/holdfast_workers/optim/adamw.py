"""AdamW over the local shards of a rank.

The update is elementwise, so it runs directly on each rank's local tensors: no dispatch through
DTensor, no collective. State tensors exist from the start, so that the layout is known and a state
can be read before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast_workers.spec import OptimizerSpec


class LocalAdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) with decay on matrices only.

    `tensors` are updated in place. `exp_avg` and `exp_avg_sq` are in the order of `tensors`.
    """

    def __init__(self, tensors: Sequence[Tensor], decayed: Sequence[bool], spec: OptimizerSpec):
        self._tensors = list(tensors)
        self.exp_avg = [torch.zeros_like(tensor) for tensor in tensors]
        self.exp_avg_sq = [torch.zeros_like(tensor) for tensor in tensors]
        groups = [
            {
                "params": [t for t, d in zip(tensors, decayed, strict=True) if d is decay],
                "weight_decay": spec.weight_decay if decay else 0.0,
            }
            for decay in (True, False)
        ]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            fused=True,
        )
        # The fused kernel would increment a shared counter once per tensor.
        self._counters = [
            torch.zeros((), dtype=torch.float32, device=tensor.device) for tensor in tensors
        ]
        rows = zip(tensors, self._counters, self.exp_avg, self.exp_avg_sq, strict=True)
        for tensor, counter, exp_avg, exp_avg_sq in rows:
            self._optimizer.state[tensor] = {
                "step": counter,
                "exp_avg": exp_avg,
                "exp_avg_sq": exp_avg_sq,
            }

    def set_steps_taken(self, steps: int) -> None:
        """Set the number of updates made so far, which the bias correction depends on."""
        for counter in self._counters:
            counter.fill_(float(steps))

    def zero_state(self) -> None:
        for tensor in (*self.exp_avg, *self.exp_avg_sq):
            tensor.zero_()
        self.set_steps_taken(0)

    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        """Apply one update with `gradients`, in the order of `tensors`."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for tensor, gradient in zip(self._tensors, gradients, strict=True):
            tensor.grad = gradient
        try:
            self._optimizer.step()
        finally:
            for tensor in self._tensors:
                tensor.grad = None


def squared_norm(gradients: Sequence[Tensor]) -> float:
    """Sum of squares of all elements, in float64 from the per-tensor norms."""
    if not gradients:
        return 0.0
    norms = torch.stack(torch._foreach_norm(list(gradients))).double()
    return float(norms.square().sum())


def clip(gradients: Sequence[Tensor], grad_norm: float, limit: float | None) -> None:
    """Scale `gradients` in place so that a global norm of `grad_norm` becomes `limit` at most."""
    if limit is None or not math.isfinite(grad_norm) or grad_norm <= limit:
        return
    torch._foreach_mul_(list(gradients), limit / grad_norm)
