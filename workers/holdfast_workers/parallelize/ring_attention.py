"""Causal attention over a sequence that is divided among ranks: keys and values go round a ring.

Each rank keeps its queries. In n steps it gets the keys and values of each of n ranks, attends to
those that are not in the future, and merges the results by their log-sum-exps (Liu et al. 2023,
arXiv:2310.01889). The next block travels while a rank computes. The backward pass sends the blocks
round once more, computes each again from the saved log-sum-exp of all (Dao et al. 2022,
arXiv:2205.14135, appendix B), and the gradients of a block travel with it until they are home.

Only two blocks are on a rank at once, and merged results are float32. `DividedPositions` says which
positions each rank has, for every method (`context.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from holdfast_workers.models.llama import repeated_heads
from holdfast_workers.parallelize.counted_transfers import counted, link_name
from holdfast_workers.parallelize.mesh import CONTEXT_AXIS

_aten = torch.ops.aten


class Run(NamedTuple):
    """Consecutive positions, `first` to `last`, which a rank has at `begin` to `end` of its own."""

    first: int
    last: int
    begin: int
    end: int

    @property
    def at(self) -> slice:
        return slice(self.begin, self.end)


@dataclass(frozen=True)
class DividedPositions:
    """Each position is on exactly one rank. Runs of different ranks do not overlap."""

    by_rank: list[Tensor]
    """Positions of each rank, increasing."""
    runs: list[list[Run]]
    """The runs of positions, by rank."""
    order: Tensor
    """The indices that sort all ranks' positions, taken one rank after the other."""
    owners: Tensor
    """The inverse."""

    @classmethod
    def of(cls, by_rank: list[Tensor]) -> DividedPositions:
        every = torch.cat(by_rank)
        return cls(by_rank, [_runs(own) for own in by_rank], torch.argsort(every), every)

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """`x` with the positions of `dim` in their order, from one rank's after the other's."""
        return x.index_select(dim, self.order.to(x.device))

    def by_owner(self, x: Tensor, dim: int) -> Tensor:
        """The inverse of `in_order`."""
        return x.index_select(dim, self.owners.to(x.device))


def _runs(positions: Tensor) -> list[Run]:
    breaks = (torch.nonzero(positions.diff() != 1).flatten() + 1).tolist()
    ends = [*breaks, len(positions)]
    return [
        Run(int(positions[begin]), int(positions[end - 1]), begin, end)
        for begin, end in zip([0, *breaks], ends, strict=True)
    ]


def ring_attention(
    axis: DeviceMesh,
    divided: DividedPositions,
    window: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Causal attention of (batch, heads, own positions, head_size); key and value may have fewer
    heads. A spec with a `window` is refused: a pair of runs is seen whole or up to the own one."""
    assert window is None
    mixed: Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]
        query, torch.stack((key, value)), axis, divided
    )
    return mixed


class _Pair(NamedTuple):
    """A run of queries, and a run of keys of which they see all, or all up to their own position.
    As indices of a rank's positions."""

    queries: slice
    keys: slice
    is_causal: bool


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, block: Tensor, axis: DeviceMesh, divided: DividedPositions
    ) -> Tensor:
        """`block`: (2, batch, key heads, own positions, head_size), of keys and values."""
        ring = _Ring(axis)
        mixed = query.new_zeros(query.shape, dtype=torch.float32)
        log_sums = mixed.new_full(query.shape[:-1], -torch.inf)
        held = block.contiguous()
        for step in range(ring.size):
            arriving = ring.start(held) if step < ring.size - 1 else None
            keys, values = (repeated_heads(x, query) for x in held)
            for pair in _pairs(divided, ring.rank, ring.origin(step)):
                part = _attend(query[:, :, pair.queries], keys, values, pair)
                _merge(mixed[:, :, pair.queries], log_sums[:, :, pair.queries], *part)
            held = held if arriving is None else arriving.wait()
        output = mixed.to(query.dtype)
        ctx.save_for_backward(query, block, output, log_sums)
        ctx.axis, ctx.divided = axis, divided
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        query, block, output, log_sums = ctx.saved_tensors
        ring = _Ring(ctx.axis)
        of_query = query.new_zeros(query.shape, dtype=torch.float32)
        held, at_home, returning = block.contiguous(), None, None
        for step in range(ring.size):
            arriving = ring.start(held) if step < ring.size - 1 else None
            keys, values = (repeated_heads(x, query) for x in held)
            of_both = keys.new_zeros((2, *keys.shape), dtype=torch.float32)
            for pair in _pairs(ctx.divided, ring.rank, ring.origin(step)):
                at, to = pair.queries, pair.keys
                parts = _attend_backward(
                    gradient[:, :, at],
                    query[:, :, at],
                    keys[:, :, to],
                    values[:, :, to],
                    output[:, :, at],
                    log_sums[:, :, at],
                    pair.is_causal,
                )
                of_query[:, :, at] += parts[0]
                of_both[0, :, :, to] += parts[1]
                of_both[1, :, :, to] += parts[2]
            batch, heads = held.shape[1:3]  # those of queries that share a key are next to it
            own = of_both.view(2, batch, heads, -1, *held.shape[3:]).sum(3)
            if at_home is None:  # the own block has not left yet
                at_home = own
            else:
                returning = ring.start(own if returning is None else own + returning.wait())
            held = held if arriving is None else arriving.wait()
        assert at_home is not None and returning is not None
        of_block = at_home + returning.wait()
        return of_query.to(query.dtype), of_block.to(block.dtype), None, None


class _Arriving(NamedTuple):
    """A block on its way from the rank before. Keeps the sent one until it has left."""

    received: Tensor
    sent: Tensor
    works: list[Any]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


class _Ring:
    """The ranks of an axis: each sends to the next, and receives from the one before."""

    def __init__(self, axis: DeviceMesh) -> None:
        self.size = axis.size()
        self.rank = axis.get_local_rank()
        self._axis = axis

    def origin(self, step: int) -> int:
        """The rank whose block this rank has after `step` exchanges."""
        return (self.rank - step) % self.size

    def start(self, block: Tensor) -> _Arriving:
        """Send a block on, and begin to receive the next one."""
        sent, received, group = block, torch.empty_like(block), self._axis.get_group()
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        send = dist.P2POp(dist.isend, sent, group=group, group_peer=after)
        receive = dist.P2POp(dist.irecv, received, group=group, group_peer=before)
        works = dist.batch_isend_irecv(
            [
                counted(send, link_name(CONTEXT_AXIS, self.rank, after)),
                counted(receive, link_name(CONTEXT_AXIS, before, self.rank)),
            ]
        )
        return _Arriving(received, sent, works)


def _pairs(divided: DividedPositions, rank: int, origin: int) -> list[_Pair]:
    """The runs of `rank`'s queries with those runs of `origin`'s keys that are not in their
    future."""
    pairs = []
    for queries in divided.runs[rank]:
        for keys in divided.runs[origin]:
            is_causal = (keys.first, keys.last) == (queries.first, queries.last)
            if keys.last < queries.first or is_causal:
                pairs.append(_Pair(queries.at, keys.at, is_causal))
            elif keys.first <= queries.last:
                raise ValueError(f"{queries} and {keys} overlap")
    return pairs


def _merge(mixed: Tensor, log_sums: Tensor, part: Tensor, part_log_sums: Tensor) -> None:
    """Add attention to further keys to `mixed`, in place; both are weighted by their sums."""
    total = torch.logaddexp(log_sums, part_log_sums)
    mixed.mul_((log_sums - total).exp().unsqueeze(-1))
    mixed.add_(part * (part_log_sums - total).exp().unsqueeze(-1))
    log_sums.copy_(total)


def _attend(query: Tensor, keys: Tensor, values: Tensor, pair: _Pair) -> tuple[Tensor, Tensor]:
    """The attention of a pair, and the log-sum-exps of its scores."""
    key, value = keys[:, :, pair.keys], values[:, :, pair.keys]
    if query.device.type == "cpu":
        output, log_sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, pair.is_causal
        )
        return output, log_sums
    scores = _scores(query, key, pair.is_causal)
    log_sums = scores.logsumexp(-1)
    return (scores - log_sums.unsqueeze(-1)).exp() @ value.float(), log_sums


def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The share of some keys in the gradients of queries, keys and values; `output` and `log_sums`
    are those of all keys."""
    if query.device.type == "cpu":
        parts: tuple[Tensor, Tensor, Tensor] = (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, query, key, value, output, log_sums, 0.0, is_causal
            )
        )
        return parts
    weights = (_scores(query, key, is_causal) - log_sums.unsqueeze(-1)).exp()
    gradient = gradient.float()
    of_weights = gradient @ value.float().transpose(-1, -2)
    shared = (gradient * output.float()).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - shared) * query.shape[-1] ** -0.5
    return (
        of_scores @ key.float(),
        of_scores.transpose(-1, -2) @ query.float(),
        weights.transpose(-1, -2) @ gradient,
    )


def _scores(query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    """Scaled products (batch, heads, queries, keys) in float32, without those of the future."""
    scores: Tensor = query.float() @ key.float().transpose(-1, -2) * query.shape[-1] ** -0.5
    if not is_causal:
        return scores
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~allowed, -torch.inf)
