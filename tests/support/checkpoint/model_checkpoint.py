"""Saves a checkpoint of a built-in model without a run: real names and shapes, and its export as a
folder."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.client import model_folder
from holdfast_service.job_model.model_memory import shapes_of
from holdfast_workers.checkpoint.export import ExportPlan, write_export
from holdfast_workers.checkpoint.manifest import Manifest, checkpoint_folder
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.publish import finalize
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.published.export_folder import SHARD_BYTES, plan_folder
from holdfast_workers.published.folder_parts import read_parts
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.layout import (
    AVERAGES_PREFIX,
    MODEL_PREFIX,
    StateLayout,
    TensorEntry,
    aligned,
)

ALONE = {"dp_shard": 1, "tp": 1}
_WITH_AVERAGES = [(MODEL_PREFIX, 1), (AVERAGES_PREFIX, 2)]


def save_model(
    root: Storage,
    step: int,
    training: TrainingSpec,
    attempt: int = 1,
    values: Mapping[str, NDArray[np.float32]] | None = None,
) -> Manifest:
    """Save the parameters, and with `train.ema` averages that are twice as large, as a world of one
    rank would. `values`: of the parameters by name; zeros without."""
    entries: list[TensorEntry] = []
    payload = bytearray()
    kinds = [(MODEL_PREFIX, 1)] if training.train.ema is None else _WITH_AVERAGES
    for (prefix, factor), (name, shape) in product(kinds, shapes_of(training).items()):
        content = factor * (np.zeros(shape, np.float32) if values is None else values[name])
        assert content.shape == shape
        zeros, nbytes, is_weight = (0,) * len(shape), content.nbytes, prefix == MODEL_PREFIX
        place = (zeros, shape, len(payload), nbytes)
        entries.append(TensorEntry(prefix + name, "float32", shape, *place, weight=is_weight))
        payload += content.tobytes().ljust(aligned(nbytes), b"\0")
    checkpoint = root.below(checkpoint_folder(step, attempt))
    layout = StateLayout(tuple(entries), len(payload))
    record = save_shard(checkpoint, memoryview(payload), layout, 0, attempt, step)
    return finalize(checkpoint, [record], ALONE, {"training": training.model_dump(mode="json")})


def export_folder(
    manifest: Manifest, tar: Path, shard_bytes: int = SHARD_BYTES
) -> tuple[Path, ExportPlan]:
    """The folder that the export of a checkpoint is, and the plan of `tar`."""
    plan = plan_folder(manifest, read_parts(manifest, open_storage), shard_bytes)
    with tar.open("w+b") as file:
        write_export(open_storage(manifest.uri), plan, file)
    assert tar.stat().st_size == plan.nbytes
    folder = tar.with_suffix("")
    model_folder.unpack(tar, folder)
    return folder, plan
