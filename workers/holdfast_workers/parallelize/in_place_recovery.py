"""Keeps a sharded model in memory through a fault: discards a broken step, replaces groups.

Both operations use private parts of torch's FSDP2 and DeviceMesh (torch 2.11 to 2.13 have been read
and tested). A missing part raises `CannotRebind`, and the caller rebuilds the model, which is
always correct but slower.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from holdfast_workers.parallelize.shard import parameter_groups, sharded_modules


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
