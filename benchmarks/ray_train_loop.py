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
from ray import train as ray_train

from holdfast_workers.protocol.findings import TripReport
from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.recipes.lookup import resolve
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training.recipe import Recipe, World
from holdfast_workers.training.step_agreement import Agreed
from holdfast_workers.training.step_loop import DigestSource, Hooks, train


@dataclass(frozen=True)
class LoopConfig:
    """Arguments of the training function; plain JSON values."""

    spec: dict[str, Any]
    folder: str  # of the files with the applied steps
    cache_dir: str
    every_steps: int
    upload: bool
    """True: write to a temporary folder that Ray Train copies to its storage, as its guide shows.
    False: write to the final folder (`CheckpointUploadMode.NO_UPLOAD`)."""


def train_function(fields: dict[str, Any]) -> None:
    """Train one rank from the newest checkpoint or from the seed; Ray Train made the group."""
    config = LoopConfig(**fields)
    born = time.time()
    context = ray_train.get_context()
    spec = TrainingSpec.model_validate(config.spec)
    recipe = resolve(spec.recipe)(spec, Path(config.cache_dir))
    recipe.prepare()
    world = World(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        mesh=spec.parallel.mesh,
        attempt=0,
        device="cpu",
    )
    recipe.build(world)
    start = _restore(recipe, world.rank)
    path = Path(config.folder) / f"{world.rank}-{os.getpid()}.jsonl"
    with path.open("w") as out:
        header = {
            "process_started": psutil.Process().create_time(),
            "born": born,
            "built": time.time(),
            "rank": world.rank,
            "pid": os.getpid(),
            "restored": start,
        }
        _write(out, header)
        train(recipe, world, spec, _RayTrainHooks(config, world.rank, out), start)


def _restore(recipe: Recipe, rank: int) -> int:
    checkpoint = ray_train.get_checkpoint()
    if checkpoint is None:
        recipe.initialize()
        return 0
    with checkpoint.as_directory() as folder:
        payload = bytearray((Path(folder) / _file(rank)).read_bytes())
    return recipe.read_state(memoryview(payload))


class _RayTrainHooks(Hooks):
    """Hooks of the step loop that save through Ray Train."""

    def __init__(self, config: LoopConfig, rank: int, out: TextIO) -> None:
        self._config = config
        self._rank = rank
        self._out = out

    def phase(self, name: str, step: int, micro_batch: int = 0) -> None:
        pass

    def commit_gate(self, step: int) -> None:
        pass

    def tripped(self, report: TripReport) -> None:
        pass

    def digest(self, step: int, hex: str, of_ranks: tuple[str, ...]) -> None:
        pass

    def committed(self, row: StepRow) -> None:
        _write(self._out, {"step": row.step, "at": row.at})

    def checkpoint(
        self, step: int, recipe: Recipe, agreed: Agreed, last: bool
    ) -> DigestSource | None:
        if step % self._config.every_steps:
            return None
        payload = bytearray(recipe.layout().payload_bytes)
        recipe.write_state(memoryview(payload), step)
        if self._config.upload:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / _file(self._rank)).write_bytes(payload)
                kept = ray_train.Checkpoint.from_directory(folder)
                ray_train.report({"step": step}, checkpoint=kept)
        else:
            self._report_in_place(step, payload)
        return None

    def _report_in_place(self, step: int, payload: bytearray) -> None:
        storage = Path(ray_train.get_context().get_storage().experiment_fs_path)
        folder = storage / f"checkpoint-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f".{_file(self._rank)}"
        fresh.write_bytes(payload)
        fresh.replace(folder / _file(self._rank))
        ray_train.report(
            {"step": step},
            checkpoint=ray_train.Checkpoint.from_directory(str(folder)),
            checkpoint_dir_name=folder.name,
            checkpoint_upload_mode=ray_train.CheckpointUploadMode.NO_UPLOAD,
        )


def _file(rank: int) -> str:
    return f"rank-{rank}.bin"


def _write(out: TextIO, line: dict[str, Any]) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()
