"""Resharding from memory against a save and a load of PyTorch DCP on a local disk.

The pairs are a sample of all pairs of meshes with at most eight ranks over `dp_replicate`,
`dp_shard` and `tp`, with two ranks per node. Under Holdfast a process per node has a node agent's
data server; every rank of the first mesh has its state in its node's memory and a replica on the
next node. The timed interval starts when the ranks of the second mesh have allocated their tensors
and an empty segment; it ends when every rank has its part verified in its own segment and copied to
its tensors. `torch.distributed.checkpoint` saves the same state from DTensors on the first mesh and
loads it into those on the second, in a process per rank. Both sides verify the result.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.memory.mesh_layouts import (
    AXES,
    RANDOM,
    RANDOM_BYTES,
    Parameter,
    fill,
    layout_of,
    meshes,
    placements_of,
    random_state,
)
from tests.support.memory.shm import SECRET
from tests.support.programs.tier_worlds import TierWorlds
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.checkpoint_parts.floor import timed
from benchmarks.conditions import describe_mesh, report
from holdfast_workers.checkpoint.boxes import Box
from holdfast_workers.checkpoint.moves import box_of
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.reshard import Reshard
from holdfast_workers.memory.segment_store import SegmentStore, mesh_tag
from holdfast_workers.protocol.messages import Origin, Place, Restore, Tier
from holdfast_workers.state.digest import payload_digest

RANKS_PER_NODE = 2
SEED = 5
LAYER_MB = 8
STEP, ATTEMPT = 5, 1
TIMEOUT_S = 60.0

Mesh = dict[str, int]
Parameters = tuple[Parameter, ...]


@dataclass(frozen=True)
class ReshardPair:
    """One pair of meshes, from `old` to `new`."""

    old: str
    new: str
    holdfast_s: float
    dcp_save_s: float
    dcp_load_s: float

    @property
    def ratio(self) -> float:
        return self.holdfast_s / (self.dcp_save_s + self.dcp_load_s)


@dataclass(frozen=True)
class ReshardFigures:
    """`ratio` is the median over the pairs of Holdfast's time to save plus load; `worst_ratio` the
    greatest."""

    ratio: float
    worst_ratio: float
    pairs: list[ReshardPair]


def measure(state_mb: int, count: int, most_ranks: int, memory: Path, disk: Path) -> ReshardFigures:
    """Measure `count` pairs of different meshes with more than one rank, the same in every run."""
    every = [mesh for mesh in meshes(most_ranks) if math.prod(mesh.values()) > 1]
    pairs = random.Random(SEED).sample(list(permutations(every, 2)), count)
    parameters = _model(state_mb)
    found = []
    for number, (old, new) in enumerate(pairs):
        folder, ranks = memory / str(number), max(math.prod(mesh.values()) for mesh in (old, new))
        arguments = (parameters, old, new)
        nodes = -(-ranks // RANKS_PER_NODE)
        ours = TierWorlds(folder).run(_from_memory, nodes, *arguments, folder)
        theirs = TierWorlds(folder).run(_from_disk, ranks, *arguments, disk, attempt=2)
        shutil.rmtree(folder)
        took = (round(max(seconds), 4) for seconds in (ours, *zip(*theirs, strict=True)))
        found.append(ReshardPair(describe_mesh(old), describe_mesh(new), *took))
        report(f"{found[-1]}: {found[-1].ratio:.3f}")
    return summary(found)


def summary(pairs: Sequence[ReshardPair]) -> ReshardFigures:
    ratios = [pair.ratio for pair in pairs]
    return ReshardFigures(round(median(ratios), 4), round(max(ratios), 4), [*pairs])


def _model(state_mb: int) -> Parameters:
    """Layers of two matrices, one sharded by columns and one by rows, and a norm. Not every mesh
    divides the sizes of the matrices."""
    found: list[Parameter] = []
    for layer in range(-(-state_mb // LAYER_MB)):
        found += [
            Parameter(f"{layer}.up", (1020, 1028), tp_dim=0),
            Parameter(f"{layer}.down", (1024, 1025), tp_dim=1),
            Parameter(f"{layer}.norm", (1024,)),
        ]
    return tuple(found)


class _ReshardingNode:
    """A node with the memory that an attempt on `old` leaves there: the state of its ranks, and
    replicas of the previous node's."""

    def __init__(self, name: str, root: Path, parameters: Parameters, old: Mesh) -> None:
        self._name = name
        self._parameters = parameters
        self._old = old
        self._state = random_state(parameters, SEED)
        self._store = SegmentStore(root / name, mesh_tag(old))
        self._server = DataServer(self._store, SECRET, "127.0.0.1")

    def hold(self, rank: int, place: Place) -> Origin:
        layout = layout_of(self._parameters, self._old, rank)
        segment = self._store.ensure(rank, place, layout)
        slot = segment.begin(STEP)
        fill(slot, layout, self._state)
        digest = payload_digest(slot)
        segment.commit(attempt=ATTEMPT, step=STEP, digest=digest)
        return Origin(rank, self._name, place, "127.0.0.1", self._server.port, digest)

    def restore(self, source: Restore, new: Mesh, ranks: Sequence[int]) -> float:
        """Seconds until all `ranks` of the new mesh have their tensors. Raises RuntimeError if the
        state of one is wrong."""
        layouts = {rank: layout_of(self._parameters, new, rank) for rank in ranks}
        tensors = {rank: np.ones(each.payload_bytes, np.uint8) for rank, each in layouts.items()}
        store = self._store.for_mesh(mesh_tag(new))
        for rank, layout in layouts.items():
            store.ensure(rank, Place.OWN, layout)

        def restore_rank(rank: int) -> None:
            """The steps that a worker and its agent perform together."""
            own = {RANDOM: bytes(RANDOM_BYTES)}
            Reshard(SECRET, self._name, source, rank, store).run(own, TIMEOUT_S)
            segment = store.find(rank, Place.OWN)
            commit = segment.find(ATTEMPT, STEP) if segment else None
            assert segment is not None and commit is not None and segment.verify(commit)
            tensors[rank][:] = np.frombuffer(segment.payload(commit), np.uint8)

        with ThreadPoolExecutor(max(1, len(ranks))) as pool:
            took = timed(lambda: [*pool.map(restore_rank, ranks)])
        for rank, layout in layouts.items():
            expected = np.empty(layout.payload_bytes, np.uint8)
            fill(expected.data, layout, self._state)
            if payload_digest(expected.data) != payload_digest(tensors[rank].data):
                raise RuntimeError(f"rank {rank} of {new} has not the state of {self._old}")
        return took


def _from_memory(number: int, parameters: Parameters, old: Mesh, new: Mesh, root: Path) -> float:
    """Runs in a process for each node."""
    node = _ReshardingNode(f"n{number}", root, parameters, old)
    count = -(-math.prod(old.values()) // RANKS_PER_NODE)
    held = [node.hold(rank, Place.OWN) for rank in _ranks_on(number, old)]
    if count > 1 and number < count:
        held += [node.hold(rank, Place.REPLICA) for rank in _ranks_on((number - 1) % count, old)]
    origins: list[list[Origin]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(origins, held)
    source = Restore(
        Tier.RESHARD,
        STEP,
        attempt=ATTEMPT,
        mesh=mesh_tag(old),
        origins=tuple(origin for each in origins for origin in each),
    )
    return node.restore(source, new, _ranks_on(number, new))


def _ranks_on(node: int, mesh: Mesh) -> list[int]:
    return [rank for rank in range(math.prod(mesh.values())) if rank // RANKS_PER_NODE == node]


def _from_disk(
    rank: int, parameters: Parameters, old: Mesh, new: Mesh, folder: Path
) -> tuple[float, float]:
    """Runs in a process for each rank; seconds of save and of load. Raises RuntimeError if the
    loaded state is wrong."""
    saved, loaded = _DiskMesh(parameters, old), _DiskMesh(parameters, new)
    state, path = random_state(parameters, SEED), folder / "checkpoint"
    source, target = saved.tensors(state), loaded.tensors({})
    save_s = timed(lambda: saved.run(partial(dcp.save, source, checkpoint_id=path)))
    load_s = timed(lambda: loaded.run(partial(dcp.load, target, checkpoint_id=path)))
    for name, expected in loaded.tensors(state).items():
        # Compared as integers: random bytes may be NaN, which equals nothing.
        bits = (tensor.to_local().view(torch.int32) for tensor in (target[name], expected))
        if not torch.equal(*bits):
            raise RuntimeError(f"{name} differs from the saved state: {old} to {new}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path)
    return save_s, load_s


class _DiskMesh:
    """The first ranks of the world as a mesh. Creating it is collective over all ranks."""

    def __init__(self, parameters: Parameters, mesh: Mesh) -> None:
        sizes = [mesh[axis] for axis in AXES]
        ranks = math.prod(sizes)
        self._parameters = parameters
        self._sizes = mesh
        self._mesh = DeviceMesh("cpu", torch.arange(ranks).reshape(sizes), mesh_dim_names=AXES)
        self._group = dist.new_group(list(range(ranks)))
        self._inside = dist.get_rank() < ranks

    def tensors(self, state: Mapping[str, np.ndarray]) -> dict[str, DTensor]:
        """This rank's shard of `state`, or zeros of the same shape."""
        if not self._inside:
            return {}
        layout = layout_of(self._parameters, self._sizes, dist.get_rank())
        found = {}
        for parameter, entry in zip(self._parameters, layout.tensors, strict=False):
            local = np.zeros(entry.shape, parameter.dtype)
            if state:
                whole = Box((0,) * len(entry.shape), entry.global_shape)
                local[...] = state[parameter.name][box_of(entry).within(whole)]
            size = torch.Size(parameter.shape)
            found[parameter.name] = DTensor.from_local(
                torch.from_numpy(local),
                self._mesh,
                placements_of(parameter, self._sizes),
                run_check=False,
                shape=size,
                stride=torch.empty(size, device="meta").stride(),
            )
        return found

    def run(self, work: Callable[..., object]) -> None:
        if self._inside:
            work(process_group=self._group)
