"""A small global state, with the layouts and payloads of a mesh's ranks."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from holdfast_workers.checkpoint.manifest import Manifest, checkpoint_folder
from holdfast_workers.checkpoint.publish import finalize
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.state.layout import (
    MODEL_PREFIX,
    SMALL_STATE,
    StateLayout,
    TensorEntry,
    aligned,
)

# name: (global shape, dimension that dp cuts, dimension that tp cuts)
STATE: dict[str, tuple[tuple[int, ...], int | None, int | None]] = {
    "model.embed": ((12, 8), 0, 1),
    "model.up": ((8, 12), 0, 0),
    "model.down": ((12, 10), 0, 1),
    "model.norm": ((5,), 0, None),
    "optim.step": ((), None, None),
}
SMALL_BYTES = 128


def global_state(seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        name: np.asarray(random.standard_normal(shape), dtype=np.float32)
        for name, (shape, _dp, _tp) in STATE.items()
    }


def _span(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of piece `index`, split like FSDP: rounded up, the last may be empty."""
    piece = math.ceil(length / parts)
    start = min(index * piece, length)
    return start, min(start + piece, length) - start


def _box(
    name: str, mesh: dict[str, int], dp: int, tp: int
) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    shape, dp_dim, tp_dim = STATE[name]
    offsets, lengths = [0] * len(shape), list(shape)
    for dim, parts, index in ((tp_dim, mesh["tp"], tp), (dp_dim, mesh["dp_shard"], dp)):
        if dim is not None:
            start, lengths[dim] = _span(lengths[dim], parts, index)
            offsets[dim] += start
    primary = (dp_dim is not None or dp == 0) and (tp_dim is not None or tp == 0)
    return tuple(offsets), tuple(lengths), primary


def layout_of(mesh: dict[str, int], rank: int) -> StateLayout:
    dp, tp = divmod(rank, mesh["tp"])
    entries, offset = [], 0
    for name, (shape, _dp, _tp) in STATE.items():
        offsets, lengths, primary = _box(name, mesh, dp, tp)
        nbytes = 4 * math.prod(lengths)
        weight = name.startswith(MODEL_PREFIX)
        place = (shape, offsets, lengths, offset, nbytes)
        entries.append(TensorEntry(name, "float32", *place, primary=primary, weight=weight))
        offset += aligned(nbytes)
    entries.append(
        TensorEntry(
            SMALL_STATE,
            "uint8",
            (SMALL_BYTES,),
            (0,),
            (SMALL_BYTES,),
            offset,
            SMALL_BYTES,
            per_rank=True,
        )
    )
    return StateLayout(tuple(entries), offset + aligned(SMALL_BYTES))


def small_state(rank: int) -> bytes:
    return json.dumps({"rank": rank}).encode().ljust(SMALL_BYTES, b"\0")


def payload_of(layout: StateLayout, state: dict[str, np.ndarray], rank: int) -> memoryview:
    payload = memoryview(bytearray(layout.payload_bytes))
    for entry in layout.tensors:
        if entry.name == SMALL_STATE:
            raw = small_state(rank)
        else:
            sides = zip(entry.offsets, entry.shape, strict=True)
            box = tuple(slice(start, start + length) for start, length in sides)
            raw = np.ascontiguousarray(state[entry.name][box]).tobytes()
        payload[entry.offset : entry.offset + entry.nbytes] = raw
    return payload


def save_shards(checkpoint: Storage, mesh: dict[str, int], seed: int = 1) -> list[dict[str, Any]]:
    name = checkpoint.uri.rpartition("/")[2]
    step, attempt = int(name[5:13]), int(name.rsplit("-", 1)[1])
    records = []
    for rank in range(math.prod(mesh.values())):
        layout = layout_of(mesh, rank)
        payload = payload_of(layout, global_state(seed), rank)
        record = save_shard(checkpoint, payload.toreadonly(), layout, rank, attempt, step)
        records.append(json.loads(json.dumps(record)))
    return records


def save_world(
    root: Storage,
    step: int,
    attempt: int,
    mesh: dict[str, int],
    seed: int = 1,
    metrics: dict[str, float] | None = None,
) -> Manifest:
    checkpoint = root.below(checkpoint_folder(step, attempt))
    records = save_shards(checkpoint, mesh, seed)
    return finalize(checkpoint, records, mesh, {"job": "test", "metrics": metrics or {}})
