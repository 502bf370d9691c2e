"""The device mesh of a world, and the process groups behind it.

Nobody but the mesh keeps a reference to a process group: who needs one asks for it at the moment
of use, so that new groups can be put under a living model by changing the mesh alone.
"""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast_workers.recipes.base import World

DATA_AXIS = "dp_shard"
TENSOR_AXIS = "tp"


def make_mesh(world: World) -> DeviceMesh:
    """The mesh of `world` over the default process group. Collective."""
    if not dist.is_initialized():
        _form_world_of_one(world)
    return init_device_mesh(
        world.device.partition(":")[0],
        tuple(world.mesh.values()),
        mesh_dim_names=tuple(world.mesh),
    )


def _form_world_of_one(world: World) -> None:
    """FSDP wants a group even for one rank, where the world itself has none."""
    if world.world_size != 1:
        raise RuntimeError(f"a world of {world.world_size} has no default process group yet")
    on_cuda = world.device.startswith("cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo", store=HashStore(), rank=0, world_size=1
    )
