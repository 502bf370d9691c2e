"""Divides the sequence over the `tp` axis where tensor parallelism has whole activations: between
the halves of a block (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

The residual stream, its norms and dropout are computed on this rank's part of the positions. A half
block gathers the sequence before its split layers, and their outputs are summed and divided in one
reduce-scatter: the same bytes on the wire as the all-reduce that they replace.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from holdfast_workers.models.llama import Block, Llama
from holdfast_workers.models.rms_norm import RMSNorm, rms_norm
from holdfast_workers.parallelize.tensor import SumGradients, split_layers

# Looked up when they are called, because workers count collectives by wrappers of these functions.
_ALL_GATHER, _REDUCE_SCATTER = (
    ("all_gather_single", "reduce_scatter_single")  # since torch 2.13
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)


def apply_sequence_parallel(model: Llama, axis: DeviceMesh) -> None:
    """Split the layers of `model` (on the meta device) in place over the one-dimensional mesh
    `axis`, and the sequence between them; the size of the axis divides the sequence's length. In
    place of `apply_tensor_parallel`."""
    for block in model.blocks:
        assert isinstance(block, Block)
        split_layers(block, axis)
        for half in (block.attention, block.feed_forward):
            half.register_forward_pre_hook(partial(_enter_half, axis))
            half.register_forward_hook(partial(_leave_half, axis))
        for norm in (block.attention_norm, block.feed_forward_norm):
            norm.forward = partial(_norm_of_part, norm, axis)  # type: ignore[method-assign]
    model.embedding.register_forward_hook(partial(_take_part, axis))
    model.norm.register_forward_pre_hook(partial(_join_parts, axis))


def _enter_half(axis: DeviceMesh, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    whole: Tensor = _Gather.apply(args[0], axis)  # type: ignore[no-untyped-call]
    return (whole, *args[1:])


def _leave_half(axis: DeviceMesh, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    part: Tensor = _SumParts.apply(output, axis)  # type: ignore[no-untyped-call]
    return part


def _norm_of_part(norm: RMSNorm, axis: DeviceMesh, x: Tensor) -> Tensor:
    # Each rank sees some positions: the weight's gradient is the sum over the axis.
    weight: Tensor = SumGradients.apply(norm.weight, axis)  # type: ignore[no-untyped-call]
    return rms_norm(x, weight, norm.eps)


def _take_part(axis: DeviceMesh, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    part: Tensor = _TakePart.apply(output, axis)  # type: ignore[no-untyped-call]
    return part


def _join_parts(axis: DeviceMesh, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    whole: Tensor = _JoinParts.apply(args[0], axis)  # type: ignore[no-untyped-call]
    return (whole,)


class _Gather(torch.autograd.Function):
    """The whole sequence in forward; in backward this rank's part of the summed gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: DeviceMesh) -> Tensor:
        ctx.axis = axis
        return _gathered(part, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed_part(gradient, ctx.axis), None


class _SumParts(torch.autograd.Function):
    """This rank's part of the sum in forward; the whole gradient in backward."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: DeviceMesh) -> Tensor:
        ctx.axis = axis
        return _summed_part(whole, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.axis), None


class _TakePart(torch.autograd.Function):
    """This rank's part of what all ranks have; in backward the parts of all."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: DeviceMesh) -> Tensor:
        ctx.axis = axis
        return _own_part(whole, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.axis), None


class _JoinParts(torch.autograd.Function):
    """The whole sequence, of which all ranks compute the same; in backward this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: DeviceMesh) -> Tensor:
        ctx.axis = axis
        return _gathered(part, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _own_part(gradient, ctx.axis), None


def _own_part(whole: Tensor, axis: DeviceMesh) -> Tensor:
    """(batch, sequence, dim) to this rank's (batch, sequence / size, dim)."""
    return whole.chunk(axis.size(), dim=1)[axis.get_local_rank()].contiguous()


def _gathered(part: Tensor, axis: DeviceMesh) -> Tensor:
    """(batch, sequence / size, dim) of each rank to (batch, sequence, dim)."""
    parts = part.new_empty((axis.size() * part.shape[0], *part.shape[1:]))
    getattr(dist, _ALL_GATHER)(parts, part.contiguous(), group=axis.get_group())
    return parts.view(axis.size(), *part.shape).transpose(0, 1).flatten(1, 2)


def _summed_part(whole: Tensor, axis: DeviceMesh) -> Tensor:
    """The sum of the ranks' (batch, sequence, dim), this rank's (batch, sequence / size, dim)."""
    batch, length, dim = whole.shape
    parts = whole.reshape(batch, axis.size(), length // axis.size(), dim).transpose(0, 1)
    own = whole.new_empty(parts.shape[1:])
    summands = parts.flatten(0, 1).contiguous()
    getattr(dist, _REDUCE_SCATTER)(own, summands, group=axis.get_group())
    return own
