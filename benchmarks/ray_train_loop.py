"""The training function for Ray Train: Holdfast's model and step loop on Ray Train's ranks.

Model, data, sharding, optimizer and loop are the same as in the job under Holdfast, so that only
failure detection, restart and restore differ. Each rank writes every applied step with its time to
its own file, and passes the state of every step to Ray Train by `report`.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil
import ray
import torch
from ray import train as ray_train
from tests.support.ranks.rank_worlds import RecordingHooks

from benchmarks.resizes import rank_files
from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.recipes.lookup import resolve
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training.recipe import Recipe, World
from holdfast_workers.training.step_agreement import Agreed
from holdfast_workers.training.step_loop import DigestSource, train


@dataclass(frozen=True)
class LoopConfig:
    """Arguments of the training function; plain JSON values."""

    spec: dict[str, Any]
    folder: str  # of the files with the applied steps
    cache_dir: str
    in_memory: bool
    """Write to the final folder (`CheckpointUploadMode.NO_UPLOAD`), not to a temporary one that Ray
    Train copies to its storage."""
    elastic: bool
    """The size of the group is the size of `dp_shard`; checkpoints of any size are read."""


def train_function(fields: dict[str, Any]) -> None:
    """Train one rank from the newest checkpoint or from the seed; Ray Train made the group."""
    config = LoopConfig(**fields)
    born = time.time()
    context = ray_train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    parallel = {"dp_shard": size} if config.elastic else config.spec["parallel"]
    spec = TrainingSpec.model_validate({**config.spec, "parallel": parallel})
    recipe = resolve(spec.recipe)(spec, Path(config.cache_dir))
    recipe.prepare()
    world = World(
        rank=rank,
        world_size=size,
        mesh=spec.parallel.mesh,
        attempt=0,
        device="cpu",
    )
    recipe.build(world)
    start = _restore(recipe, rank)
    path = Path(config.folder) / f"{rank}-{os.getpid()}.jsonl"
    with path.open("w") as out:
        header = {
            "process_started": psutil.Process().create_time(),
            "born": born,
            "built": time.time(),
            "rank": rank,
            "pid": os.getpid(),
            "world": _world_id(born),
            "world_size": size,
            "node_id": ray.get_runtime_context().get_node_id(),
        }
        _write(out, header)
        train(recipe, world, spec, _RayTrainHooks(config, world, out), start)


def _restore(recipe: Recipe, rank: int) -> int:
    checkpoint = ray_train.get_checkpoint()
    if checkpoint is None:
        recipe.initialize()
        return 0
    with checkpoint.as_directory() as folder:
        return rank_files.read(Path(folder), rank, recipe)


def _world_id(born: float) -> float:
    """Return an id that all ranks of the group share, and that grows with every later group."""
    agreed = [born]
    torch.distributed.broadcast_object_list(agreed)
    return agreed[0]


class _RayTrainHooks(RecordingHooks):
    """Hooks of the step loop that save through Ray Train."""

    def __init__(self, config: LoopConfig, world: World, out: TextIO) -> None:
        super().__init__()
        self._config = config
        self._world = world
        self._out = out

    def committed(self, row: StepRow) -> None:
        _write(self._out, {"step": row.step, "at": row.at})

    def checkpoint(
        self, step: int, recipe: Recipe, agreed: Agreed, last: bool
    ) -> DigestSource | None:
        if not self._config.in_memory:
            with tempfile.TemporaryDirectory() as folder:
                rank_files.write(Path(folder), self._world.rank, recipe, step)
                kept = ray_train.Checkpoint.from_directory(folder)
                ray_train.report({"step": step}, checkpoint=kept)
        else:
            self._report_in_place(step, recipe)
        return None

    def _report_in_place(self, step: int, recipe: Recipe) -> None:
        storage = Path(ray_train.get_context().get_storage().experiment_fs_path)
        # Files of a larger world that computed the same step must not be mixed with these.
        folder = storage / f"checkpoint-{step:06d}-of-{self._world.world_size}"
        folder.mkdir(parents=True, exist_ok=True)
        rank_files.write(folder, self._world.rank, recipe, step)
        ray_train.report(
            {"step": step},
            checkpoint=ray_train.Checkpoint.from_directory(str(folder)),
            checkpoint_dir_name=folder.name,
            checkpoint_upload_mode=ray_train.CheckpointUploadMode.NO_UPLOAD,
        )


def _write(out: TextIO, line: dict[str, Any]) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()
