"""The layout of a model's state on the ranks of any mesh, sharded as FSDP2 over tensor parallelism.

It needs neither a process group nor a model: PyTorch's own sharding arithmetic computes the box of
each rank. Used by benchmarks and tests that cover many meshes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from holdfast_workers.checkpoint.boxes import Box
from holdfast_workers.checkpoint.moves import box_of
from holdfast_workers.state.layout import SMALL_STATE, StateLayout, TensorEntry, aligned

AXES = ("dp_replicate", "dp_shard", "tp")
RANDOM = "random.cpu"
SMALL_BYTES = 128
RANDOM_BYTES = 48


@dataclass(frozen=True)
class Parameter:
    """A global tensor, and the dimension sharded by tensor parallelism (None: not sharded). If that
    is dimension 0, which FSDP2 shards again, the split must be even: PyTorch supports no other."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    dtype: str = "float32"


def meshes(most_ranks: int) -> Iterator[dict[str, int]]:
    """Every mesh of at most `most_ranks` ranks over `dp_replicate`, `dp_shard` and `tp`."""
    for sizes in itertools.product(range(1, most_ranks + 1), repeat=len(AXES)):
        if math.prod(sizes) <= most_ranks:
            yield dict(zip(AXES, sizes, strict=True))


def layout_of(parameters: tuple[Parameter, ...], mesh: Mapping[str, int], rank: int) -> StateLayout:
    """The payload of `rank`: its boxes, per-rank bytes (as of a generator), the small state."""
    entries, offset = [], 0
    for parameter in parameters:
        box = _box(parameter, mesh, rank)
        nbytes = box.volume * np.dtype(parameter.dtype).itemsize
        entries.append(
            TensorEntry(
                parameter.name,
                parameter.dtype,
                parameter.shape,
                box.offsets,
                box.shape,
                offset,
                nbytes,
            )
        )
        offset += aligned(nbytes)
    for name, nbytes in ((RANDOM, RANDOM_BYTES), (SMALL_STATE, SMALL_BYTES)):
        side = (nbytes,)
        entries.append(TensorEntry(name, "uint8", side, (0,), side, offset, nbytes, per_rank=True))
        offset += aligned(nbytes)
    return StateLayout(tuple(entries), offset)


def fill(payload: memoryview, layout: StateLayout, state: Mapping[str, np.ndarray]) -> None:
    """Write this rank's part of the global `state` into its payload, with zeros as padding."""
    payload[:] = bytes(len(payload))
    for entry in layout.tensors:
        if entry.name in state:
            whole = Box((0,) * len(entry.shape), entry.global_shape)
            part = state[entry.name][Box(entry.offsets, entry.shape).within(whole)]
            array = np.ndarray(entry.shape, entry.dtype, payload, entry.offset)
            array[...] = part


def placements_of(parameter: Parameter, mesh: Mapping[str, int]) -> list[Placement]:
    """Placements along `AXES`: replicas, then FSDP2 on dimension 0 of each tp shard."""
    placements: list[Placement] = [Replicate(), Replicate(), Replicate()]
    if parameter.tp_dim is not None:
        placements[2] = Shard(parameter.tp_dim)
    if parameter.shape:
        tp_on_dim_0 = parameter.tp_dim == 0 and mesh["tp"] > 1
        placements[1] = _StridedShard(0, split_factor=mesh["tp"]) if tp_on_dim_0 else Shard(0)
    return placements


def random_state(parameters: tuple[Parameter, ...], seed: int) -> dict[str, np.ndarray]:
    """Global tensors of random bytes, and a small state shared by all ranks."""
    random = np.random.default_rng(seed)
    shapes = [
        (parameter.name, parameter.shape, np.dtype(parameter.dtype)) for parameter in parameters
    ]
    shapes.append((SMALL_STATE, (SMALL_BYTES,), np.dtype(np.uint8)))
    return {
        name: np.frombuffer(random.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
        for name, shape, dtype in shapes
    }


def least_bytes(target: StateLayout, near: Iterable[StateLayout]) -> int:
    """Bytes of the target that no layout in `near` holds, counted element by element."""
    held = {(tensor.name, box_of(tensor)) for layout in near for tensor in layout.tensors}
    total = 0
    for entry in target.tensors:
        if entry.name == RANDOM or not entry.nbytes:
            continue
        whole = Box((0,) * len(entry.shape), entry.global_shape)
        marked = np.zeros(entry.global_shape, dtype=bool)
        for name, box in held:
            if name == entry.name:
                marked[box.within(whole)] = True
        wanted = marked[box_of(entry).within(whole)]
        total += int((~wanted).sum()) * (entry.nbytes // wanted.size)
    return total


def _box(parameter: Parameter, mesh: Mapping[str, int], rank: int) -> Box:
    sizes = [mesh[axis] for axis in AXES]
    coordinate = [int(index) for index in np.unravel_index(rank, sizes)]
    placements = placements_of(parameter, mesh)
    shape, offsets = _compute_local_shape_and_global_offset(
        parameter.shape, sizes, coordinate, placements
    )
    return Box(tuple(offsets), tuple(shape))
