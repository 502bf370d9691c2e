"""Divides a Llama's vocabulary over the `tp` axis: embedding, head, and the cross-entropy.

Each rank has the rows of its part of the vocabulary. A token's embedding is the sum over the axis,
to which only the rank with its row contributes. The head gives each rank the logits of its part;
the loss needs one maximum and two sums over the axis, and never the logits of the others (Shoeybi
et al. 2019, arXiv:1909.08053, section 3). Each rank has the same loss, to the last bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holdfast_workers.models.llama import Llama
from holdfast_workers.parallelize.tensor import PieceOfLinear, SumGradients, SumOutputs

_BY_ROW = Shard(0)


def apply_vocabulary_parallel(model: Llama, axis: DeviceMesh) -> None:
    """Split embedding and head of `model` (on the meta device) in place over the one-dimensional
    mesh `axis`, whose size divides the vocabulary. The model then returns the logits of this rank's
    part: use :func:`loss_over_vocabulary`."""
    embedding = model.embedding
    embedding.weight = _split(embedding.weight, axis)
    embedding.forward = partial(_embed, embedding, axis)  # type: ignore[method-assign]
    if model.head is not None:
        model.head.weight = _split(model.head.weight, axis)
    model.logits = partial(_logits, model, axis)  # type: ignore[method-assign]


def loss_over_vocabulary(logits: Tensor, targets: Tensor, axis: DeviceMesh) -> Tensor:
    """The sum over targets (batch, sequence) of their cross-entropy; a negative target counts
    nothing. `logits`: (batch, sequence, part of the vocabulary)."""
    rows = logits.float().flatten(0, 1)
    loss: Tensor = _CrossEntropy.apply(rows, targets.flatten(), axis)  # type: ignore[no-untyped-call]
    return loss


def _split(weight: Tensor, axis: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(weight, axis, [_BY_ROW], src_data_rank=None))


def _embed(embedding: nn.Embedding, axis: DeviceMesh, tokens: Tensor) -> Tensor:
    rows: Tensor = _Rows.apply(tokens, embedding.weight, axis)  # type: ignore[no-untyped-call]
    embedded: Tensor = SumOutputs.apply(rows, axis)  # type: ignore[no-untyped-call]
    return embedded


def _logits(model: Llama, axis: DeviceMesh, x: Tensor) -> Tensor:
    weight = (model.embedding if model.head is None else model.head).weight
    entered: Tensor = SumGradients.apply(x, axis)  # type: ignore[no-untyped-call]
    logits: Tensor = PieceOfLinear.apply(entered, weight)  # type: ignore[no-untyped-call]
    return logits


def _in_piece(ids: Tensor, rows: int, axis: DeviceMesh) -> tuple[Tensor, Tensor]:
    """The ids' rows in this rank's piece of `rows`, 0 for those of other ranks; and which they
    are."""
    own = ids - axis.get_local_rank() * rows
    elsewhere = (own < 0) | (own >= rows)
    return own.masked_fill(elsewhere, 0), elsewhere


class _Rows(torch.autograd.Function):
    """Embeddings of the tokens in this rank's piece of a DTensor weight, and zeros of others."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: DTensor, axis: DeviceMesh) -> Tensor:
        piece = weight._local_tensor
        own, elsewhere = _in_piece(tokens, piece.shape[0], axis)
        ctx.save_for_backward(own, elsewhere)
        ctx.rows, ctx.spec = piece.shape[0], weight._spec
        return F.embedding(own, piece).masked_fill(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        own, elsewhere = ctx.saved_tensors
        own_gradient = gradient.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        rows = torch.ops.aten.embedding_dense_backward(own_gradient, own, ctx.rows, -1, False)
        wrapped = DTensor(rows, ctx.spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return None, wrapped, None


class _CrossEntropy(torch.autograd.Function):
    """The cross entropy, summed over the targets, of logits that are divided by vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: DeviceMesh) -> Tensor:
        group = axis.get_group()
        highest = logits.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        own, elsewhere = _in_piece(targets, logits.shape[-1], axis)
        shifted = logits - highest.unsqueeze(-1)
        picked = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(-1), picked))
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        total, of_targets = sums
        counted = targets >= 0
        shares = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(shares, own, elsewhere, counted)
        loss: Tensor = (total.log() - of_targets).masked_fill(~counted, 0.0).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shares, own, elsewhere, counted = ctx.saved_tensors
        ones = (~elsewhere).to(shares.dtype).unsqueeze(-1)
        of_logits = shares.scatter_add(-1, own.unsqueeze(-1), -ones)
        return of_logits.masked_fill(~counted.unsqueeze(-1), 0.0) * gradient, None, None
