"""Optimizers whose update is elementwise: they need no other piece of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast_workers.optim.local_optimizer import LocalOptimizer, LocalParameter
from holdfast_workers.spec import OptimizerSpec


class TorchOptimizer(LocalOptimizer):
    """One of torch's own optimizers, whose state is created before the first step."""

    def __init__(
        self, parameters: Sequence[LocalParameter], optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(parameters)
        self._optimizer = optimizer

    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.tensor.grad = gradient
        try:
            self._optimizer.step()
        finally:
            for parameter in self.parameters:
                parameter.tensor.grad = None
        self.steps_taken += 1


def groups_of(parameters: Sequence[LocalParameter]) -> list[dict[str, Any]]:
    """Torch's groups of parameters: those with the same decay and factor on the rate."""
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for each in parameters:
        groups.setdefault((each.weight_decay, each.lr_scale), []).append(each.tensor)
    return [
        {"params": tensors, "weight_decay": decay, "lr_scale": scale}
        for (decay, scale), tensors in groups.items()
    ]


class LocalSGD(TorchOptimizer):
    """Stochastic gradient descent, with momentum (Sutskever et al. 2013) unless it is 0."""

    def __init__(self, parameters: Sequence[LocalParameter], spec: OptimizerSpec) -> None:
        assert spec.momentum is not None and spec.nesterov is not None
        optimizer = torch.optim.SGD(
            groups_of(parameters),
            spec.lr,
            momentum=spec.momentum,
            nesterov=spec.nesterov,
            fused=True,
        )
        super().__init__(parameters, optimizer)
        if spec.momentum:
            buffers = self._add_moments("momentum_buffer", parameters)
            for parameter, buffer in zip(parameters, buffers, strict=True):
                optimizer.state[parameter.tensor] = {"momentum_buffer": buffer}


class LocalLion(LocalOptimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

    def __init__(self, parameters: Sequence[LocalParameter], spec: OptimizerSpec) -> None:
        assert spec.betas is not None
        super().__init__(parameters)
        self._betas = spec.betas
        self._exp_avg = self._add_moments("exp_avg", parameters)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        first, second = self._betas
        for each, gradient, average in zip(self.parameters, gradients, self._exp_avg, strict=True):
            rate = lr * each.lr_scale
            each.tensor.mul_(1.0 - rate * each.weight_decay)
            each.tensor.add_(average.lerp(gradient, 1.0 - first).sign_(), alpha=-rate)
            average.lerp_(gradient, 1.0 - second)
        self.steps_taken += 1
