"""Saves a checkpoint of a built-in model without a run: real names and shapes, zero values."""

from __future__ import annotations

import math

from holdfast_service.job_model.model_memory import shapes_of
from holdfast_workers.checkpoint.manifest import Manifest, checkpoint_folder
from holdfast_workers.checkpoint.publish import finalize
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.layout import MODEL_PREFIX, StateLayout, TensorEntry, aligned

ALONE = {"dp_shard": 1, "tp": 1}


def save_model(root: Storage, step: int, training: TrainingSpec, attempt: int = 1) -> Manifest:
    """Save the parameters only, as a world of one rank would."""
    entries, end = [], 0
    for name, shape in shapes_of(training).items():
        nbytes = 4 * math.prod(shape)
        zeros = (0,) * len(shape)
        named = MODEL_PREFIX + name
        entries.append(TensorEntry(named, "float32", shape, zeros, shape, end, nbytes, weight=True))
        end += aligned(nbytes)
    checkpoint = root.below(checkpoint_folder(step, attempt))
    record = save_shard(
        checkpoint, memoryview(bytes(end)), StateLayout(tuple(entries), end), 0, attempt, step
    )
    return finalize(checkpoint, [record], ALONE, {"training": training.model_dump(mode="json")})
