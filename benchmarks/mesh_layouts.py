"""How a model's state lies on the ranks of any mesh, cut as FSDP2 over tensor parallelism cuts it.

No process group and no model: torch's own arithmetic of shards says which box a rank has. For
what is measured, and tested, over many meshes.
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
    """A global tensor, and the dimension that tensor parallelism cuts (None: whole). Where that is
    dimension 0, which FSDP2 cuts once more, it must do so evenly: torch knows no other boxes."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    dtype: str = "float32"


def meshes(most_ranks: int) -> Iterator[dict[str, int]]:
    """Every mesh of at most so many ranks over `dp_replicate`, `dp_shard` and `tp`."""
    for sizes in itertools.product(range(1, most_ranks + 1), repeat=len(AXES)):
        if math.prod(sizes) <= most_ranks:
            yield dict(zip(AXES, sizes, strict=True))


def layout_of(parameters: tuple[Parameter, ...], mesh: Mapping[str, int], rank: int) -> StateLayout:
    """The payload of `rank`: its boxes, bytes of its own (as of a generator), the small state."""
    entries, at = [], 0
    for parameter in parameters:
        box = _box(parameter, mesh, rank)
        nbytes = box.volume * np.dtype(parameter.dtype).itemsize
        entries.append(
            TensorEntry(
                parameter.name, parameter.dtype, parameter.shape, box.offsets, box.shape, at, nbytes
            )
        )
        at += aligned(nbytes)
    for name, nbytes in ((RANDOM, RANDOM_BYTES), (SMALL_STATE, SMALL_BYTES)):
        side = (nbytes,)
        entries.append(TensorEntry(name, "uint8", side, (0,), side, at, nbytes, per_rank=True))
        at += aligned(nbytes)
    return StateLayout(tuple(entries), at)


def fill(payload: memoryview, layout: StateLayout, state: Mapping[str, np.ndarray]) -> None:
    """Put this rank's part of the global `state` into its payload, zeros between."""
    payload[:] = bytes(len(payload))
    for entry in layout.tensors:
        if entry.name in state:
            whole = Box((0,) * len(entry.shape), entry.global_shape)
            part = state[entry.name][Box(entry.offsets, entry.shape).within(whole)]
            array = np.ndarray(entry.shape, entry.dtype, payload, entry.offset)
            array[...] = part


def placements_of(one: Parameter, mesh: Mapping[str, int]) -> list[Placement]:
    """Along the axes of `AXES`: replicas, then FSDP2 on dimension 0 of what is left by tp."""
    placements: list[Placement] = [Replicate(), Replicate(), Replicate()]
    if one.tp_dim is not None:
        placements[2] = Shard(one.tp_dim)
    if one.shape:
        cut_before = one.tp_dim == 0 and mesh["tp"] > 1
        placements[1] = _StridedShard(0, split_factor=mesh["tp"]) if cut_before else Shard(0)
    return placements


def random_state(parameters: tuple[Parameter, ...], seed: int) -> dict[str, np.ndarray]:
    """Global tensors of random bytes, and a small state that all ranks share."""
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
    """Bytes of the target that no layout of `near` holds, found by marking every element."""
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


def _box(one: Parameter, mesh: Mapping[str, int], rank: int) -> Box:
    sizes = [mesh[axis] for axis in AXES]
    here = [int(at) for at in np.unravel_index(rank, sizes)]
    placements = placements_of(one, mesh)
    shape, offsets = _compute_local_shape_and_global_offset(one.shape, sizes, here, placements)
    return Box(tuple(offsets), tuple(shape))
