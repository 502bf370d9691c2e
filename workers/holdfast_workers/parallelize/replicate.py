"""Replicates a model over `dp_replicate` without sharding it (data parallelism, DDP).

Gradients are summed in buckets, each while the backward pass still computes those of earlier layers
(Li et al. 2020, arXiv:2006.15704, section 3.2.3). As in `shard.py`, they are sums and no averages.

torch's DistributedDataParallel orders its buckets anew after its first step. With three or more
ranks the bits of a sum depend on its place in the bucket, so the first step after a fault would
have other bits than the same step of an undisturbed run. Here the model alone determines the
buckets. No process group is kept: each all-reduce gets it from the mesh, so a rebind of the mesh
suffices.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from holdfast_workers.spec import ModelSpec
from holdfast_workers.state.replicas import REPLICATED_AXIS
from holdfast_workers.training.recipe import World

BUCKET_BYTES = 25 << 20
"""A bucket is complete once it has this size; as large as torch's."""


def is_replicated_only(world: World, spec: ModelSpec) -> bool:
    """Whether `dp_replicate` alone divides something, and nothing needs FSDP for its precision."""
    return world.world_size == world.size(REPLICATED_AXIS) > 1 and spec.dtype == "float32"


class GradientSums:
    """Sums the gradients of `model` over the one-dimensional mesh `axis`, in place. All parameters
    have the same dtype and device, and each one contributes to the loss."""

    def __init__(self, model: nn.Module, axis: DeviceMesh) -> None:
        self._axis = axis
        self._buckets = _buckets(list(model.parameters()))
        self._missing: list[int] = []
        """Number of gradients that each bucket waits for."""
        self._is_last = False
        self._pending: list[tuple[Tensor, dist.Work | None]] = []
        """Sums under way, of the first buckets."""
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket:
                report = partial(_report, weakref.ref(self), index)
                parameter.register_post_accumulate_grad_hook(report)  # type: ignore[no-untyped-call]
        self.discard()

    def set_last_micro_batch(self, last: bool) -> None:
        """Call before each micro-batch: only the gradients of a step's last one are complete."""
        self.discard()
        self._is_last = last

    def finish(self) -> None:
        """Wait for all sums; call after the backward pass of the last micro-batch."""
        if len(self._pending) < len(self._buckets):
            raise RuntimeError("a parameter has no gradient: it does not contribute to the loss")
        for _, work in self._pending:
            if work is not None:
                work.wait()
        self.discard()

    def discard(self) -> None:
        """Forget a step that was interrupted anywhere, without waiting for its sums."""
        self._is_last = False
        self._missing = [len(bucket) for bucket in self._buckets]
        self._pending = []

    def arrived(self, index: int) -> None:
        """A gradient of bucket `index` is complete for this micro-batch."""
        if not self._is_last:
            return
        self._missing[index] -= 1
        # In the order of the buckets, so that all ranks start them in the same order.
        while (next_one := len(self._pending)) < len(self._buckets) and not self._missing[next_one]:
            self._start(self._buckets[next_one])

    def _start(self, bucket: Sequence[nn.Parameter]) -> None:
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        pieces = torch.split(flat, [parameter.numel() for parameter in bucket])
        for parameter, piece in zip(bucket, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        work = dist.all_reduce(flat, group=self._axis.get_group(), async_op=True)
        self._pending.append((flat, work))


def _report(sums: weakref.ref[GradientSums], index: int, _: Tensor) -> None:
    # A weak reference: parameters would be garbage in a cycle, and an accelerator has no room.
    if (living := sums()) is not None:
        living.arrived(index)


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The buckets in the reverse order of `parameters`, about that in which a backward pass
    computes gradients."""
    buckets: list[list[nn.Parameter]] = []
    size = BUCKET_BYTES
    for parameter in reversed(parameters):
        if size >= BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets
