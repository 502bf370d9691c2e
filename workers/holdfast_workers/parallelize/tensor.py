"""Applies tensor parallelism to a transformer: the placement of its parameters, and collectives.

Parameters become DTensors on the `tp` axis, which records their placement and lets FSDP2 shard
them further. The arithmetic runs on each rank's local piece, without dispatch through DTensor,
which would cost more than the arithmetic of a small layer. Attention and feed-forward are each
split by columns, then by rows (Shoeybi et al. 2019, arXiv:1909.08053, section 3): one all-reduce
per half block and direction. Norms of the residual stream are whole and computed identically on
every rank, so their gradients need no collective: the replicas stay bitwise equal because the
all-reduce gives every rank the same bits. So are embedding and head, unless `vocabulary.py` divides
them. A norm of queries or keys is whole too, but it sees the heads of its rank, so its gradient is
summed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holdfast_workers.models.transformer import Norm, PreNormBlock, Transformer

_BY_COLUMN, _BY_ROW = Shard(0), Shard(1)


def apply_tensor_parallel(model: Transformer, axis: DeviceMesh) -> None:
    """Split `model` (on the meta device) in place over the one-dimensional mesh `axis`."""
    for block in model.blocks.values():
        assert isinstance(block, PreNormBlock)
        split_layers(block, axis)
        for half in (block.attention, block.feed_forward):
            half.register_forward_pre_hook(partial(_enter, axis))
            half.register_forward_hook(partial(_leave, axis))


def split_layers(block: PreNormBlock, axis: DeviceMesh) -> None:
    """Split the weights of a block. Its halves then need the whole input, and give a summand of
    their output."""
    by_row = (block.attention.output, block.feed_forward.down)
    for layer in (*block.attention.children(), *block.feed_forward.children()):
        if isinstance(layer, Norm):
            sum_gradient(layer, axis)  # of a head: each rank has some
            continue
        assert isinstance(layer, nn.Linear)
        _split(layer, axis, _BY_ROW if layer in by_row else _BY_COLUMN)


def sum_gradient(norm: Norm, axis: DeviceMesh) -> None:
    """Each rank norms another part of the activations: the weight's gradient is the sum over the
    axis."""
    norm.forward = partial(_norm_of_part, norm, axis)  # type: ignore[method-assign]


def _norm_of_part(norm: Norm, axis: DeviceMesh, x: Tensor) -> Tensor:
    weight: Tensor = SumGradients.apply(norm.weight, axis)  # type: ignore[no-untyped-call]
    return norm.scaled(x, weight)


def _split(linear: nn.Linear, axis: DeviceMesh, placement: Shard) -> None:
    for name, parameter in list(linear.named_parameters()):
        piece = distribute_tensor(parameter, axis, [placement], src_data_rank=None)
        setattr(linear, name, nn.Parameter(piece))
    linear.forward = partial(_forward_on_local_piece, linear)  # type: ignore[method-assign]


def _forward_on_local_piece(linear: nn.Linear, x: Tensor) -> Tensor:
    weight, bias = linear.weight, linear.bias
    if torch.compiler.is_compiling():
        return F.linear(x, _local(weight), None if bias is None else _local(bias))
    product: Tensor = PieceOfLinear.apply(x, weight)  # type: ignore[no-untyped-call]
    return product if bias is None else product + _local(bias)


def _local(parameter: Tensor) -> Tensor:
    local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local


def _enter(axis: DeviceMesh, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    entered: Tensor = SumGradients.apply(args[0], axis)  # type: ignore[no-untyped-call]
    return (entered, *args[1:])


def _leave(axis: DeviceMesh, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    left: Tensor = SumOutputs.apply(output, axis)  # type: ignore[no-untyped-call]
    return left


class PieceOfLinear(torch.autograd.Function):
    """x · weightᵀ on the local piece of a DTensor weight.

    The same as `F.linear(x, weight.to_local())`, without the conversion's cost in autograd. The
    weight's gradient is wrapped with the weight's own placements.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: DTensor) -> Tensor:
        piece = weight._local_tensor
        ctx.save_for_backward(x, piece)
        ctx.spec = weight._spec
        return F.linear(x, piece)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, piece = ctx.saved_tensors
        whole_gradient = gradient.flatten(0, -2).t().mm(x.flatten(0, -2))
        wrapped = DTensor(whole_gradient, ctx.spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return gradient.matmul(piece), wrapped


class SumGradients(torch.autograd.Function):
    """Identity in forward; sums the gradient over the axis in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: DeviceMesh) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.axis), None


class SumOutputs(torch.autograd.Function):
    """Sums over the axis in forward; identity in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: DeviceMesh) -> Tensor:
        return _summed(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _summed(x: Tensor, axis: DeviceMesh) -> Tensor:
    if torch.compiler.is_compiling():
        summed: Tensor = functional.all_reduce(x, "sum", axis.get_group())
        return summed
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.get_group())
    return total
