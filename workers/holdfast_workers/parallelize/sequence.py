"""Divides the sequence over the `tp` axis where tensor parallelism has whole activations: between
the halves of a block (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

The residual stream, its norms and dropout are computed on this rank's part of the positions. A half
block gathers the sequence before its split layers, and their outputs are summed and divided in one
reduce-scatter: the same bytes on the wire as the all-reduce that they replace.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from holdfast_workers.models.transformer import PreNormBlock, Transformer
from holdfast_workers.parallelize.tensor import split_layers, sum_gradient

# Looked up when they are called, because workers count collectives by wrappers of these functions.
_ALL_GATHER, _REDUCE_SCATTER = (
    ("all_gather_single", "reduce_scatter_single")  # since torch 2.13
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)


def apply_sequence_parallel(model: Transformer, axis: DeviceMesh) -> None:
    """Split the layers of `model` (on the meta device) in place over the one-dimensional mesh
    `axis`, and the sequence between them; the size of the axis divides the sequence's length. In
    place of `apply_tensor_parallel`."""
    for block in model.blocks.values():
        assert isinstance(block, PreNormBlock)
        split_layers(block, axis)
        for half in (block.attention, block.feed_forward):
            # The whole sequence goes in, whose gradient is a summand; a summand comes out.
            half.register_forward_pre_hook(partial(_before, axis, _gathered, _summed_part))
            half.register_forward_hook(partial(_after, axis, _summed_part, _gathered))
        for norm in (block.attention_norm, block.feed_forward_norm):
            sum_gradient(norm, axis)
    # Outside of the blocks all ranks compute the same, gradients included.
    model.embedding.register_forward_hook(partial(_after, axis, _own_part, _gathered))
    model.norm.register_forward_pre_hook(partial(_before, axis, _gathered, _own_part))


Exchange = Callable[[Tensor, DeviceMesh], Tensor]


def _before(
    axis: DeviceMesh, there: Exchange, back: Exchange, _: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    return (_exchanged(args[0], axis, there, back), *args[1:])


def _after(
    axis: DeviceMesh,
    there: Exchange,
    back: Exchange,
    _: nn.Module,
    args: tuple[Any, ...],
    output: Tensor,
) -> Tensor:
    return _exchanged(output, axis, there, back)


def _exchanged(x: Tensor, axis: DeviceMesh, there: Exchange, back: Exchange) -> Tensor:
    exchanged: Tensor = _Exchange.apply(x, axis, there, back)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """`there(x, axis)` in forward, and `back(gradient, axis)` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: DeviceMesh, there: Exchange, back: Exchange) -> Tensor:
        ctx.axis, ctx.back = axis, back
        return there(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradient, ctx.axis), None, None, None


def _own_part(whole: Tensor, axis: DeviceMesh) -> Tensor:
    """(batch, sequence, dim) to this rank's (batch, sequence / size, dim)."""
    return whole.chunk(axis.size(), dim=1)[axis.get_local_rank()].contiguous()


def _gathered(part: Tensor, axis: DeviceMesh) -> Tensor:
    """(batch, sequence / size, dim) of each rank to (batch, sequence, dim)."""
    return all_gather(part, axis).transpose(0, 1).flatten(1, 2)


def _summed_part(whole: Tensor, axis: DeviceMesh) -> Tensor:
    """The sum of the ranks' (batch, sequence, dim), this rank's (batch, sequence / size, dim)."""
    batch, length, dim = whole.shape
    parts = whole.reshape(batch, axis.size(), length // axis.size(), dim).transpose(0, 1)
    return reduce_scatter(parts, axis)


def all_gather(part: Tensor, axis: DeviceMesh) -> Tensor:
    """The ranks' parts, stacked in a new first dimension."""
    parts = part.new_empty((axis.size(), *part.shape))
    getattr(dist, _ALL_GATHER)(parts.flatten(0, 1), part.contiguous(), group=axis.get_group())
    return parts


def reduce_scatter(parts: Tensor, axis: DeviceMesh) -> Tensor:
    """The sum over the ranks of element i of the first dimension, on rank i."""
    own = parts.new_empty(parts.shape[1:])
    summands = parts.flatten(0, 1).contiguous()
    getattr(dist, _REDUCE_SCATTER)(own, summands, group=axis.get_group())
    return own
