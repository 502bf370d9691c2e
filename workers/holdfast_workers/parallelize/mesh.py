"""The device mesh of a world, and the process groups behind it.

Nobody but the mesh keeps a reference to a process group: who needs one asks for it at the moment
of use, so that new groups can be put under a living model by changing the mesh alone.
"""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast_workers.parallelize import process_groups
from holdfast_workers.state.replicas import REPLICATED_AXIS
from holdfast_workers.training.recipe import World

SHARD_AXIS = "dp_shard"
TENSOR_AXIS = "tp"


def data_parallel(world: World) -> int:
    """How many ranks read different samples; tensor-parallel peers read the same."""
    return world.size(REPLICATED_AXIS) * world.size(SHARD_AXIS)


def data_index(world: World) -> int:
    """Which of them this rank is."""
    return world.coordinate(REPLICATED_AXIS) * world.size(SHARD_AXIS) + world.coordinate(SHARD_AXIS)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of `mesh` that data parallelism runs over: replicas by shards, or shards alone."""
    names = mesh.mesh_dim_names or ()
    return mesh[tuple(name for name in (REPLICATED_AXIS, SHARD_AXIS) if name in names)]


def make_mesh(world: World, collective_timeout_s: float) -> DeviceMesh:
    """The mesh of `world` over the default process group, which keeps its own limit; those that it
    is given besides get `collective_timeout_s`. Collective."""
    if not dist.is_initialized():
        _form_world_of_one(world)
    mesh = init_device_mesh(
        world.device.partition(":")[0],
        tuple(world.mesh.values()),
        mesh_dim_names=tuple(world.mesh),
    )
    for group in mesh.get_all_groups():
        if group is not dist.group.WORLD:
            process_groups.limit(collective_timeout_s, group)
    return mesh


def _form_world_of_one(world: World) -> None:
    """FSDP wants a group even for one rank, where the world itself has none."""
    if world.world_size != 1:
        raise RuntimeError(f"a world of {world.world_size} has no default process group yet")
    on_cuda = world.device.startswith("cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo", store=HashStore(), rank=0, world_size=1
    )
