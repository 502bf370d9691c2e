"""Divides each sequence over the `cp` axis: a rank computes some of its positions.

Only attention needs the other positions. Three methods exchange them:

- `all_gather`: each rank gathers keys and values of all positions (Llama Team 2024,
  arXiv:2407.21783, section 3.3.2). In the backward pass, a reduce-scatter sums their gradients.
- `ring`: keys and values go round the ranks in blocks; see `ring_attention.py`.
- `ulysses`: two all-to-alls give each rank all positions of some heads, and back (Jacobs et al.
  2023, arXiv:2309.14509).

Causal attention costs more the later a position is. So for the first two methods, rank r of n has
the chunks r and 2n - 1 - r of 2n equal chunks: each rank has the same work. No code derives an
order from a rank: `model.positions` says which positions a rank has, and masks compare positions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from holdfast_workers.models.llama import Block, Llama, causal_attention, is_seen, repeated_heads
from holdfast_workers.parallelize.ring_attention import DividedPositions, Run, ring_attention
from holdfast_workers.parallelize.sequence import all_gather, reduce_scatter
from holdfast_workers.spec import ContextMethod


def apply_context_parallel(model: Llama, axis: DeviceMesh, method: ContextMethod) -> None:
    """Give `model` (on the meta device) this rank's positions, and exchange the others' keys and
    values over the one-dimensional mesh `axis`. Inputs and targets must be those of
    `model.positions`."""
    size, length = axis.size(), model.sequence_length
    of_rank = contiguous_positions if method == "ulysses" else balanced_positions
    divided = DividedPositions.of([of_rank(length, rank, size) for rank in range(size)])
    model.set_positions(divided.by_rank[axis.get_local_rank()])
    attend = {"all_gather": _attend_gathered, "ring": ring_attention, "ulysses": _attend_by_heads}
    for block in model.blocks.values():
        assert isinstance(block, Block)
        window = block.attention.window
        block.attention.attend = partial(  # type: ignore[method-assign]
            attend[method], axis, divided, window
        )


def balanced_positions(length: int, rank: int, size: int) -> Tensor:
    """The positions of chunks `rank` and 2 · size - 1 - `rank` of 2 · size equal ones."""
    chunks = torch.arange(length, device="cpu").chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def contiguous_positions(length: int, rank: int, size: int) -> Tensor:
    """The positions of chunk `rank` of `size` equal ones."""
    return torch.arange(length, device="cpu").chunk(size)[rank]


# --- all_gather ---------------------------------------------------------------------------------


def _attend_gathered(
    axis: DeviceMesh,
    divided: DividedPositions,
    window: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Causal attention of (batch, heads, own positions, head_size)."""
    both = torch.stack((key, value))
    gathered: Tensor = _GatherPositions.apply(both, axis, divided)  # type: ignore[no-untyped-call]
    key, value = (repeated_heads(whole, query) for whole in gathered)
    own = divided.runs[axis.get_local_rank()]
    parts = [_attend_before(query[:, :, run.at], key, value, run, window) for run in own]
    return torch.cat(parts, dim=2)


def _attend_before(
    query: Tensor, key: Tensor, value: Tensor, run: Run, window: int | None
) -> Tensor:
    """Attention of the queries of `run` to keys and values of all positions in their order; the
    later ones are left out."""
    seen, device = run.last + 1, query.device
    positions = torch.arange(run.first, seen, device=device)
    allowed = is_seen(positions.unsqueeze(1), torch.arange(seen, device=device), window)
    return F.scaled_dot_product_attention(
        query, key[:, :, :seen], value[:, :, :seen], attn_mask=allowed
    )


class _GatherPositions(torch.autograd.Function):
    """(2, batch, heads, own positions, size) to all positions in their order."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: DeviceMesh, divided: DividedPositions) -> Tensor:
        ctx.axis, ctx.divided = axis, divided
        return divided.in_order(all_gather(own, axis).movedim(0, 3).flatten(3, 4), 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        parts = _parts(ctx.divided.by_owner(gradient, 3), 3, ctx.axis)
        return reduce_scatter(parts, ctx.axis), None, None


# --- ulysses ------------------------------------------------------------------------------------


def _attend_by_heads(
    axis: DeviceMesh,
    divided: DividedPositions,
    window: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Causal attention of (batch, heads, own positions, head_size). The size of the axis divides
    the number of heads of keys and values."""
    query, key, value = (_to_heads(x, axis, divided) for x in (query, key, value))
    mixed = causal_attention(query, key, value, window)
    parts = _parts(divided.by_owner(mixed, 2), 2, axis)
    exchanged: Tensor = _AllToAll.apply(parts, axis)  # type: ignore[no-untyped-call]
    return exchanged.movedim(0, 1).flatten(1, 2)


def _to_heads(x: Tensor, axis: DeviceMesh, divided: DividedPositions) -> Tensor:
    """(batch, heads, own positions, size) to (batch, heads / axis size, all positions, size)."""
    exchanged: Tensor = _AllToAll.apply(_parts(x, 1, axis), axis)  # type: ignore[no-untyped-call]
    return divided.in_order(exchanged.movedim(0, 2).flatten(2, 3), 2)


class _AllToAll(torch.autograd.Function):
    """Element i of the first dimension goes to rank i; the result's element i is from rank i."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, axis: DeviceMesh) -> Tensor:
        ctx.axis = axis
        return _exchanged(parts, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.axis), None


def _exchanged(parts: Tensor, axis: DeviceMesh) -> Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.get_group())
    return received


def _parts(x: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """The equal parts of `dim`, as many as `axis` has ranks, in a new first dimension."""
    return torch.stack(x.chunk(axis.size(), dim))
