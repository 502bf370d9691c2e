"""The device mesh of a world, and the process groups behind it.

Only the mesh keeps references to process groups; all other code gets a group from the mesh at the
moment of use. So changing the mesh suffices to give a model in memory new groups.
"""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast_workers.parallelize import process_groups
from holdfast_workers.state.replicas import REPLICATED_AXIS
from holdfast_workers.training.recipe import World

PIPELINE_AXIS = "pp"
SHARD_AXIS = "dp_shard"
TENSOR_AXIS = "tp"


def data_parallel(world: World) -> int:
    """Number of ranks that read different samples; tensor-parallel peers read the same ones."""
    return world.size(REPLICATED_AXIS) * world.size(SHARD_AXIS)


def data_index(world: World) -> int:
    """The index of this rank among the `data_parallel` ranks."""
    return world.coordinate(REPLICATED_AXIS) * world.size(SHARD_AXIS) + world.coordinate(SHARD_AXIS)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of `mesh` for data parallelism: replicas by shards, or only shards."""
    names = mesh.mesh_dim_names or ()
    return mesh[tuple(name for name in (REPLICATED_AXIS, SHARD_AXIS) if name in names)]


def make_mesh(world: World, collective_timeout_s: float) -> DeviceMesh:
    """The mesh of `world` over the default process group. Collective.

    The default group keeps its own time-out; the mesh's other groups get `collective_timeout_s`.
    """
    if not dist.is_initialized():
        _init_single_rank_group(world)
    mesh = init_device_mesh(
        world.device.partition(":")[0],
        tuple(world.mesh.values()),
        mesh_dim_names=tuple(world.mesh),
    )
    for group in mesh.get_all_groups():
        if group is not dist.group.WORLD:
            process_groups.set_timeout(collective_timeout_s, group)
    return mesh


def _init_single_rank_group(world: World) -> None:
    """Form a default group for one rank: FSDP needs a group even where the world has none."""
    if world.world_size != 1:
        raise RuntimeError(f"a world of {world.world_size} has no default process group yet")
    on_cuda = world.device.startswith("cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo", store=HashStore(), rank=0, world_size=1
    )
