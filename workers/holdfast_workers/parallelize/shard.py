"""Applies FSDP2 over the data axes: communication groups of parameters, and their precision.

Parameters are sharded over `dp_shard` and replicated over `dp_replicate`. Gradients are summed,
not averaged, over both: the loss is divided by the number of targets of the whole global batch, so
the sum is the right gradient for any split of the batch.

A sharded model stays in memory through a fault: a broken step is discarded, and groups are
replaced. Both use private parts of torch's FSDP2 and DeviceMesh (torch 2.11 to 2.13 have been read
and tested). A missing part raises `CannotRebind`, and the caller rebuilds the model, which is
always correct but slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from holdfast_workers.models.transformer import BlockModel
from holdfast_workers.spec import Zero

SMALL_MODEL_BYTES = 64 << 20
"""Up to this size of the whole model, one group for all parameters: latency outweighs overlap and
memory."""


def apply_fully_shard(
    model: BlockModel, mesh: DeviceMesh, compute_dtype: torch.dtype, zero: Zero | None = None
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


class CannotRebind(Exception):
    """This torch lacks the private parts that a rebind in place needs."""


def discard_step(model: nn.Module) -> None:
    """Remove everything that a forward or backward pass, interrupted anywhere, left in `model`.

    FSDP2's own reset leaves the unsharded gradients of an interrupted backward pass behind; the
    next pass would add to them and silently corrupt training. This function clears them together
    with the sharded gradients.
    """
    for group in parameter_groups(model):
        # Never wait for an operation that is pending in a dead group.
        group._all_gather_result = None
        group._all_reduce_state = None
        group._post_reduce_event = None
        group._partial_reduce_output = None  # between replicas: the next reduction would add it
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None
            parameter.sharded_param.grad = None
    for module in sharded_modules(model):  # a pipeline's stages are a root each
        state = module._get_fsdp_state()
        if state._is_root:  # None before the first forward: nothing to reset
            state._reset_iter_state()
    for parameter in model.parameters():
        parameter.grad = None


def rebind_groups(model: nn.Module, current: DeviceMesh, fresh: DeviceMesh) -> None:
    """Give `model`, which was built on `current`, the process groups of `fresh`.

    Both meshes have the same shape and names, and this rank the same coordinates. `current` remains
    the model's mesh. Raises CannotRebind, with the model unchanged, if torch's private parts are
    not as expected.
    """
    try:
        old, new = current._get_root_mesh(), fresh._get_root_mesh()
        old_groups, new_groups = old._pg_registry, new._pg_registry
        infos = _mesh_infos(model)
    except AttributeError as error:
        raise CannotRebind(str(error)) from error
    if sorted(old_groups) != sorted(new_groups):
        raise CannotRebind(f"groups {sorted(old_groups)} became {sorted(new_groups)}")
    old_groups.clear()
    old_groups.update(new_groups)
    for info in infos:
        # Looks up its process groups in the mesh again.
        info.__post_init__()


def _mesh_infos(model: nn.Module) -> list[Any]:
    infos: dict[int, Any] = {}
    for group in parameter_groups(model):
        for holder in (group, *group.fsdp_params):
            for info in (holder.mesh_info, holder.post_forward_mesh_info):
                if info is not None:
                    infos[id(info)] = info
    return list(infos.values())
