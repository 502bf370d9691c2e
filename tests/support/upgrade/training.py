"""A checkpoint of the real training core, the steps that followed it, and a memory segment."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.checkpoint.saved_worlds import global_state, layout_of, payload_of
from tests.support.ranks.rank_programs import join, make
from tests.support.ranks.rank_worlds import ALONE, RecordingHooks, Worlds

from holdfast_workers.checkpoint.load import load_whole_state
from holdfast_workers.checkpoint.manifest import Manifest, checkpoint_folder
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.publish import finalize
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.memory.segment import Segment
from holdfast_workers.parallelize import process_groups
from holdfast_workers.spec import ParallelSpec, TrainingSpec
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.training.recipe import Recipe, World
from holdfast_workers.training.step_loop import train

FOLLOWING_STEPS = 4
SEGMENT_MESH = {"dp_shard": 2, "tp": 2}
SEGMENT = "own-1.seg"
CORPUS = "".join(f"line {number * number % 97}\n" for number in range(400))


@dataclass(frozen=True)
class TrainedStep:
    step: int
    samples: str
    """Digest of the sample ids."""
    loss: float


def save(
    spec: TrainingSpec, corpus: Path, root: Path, step: int, attempt: int, cache: Path
) -> list[TrainedStep]:
    """Train on two ranks, save a checkpoint after `step`, and return the steps that follow.
    `corpus` holds the data of the spec."""
    results = Worlds(cache).run(_rank, _longer(spec, corpus, step), str(root), step, attempt)
    checkpoint = open_storage(str(root)).below(checkpoint_folder(step, attempt))
    training = spec.model_dump(mode="json")
    extra = {"job": root.parent.name, "training": training, "metrics": {"loss": 1.5}}
    finalize(checkpoint, [record for record, _ in results], spec.parallel.mesh, extra)
    following: list[TrainedStep] = results[0][1]
    return following


def resume(corpus: Path, root: Path, manifest: Manifest, cache: Path) -> list[TrainedStep]:
    """Continue from the checkpoint, in this process alone: another mesh than the saved one."""
    spec = TrainingSpec.model_validate(manifest.extra["training"])
    longer = _longer(spec, corpus, manifest.step).model_copy(update={"parallel": ParallelSpec()})
    recipe = make(cache, longer)
    recipe.build(ALONE)
    recipe.initialize()
    payload = memoryview(bytearray(recipe.layout().payload_bytes))
    recipe.write_state(payload, manifest.step)
    checkpoint = open_storage(str(root)).below(manifest.folder)
    load_whole_state(checkpoint, recipe.layout(), payload, mesh=ALONE.mesh, rank=0)
    start = recipe.read_state(payload)
    assert start == manifest.step
    hooks = RecordingHooks()
    train(recipe, ALONE, longer, hooks, start)
    return _steps(hooks, start)


def write_segment(folder: Path) -> None:
    """The memory checkpoint of rank 1: steps 6 and 7 of attempt 2."""
    folder.mkdir(parents=True)
    layout = layout_of(SEGMENT_MESH, 1)
    with Segment.create(folder / SEGMENT, layout) as segment:
        for step in (6, 7):
            payload = bytes(segment_payload(step))
            with segment.begin(step) as slot:
                slot[:] = payload
            segment.commit(attempt=2, step=step, digest=payload_digest(payload))


def segment_payload(step: int) -> memoryview:
    return payload_of(layout_of(SEGMENT_MESH, 1), global_state(step), 1)


def _longer(spec: TrainingSpec, corpus: Path, step: int) -> TrainingSpec:
    changed = {
        "train": spec.train.model_copy(update={"steps": step + FOLLOWING_STEPS}),
        "data": spec.data.model_copy(update={"source": str(corpus)}),
    }
    return spec.model_copy(update=changed)


def _rank(
    port: int, cache: Path, world: World, spec: TrainingSpec, root: str, step: int, attempt: int
) -> tuple[dict[str, Any], list[TrainedStep]]:
    join(port, world)
    recipe = make(cache, spec)
    recipe.build(world)
    recipe.initialize()
    checkpoint = open_storage(root).below(checkpoint_folder(step, attempt))
    records: list[dict[str, Any]] = []

    def keep(applied: int, recipe: Recipe) -> None:
        if applied == step:
            layout = recipe.layout()
            payload = memoryview(bytearray(layout.payload_bytes))
            recipe.write_state(payload, step)
            frozen = payload.toreadonly()
            record = save_shard(checkpoint, frozen, layout, world.rank, attempt, step)
            records.append(json.loads(json.dumps(record)))

    hooks = RecordingHooks()
    hooks.on_checkpoint = keep
    train(recipe, world, spec, hooks, 0)
    process_groups.leave()
    return records[0], _steps(hooks, step)


def _steps(hooks: RecordingHooks, after: int) -> list[TrainedStep]:
    return [TrainedStep(row.step, row.samples, row.loss) for row in hooks.rows if row.step > after]
