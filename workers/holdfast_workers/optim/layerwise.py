"""Optimizers whose step depends on norms or means of whole parameters, which the peers complete.

A vector (a bias, the weight of a norm) has a trust ratio of 1, as in common implementations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from holdfast_workers.optim.local_optimizer import (
    LocalOptimizer,
    LocalParameter,
    ParameterPeers,
    squared_norms,
    summed_vectors,
)
from holdfast_workers.spec import OptimizerSpec

TRUST_COEFFICIENT = 0.001
"""Of LARS, as in its paper."""
_BETA2_DECAY = -0.8
_LEAST_RMS = 1e-3
_LEAST_MEAN = torch.finfo(torch.float32).eps
"""Of Adafactor: the constants of torch's own."""


class LocalLARS(LocalOptimizer):
    """LARS (You et al. 2017, arXiv:1708.03888), with the learning rate outside of the momentum, so
    that a change of the rate acts at once."""

    def __init__(
        self, parameters: Sequence[LocalParameter], spec: OptimizerSpec, peers: ParameterPeers
    ) -> None:
        assert spec.momentum is not None and spec.nesterov is not None
        super().__init__(parameters)
        self._momentum, self._nesterov, self._peers = spec.momentum, spec.nesterov, peers
        self._buffers = self._add_moments("momentum_buffer", parameters)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        tensors = [each.tensor for each in self.parameters]
        of_tensors, of_gradients = squared_norms(self._peers, self.parameters, tensors, gradients)
        rows = zip(self.parameters, gradients, self._buffers, of_tensors, of_gradients, strict=True)
        for each, gradient, buffer, tensor_sq, gradient_sq in rows:
            norm, decay = math.sqrt(tensor_sq), each.weight_decay
            whole = math.sqrt(gradient_sq) + decay * norm
            is_trusted = each.is_matrix and norm > 0 and whole > 0
            trust = TRUST_COEFFICIENT * norm / whole if is_trusted else 1.0
            change = gradient.add(each.tensor, alpha=decay).mul_(trust)
            buffer.mul_(self._momentum).add_(change)
            change = change.add_(buffer, alpha=self._momentum) if self._nesterov else buffer
            each.tensor.add_(change, alpha=-lr * each.lr_scale)
        self.steps_taken += 1


class LocalLAMB(LocalOptimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2), with corrected bias and the identity
    as its φ."""

    def __init__(
        self, parameters: Sequence[LocalParameter], spec: OptimizerSpec, peers: ParameterPeers
    ) -> None:
        assert spec.betas is not None and spec.eps is not None
        super().__init__(parameters)
        self._betas, self._eps, self._peers = spec.betas, spec.eps, peers
        self._exp_avg = self._add_moments("exp_avg", parameters)
        self._exp_avg_sq = self._add_moments("exp_avg_sq", parameters)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        self.steps_taken += 1
        self._make_updates(gradients)
        tensors = [each.tensor for each in self.parameters]
        of_tensors, of_updates = squared_norms(self._peers, self.parameters, tensors, gradients)
        rows = zip(self.parameters, gradients, of_tensors, of_updates, strict=True)
        for each, update, tensor_sq, update_sq in rows:
            is_trusted = each.is_matrix and tensor_sq > 0 and update_sq > 0
            trust = math.sqrt(tensor_sq / update_sq) if is_trusted else 1.0
            each.tensor.add_(update, alpha=-lr * each.lr_scale * trust)

    def _make_updates(self, gradients: Sequence[Tensor]) -> None:
        """Replace the gradients by the updates."""
        first, second = self._betas
        of_first, of_second = (1.0 - beta**self.steps_taken for beta in self._betas)
        rows = zip(self.parameters, gradients, self._exp_avg, self._exp_avg_sq, strict=True)
        for each, gradient, exp_avg, exp_avg_sq in rows:
            exp_avg.lerp_(gradient, 1.0 - first)
            exp_avg_sq.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
            root = exp_avg_sq.div(of_second).sqrt_().add_(self._eps)
            torch.div(exp_avg, of_first, out=gradient)
            gradient.div_(root).add_(each.tensor, alpha=each.weight_decay)


class LocalAdafactor(LocalOptimizer):
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) as torch's own: a relative step, and no
    first moment. Of a matrix it keeps the mean squares of rows and of columns."""

    def __init__(self, parameters: Sequence[LocalParameter], peers: ParameterPeers) -> None:
        super().__init__(parameters)
        self._peers = peers
        self._matrices = [each for each in parameters if each.is_matrix]
        vectors = [each for each in parameters if not each.is_matrix]
        self._row_vars = self._add_moments("row_var", self._matrices, reduced=1)
        self._col_vars = self._add_moments("col_var", self._matrices, reduced=0)
        self._variances = self._add_moments("variance", vectors)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        self.steps_taken += 1
        tensors = [each.tensor for each in self.parameters]
        (of_tensors,) = squared_norms(self._peers, self.parameters, tensors)
        self._make_updates(gradients)
        (of_updates,) = squared_norms(self._peers, self.parameters, gradients)
        rows = zip(self.parameters, gradients, of_tensors, of_updates, strict=True)
        for each, update, tensor_sq, update_sq in rows:
            rate, count = lr * each.lr_scale, math.prod(each.whole_shape)
            relative = min(rate, self.steps_taken**-0.5)
            size = max(_LEAST_RMS, math.sqrt(tensor_sq / count)) * relative
            each.tensor.mul_(1.0 - rate * each.weight_decay)
            each.tensor.add_(update, alpha=-size / max(1.0, math.sqrt(update_sq / count)))

    def _make_updates(self, gradients: Sequence[Tensor]) -> None:
        """Divide the gradients by the roots of their estimated mean squares."""
        pairs = [*zip(self.parameters, gradients, strict=True)]
        weight = self.steps_taken**_BETA2_DECAY
        self._update_factors([g for each, g in pairs if each.is_matrix], weight)
        estimates = self._estimates()
        variances = iter(self._variances)
        for each, gradient in pairs:
            if each.is_matrix:
                estimate = next(estimates)
            else:
                variance = next(variances)
                variance.lerp_(gradient * gradient, weight)
                estimate = variance.clone()
            gradient.mul_(estimate.clamp_(min=_LEAST_MEAN**2).rsqrt_())

    def _update_factors(self, gradients: Sequence[Tensor], weight: float) -> None:
        for reduced, factors in ((1, self._row_vars), (0, self._col_vars)):
            sums = [gradient.square().sum(reduced) for gradient in gradients]
            wholes = summed_vectors(self._peers, self._matrices, sums, dimension=reduced)
            parts = torch.split(wholes, [each.numel() for each in sums])
            for each, factor, part in zip(self._matrices, factors, parts, strict=True):
                factor.lerp_((part / each.whole_shape[reduced]).view_as(factor), weight)

    def _estimates(self) -> Iterator[Tensor]:
        """The mean squares of the matrices' elements: row times column, by the mean of the rows."""
        sums = [each.sum().reshape(1) for each in self._row_vars]
        wholes = summed_vectors(self._peers, self._matrices, sums, dimension=0)
        rows = zip(
            self._matrices, self._row_vars, self._col_vars, torch.split(wholes, 1), strict=True
        )
        for each, row_var, col_var, whole in rows:
            yield (row_var @ col_var).div_((whole / each.whole_shape[0]).clamp_(min=_LEAST_MEAN))
