"""FSDP2 over the data axes: how parameters are grouped for communication, and in which precision.

Over `dp_shard` parameters are cut, over `dp_replicate` they are whole in every replica.
Gradients are summed, not averaged, over both: the loss is divided by the number of
targets of the whole global batch, so a sum is the right gradient for any split of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from holdfast_workers.models.llama import Llama

SMALL_MODEL_BYTES = 64 << 20
"""Up to this size of the whole model, latency outweighs overlap and memory: one group for all."""


def apply_fully_shard(
    model: Llama, mesh: DeviceMesh, compute_dtype: torch.dtype, per_block: bool | None = None
) -> None:
    """Shard `model` over `mesh`, in place: shards, or replicas by shards.

    `per_block` makes each block a communication group of its own, which is unsharded only while
    it is needed; by default this depends on the model's size.
    """
    if per_block is None:
        per_block = whole_bytes(model) > SMALL_MODEL_BYTES
    # In float32 nothing is cast; a policy of None dtypes keeps FSDP from copying for it.
    low = compute_dtype is not torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype if low else None, reduce_dtype=torch.float32 if low else None
    )
    with _meshes_joined_once():
        if per_block:
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def whole_bytes(model: torch.nn.Module) -> int:
    """Size of all parameters, those on other ranks included."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


@contextmanager
def _meshes_joined_once() -> Iterator[None]:
    """Let FSDP make one mesh for all parameters that are cut over the same two. By itself it makes
    one for each (torch 2.13), which takes a quarter of the time that a small model's build does."""
    join = getattr(DeviceMesh, "_concatenate", None)
    if join is None:
        yield
        return
    joined: dict[tuple[int, ...], tuple[list[DeviceMesh], DeviceMesh]] = {}

    def join_once(meshes: list[DeviceMesh]) -> DeviceMesh:
        key = tuple(map(id, meshes))
        if key not in joined:
            joined[key] = (meshes, join(meshes))  # kept, so that no other takes their identities
        return joined[key][1]

    setattr(DeviceMesh, "_concatenate", staticmethod(join_once))  # noqa: B010 (mypy knows a method)
    try:
        yield
    finally:
        setattr(DeviceMesh, "_concatenate", staticmethod(join))  # noqa: B010


def sharded_modules(model: torch.nn.Module) -> list[FSDPModule]:
    """The modules of `model` that FSDP2 manages, outermost first; none if it was not applied."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_last_micro_batch(model: torch.nn.Module, last: bool) -> None:
    """Before each micro-batch: only the last of a step reduces gradients and reshards."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        model.set_is_last_backward(last)
