"""Norm and clipping of a rank's gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


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
