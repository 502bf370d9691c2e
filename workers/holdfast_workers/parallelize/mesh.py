"""The device mesh of a world, and the process groups behind it.

Only the mesh keeps references to process groups; all other code gets a group from the mesh at the
moment of use. So changing the mesh suffices to give a model in memory new groups.

Ranks along `cp` have the same parameters for other positions, so they share the pieces of the state
like those along `dp_shard`: FSDP runs over both axes, joined to one dimension.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend)
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast_workers.parallelize import process_groups
from holdfast_workers.state.joined_axes import joined
from holdfast_workers.state.replicas import REPLICATED_AXIS
from holdfast_workers.training.recipe import World

PIPELINE_AXIS = "pp"
SHARD_AXIS = "dp_shard"
CONTEXT_AXIS = "cp"
TENSOR_AXIS = "tp"


def data_parallel(world: World) -> int:
    """Number of ranks that read different samples; tensor-parallel peers read the same ones."""
    return world.size(REPLICATED_AXIS) * world.size(SHARD_AXIS)


def data_index(world: World) -> int:
    """The index of this rank among the `data_parallel` ranks."""
    return world.coordinate(REPLICATED_AXIS) * world.size(SHARD_AXIS) + world.coordinate(SHARD_AXIS)


def state_shards(world: World) -> int:
    """Number of ranks that hold a parameter in pieces, without those that split layers."""
    return world.size(SHARD_AXIS) * world.size(CONTEXT_AXIS)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of `mesh` for FSDP: replicas by shards, or only shards. With a context axis, the
    shards are the ranks of `dp_shard` and `cp` together."""
    names = mesh.mesh_dim_names or ()
    shards = _joined(mesh) if CONTEXT_AXIS in names else mesh[SHARD_AXIS]
    if REPLICATED_AXIS not in names:
        return shards
    with warnings.catch_warnings():
        # torch announces the end of slices with a joined dimension, and has no other public way.
        warnings.filterwarnings("ignore", "Slicing a flattened dim")
        return mesh[(REPLICATED_AXIS, *(shards.mesh_dim_names or ()))]


def make_mesh(world: World, collective_timeout_s: float) -> DeviceMesh:
    """The mesh of `world` over the default process group. Collective.

    The default group keeps its own time-out; the mesh's other groups get `collective_timeout_s`.
    Raises ForeignPeer.
    """
    if not dist.is_initialized():
        _init_single_rank_group(world)
    with process_groups.own_peers_only(collective_timeout_s):
        mesh = init_device_mesh(
            world.device.partition(":")[0],
            tuple(world.mesh.values()),
            mesh_dim_names=tuple(world.mesh),
        )
        groups = mesh.get_all_groups()
        if world.size(CONTEXT_AXIS) > 1:
            groups += _joined(mesh).get_all_groups()
    for group in groups:
        if group is not dist.group.WORLD:
            process_groups.set_timeout(collective_timeout_s, group)
            process_groups.check_places(group)
    return mesh


def _joined(mesh: DeviceMesh) -> DeviceMesh:
    """`dp_shard` and `cp` as one dimension; collective at the first call for a mesh."""
    return mesh[SHARD_AXIS, CONTEXT_AXIS]._flatten(joined(SHARD_AXIS, CONTEXT_AXIS))


def _init_single_rank_group(world: World) -> None:
    """Form a default group for one rank: FSDP needs a group even where the world has none."""
    if world.world_size != 1:
        raise RuntimeError(f"a world of {world.world_size} has no default process group yet")
    on_cuda = world.device.startswith("cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo", store=HashStore(), rank=0, world_size=1
    )


@contextmanager
def fake_process_group(world: World) -> Iterator[None]:
    """Provide a default group without peers, for building a sharded model before they exist.

    torch's fake process group copies its own data and sends nothing: meanwhile collectives compute
    nothing. Afterwards the model is like that of a survivor whose peers have died: real groups
    replace the fake ones in the same way. torch caches a process's coordinates on the mesh, so a
    process that has built for one rank cannot serve as another rank.
    """
    dist.init_process_group(
        dist.Backend.FAKE, store=HashStore(), rank=world.rank, world_size=world.world_size
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fake group has no time-out to set
            yield
    finally:
        dist.destroy_process_group()
