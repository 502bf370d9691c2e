"""Checkpoints of the benchmarks' Ray Train: a file per rank, which ranks of any mesh can read.

A checkpoint holds for each rank its payload and the layout of that payload. A rank of another mesh
reads the boxes that it needs from all of them, as Holdfast's own ranks do. Nothing is verified.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast_workers.checkpoint.moves import MoveSource, box_of, plan_moves
from holdfast_workers.state.layout import StateLayout, TensorEntry
from holdfast_workers.training.recipe import Recipe


def write(folder: Path, rank: int, recipe: Recipe, step: int) -> None:
    """Write one rank's part; a file appears whole or not at all."""
    layout = recipe.layout()
    payload = bytearray(layout.payload_bytes)
    recipe.write_state(memoryview(payload), step)
    _replace(folder / f"rank-{rank}.json", layout.to_json())
    _replace(folder / f"rank-{rank}.bin", payload)


def read(folder: Path, rank: int, recipe: Recipe) -> int:
    """Load the state into a built recipe; returns its step."""
    layout = recipe.layout()
    own = folder / f"rank-{rank}.json"
    if own.exists() and own.read_bytes() == layout.to_json():  # the mesh is the same
        return recipe.read_state(memoryview(bytearray(own.with_suffix(".bin").read_bytes())))
    recipe.initialize()  # entries of a rank alone have no meaning on another mesh
    payload = bytearray(layout.payload_bytes)
    recipe.write_state(memoryview(payload), 0)
    ranks = sorted(int(path.stem.removeprefix("rank-")) for path in folder.glob("rank-*.json"))
    sources = [
        MoveSource(str(old), old, StateLayout.from_json((folder / f"rank-{old}.json").read_text()))
        for old in ranks
    ]
    plan = plan_moves(layout, sources, rank)
    for index, moves in plan.by_source().items():
        source = sources[index]
        stored = bytearray((folder / f"rank-{source.rank}.bin").read_bytes())
        for move in moves:
            old, new = source.layout.tensors[move.source_tensor], layout.tensors[move.tensor]
            target = _array(payload, new)
            target[move.box.within(box_of(new))] = _array(stored, old)[move.box.within(box_of(old))]
    return recipe.read_state(memoryview(payload))


def _array(payload: bytearray, entry: TensorEntry) -> NDArray[np.void]:
    """Return a view of the tensor in `payload`, with its elements as bytes."""
    count = max(1, int(np.prod(entry.shape)))
    kind = np.dtype(f"V{entry.nbytes // count}")
    return np.frombuffer(payload, kind, count, entry.offset).reshape(entry.shape)


def _replace(path: Path, content: bytes | bytearray) -> None:
    fresh = path.with_name(f".{path.name}")
    fresh.write_bytes(content)
    fresh.replace(path)
