"""Applies FSDP2 over the data axes: communication groups of parameters, and their precision.

Parameters are sharded over `dp_shard` and replicated over `dp_replicate`. Gradients are summed,
not averaged, over both: the loss is divided by the number of targets of the whole global batch, so
the sum is the right gradient for any split of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from holdfast_workers.models.transformer import Transformer
from holdfast_workers.spec import Zero

SMALL_MODEL_BYTES = 64 << 20
"""Up to this size of the whole model, one group for all parameters: latency outweighs overlap and
memory."""


def apply_fully_shard(
    model: Transformer, mesh: DeviceMesh, compute_dtype: torch.dtype, zero: Zero | None = None
) -> None:
    """Shard `model` in place over `mesh`, which is shards or replicas by shards.

    `zero`: as in the spec; :func:`set_last_micro_batch` needs the same. Each block of a large
    model, and any with `zero` 2 or 3, is a communication group of its own. A pipeline's stages are
    sharded each on its own, and stay whole between micro-batches.
    """
    stages = getattr(model, "stages", None)
    is_large = whole_bytes(model) > SMALL_MODEL_BYTES
    per_block = is_large or zero in (2, 3)
    reshard = zero in (3, None) and stages is None
    # In float32 nothing is cast; None dtypes keep FSDP from making copies.
    reduced = compute_dtype is not torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype if reduced else None,
        reduce_dtype=torch.float32 if reduced else None,
    )
    with _cached_mesh_concatenation():
        if per_block:
            for block in model.blocks.values():
                fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        for root in (model,) if stages is None else stages:
            fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def whole_bytes(model: torch.nn.Module) -> int:
    """Size of all parameters in bytes, including the parts on other ranks."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


@contextmanager
def _cached_mesh_concatenation() -> Iterator[None]:
    """Make FSDP create one mesh for all parameters that are sharded over the same two meshes.

    By default it creates a mesh per parameter (torch 2.13), which takes a quarter of the time that
    building a small model takes.
    """
    concatenate = getattr(DeviceMesh, "_concatenate", None)
    if concatenate is None:
        yield
        return
    cache: dict[tuple[int, ...], tuple[list[DeviceMesh], DeviceMesh]] = {}

    def concatenate_once(meshes: list[DeviceMesh]) -> DeviceMesh:
        key = tuple(map(id, meshes))
        if key not in cache:
            cache[key] = (meshes, concatenate(meshes))  # keeps `meshes`: their ids stay unique
        return cache[key][1]

    # setattr, because mypy knows a method of that name.
    setattr(DeviceMesh, "_concatenate", staticmethod(concatenate_once))  # noqa: B010
    try:
        yield
    finally:
        setattr(DeviceMesh, "_concatenate", staticmethod(concatenate))  # noqa: B010


def sharded_modules(model: torch.nn.Module) -> list[FSDPModule]:
    """The modules of `model` that FSDP2 manages, outermost first; empty if it was not applied."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def parameter_groups(model: torch.nn.Module) -> Iterator[Any]:
    """FSDP's communication groups of `model`, which torch does not make public."""
    for module in sharded_modules(model):
        yield from module._get_fsdp_state()._fsdp_param_groups


def has_unreduced_gradients(model: torch.nn.Module) -> bool:
    """Whether a backward pass has left gradients that no later one has reduced."""
    return any(
        parameter.unsharded_accumulated_grad is not None
        or (hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None)
        for group in parameter_groups(model)
        for parameter in group.fsdp_params
    )


def set_last_micro_batch(model: torch.nn.Module, last: bool, zero: Zero | None = None) -> None:
    """Call before each micro-batch. Only a step's last one reduces gradients and reshards; with
    `zero` 2 each divides its gradients among the shards, and with 3 it reshards parameters, too.
    Replicas add up their gradients in the last one."""
    if isinstance(model, FSDPModule):
        divides = last or zero in (2, 3)
        model.set_requires_gradient_sync(divides)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or zero == 3)
        model.set_is_last_backward(divides)
