"""Activation checkpointing: blocks compute activations again in the backward pass instead of
keeping them.

`full` keeps the input of a block only (Chen et al. 2016, arXiv:1604.06174). `selective` keeps the
results of matrix products and of attention too, which are most of the work and little of the
memory. Both give the same bits as no checkpointing: the same operations run again, on the same
numbers, with the same dropout masks.

The block's `forward` is replaced, so names of parameters stay; FSDP's hooks are around it, so
parameters are gathered once for the pass that computes again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from holdfast_workers.models.transformer import Transformer
from holdfast_workers.spec import ActivationCheckpointing

_aten = torch.ops.aten
KEPT_RESULTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Operations whose results `selective` keeps. No collective is among them. The all-reduce of tensor
parallelism works in place: its result, kept, would be summed over again, and the gradients would be
wrong without an error."""


def apply_activation_checkpointing(
    model: Transformer, mode: ActivationCheckpointing, every: int = 1
) -> None:
    """Checkpoint each `every`-th block of `model`, in place, from the first one on."""
    for block in list(model.blocks.values())[::every] if mode != "none" else ():
        block.forward = partial(_checkpointed, block.forward, mode == "selective")


def _checkpointed(forward: Callable[..., Tensor], selective: bool, *args: Any) -> Tensor:
    options: dict[str, Any] = {}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    output: Tensor = checkpoint(forward, *args, use_reentrant=False, **options)
    return output


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = operation in KEPT_RESULTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
