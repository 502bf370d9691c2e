"""Muon: updates of matrices with singular values near 1.

The momentum is kept in pieces. The iteration needs whole matrices, so each step sends the pieces of
the update, in bfloat16, to a rank that computes it, and gets them back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _zeropower_via_newtonschulz,
)

from holdfast_workers.optim.adamw import LocalAdamW
from holdfast_workers.optim.local_optimizer import LocalOptimizer, LocalParameter, ParameterPeers
from holdfast_workers.spec import OptimizerSpec

RMS_OF_ADAMW = 0.2


class LocalMuon(LocalOptimizer):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) of the matrices in
    blocks, and AdamW of the rest. The update is scaled to the size of AdamW's, so that one learning
    rate does for both (Liu et al. 2025, arXiv:2502.16982, section 2.2)."""

    def __init__(
        self, parameters: Sequence[LocalParameter], spec: OptimizerSpec, peers: ParameterPeers
    ) -> None:
        assert spec.momentum is not None and spec.nesterov is not None
        super().__init__(parameters)
        self._momentum, self._nesterov, self._peers = spec.momentum, spec.nesterov, peers
        chosen = [each.in_block and len(each.whole_shape) == 2 for each in parameters]
        rows = [*zip(parameters, chosen, strict=True)]
        self._chosen = chosen
        self._matrices = [each for each, is_chosen in rows if is_chosen]
        self._buffers = self._add_moments("momentum_buffer", self._matrices)
        self._rest = LocalAdamW([each for each, is_chosen in rows if not is_chosen], spec)
        self.moments += self._rest.moments

    def set_steps_taken(self, steps: int) -> None:
        super().set_steps_taken(steps)
        self._rest.set_steps_taken(steps)

    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        rows = [*zip(gradients, self._chosen, strict=True)]
        self._update_matrices([gradient for gradient, is_chosen in rows if is_chosen], lr)
        self._rest.step([gradient for gradient, is_chosen in rows if not is_chosen], lr)
        self.steps_taken += 1

    @torch.no_grad()
    def _update_matrices(self, gradients: Sequence[Tensor], lr: float) -> None:
        names = [each.name for each in self._matrices]
        pieces = self._pieces(gradients)
        updates = self._peers.mapped(names, pieces, orthogonalized, torch.bfloat16)
        for each, update in zip(self._matrices, updates, strict=True):
            rate = lr * each.lr_scale
            each.tensor.mul_(1.0 - rate * each.weight_decay)
            scale = RMS_OF_ADAMW * math.sqrt(max(each.whole_shape))
            each.tensor.add_(update, alpha=-rate * scale)

    def _pieces(self, gradients: Sequence[Tensor]) -> Iterator[Tensor]:
        """This rank's pieces of the updates, before they are orthogonalized."""
        for gradient, buffer in zip(gradients, self._buffers, strict=True):
            buffer.lerp_(gradient, 1.0 - self._momentum)
            update = gradient.lerp(buffer, self._momentum) if self._nesterov else buffer
            yield update.bfloat16()


def orthogonalized(matrix: Tensor) -> Tensor:
    """The matrix with all singular values near 1, in bfloat16, by torch's own iteration."""
    coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
    return _zeropower_via_newtonschulz(matrix, coefficients, DEFAULT_NS_STEPS, EPS)
