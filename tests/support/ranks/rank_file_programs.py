"""Programs of ranks that write and read the checkpoints of `benchmarks.resizes.rank_files`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.resizes import rank_files
from tests.support.ranks.rank_programs import join, make, started
from tests.support.ranks.rank_worlds import RecordingHooks

from holdfast_workers.parallelize import process_groups
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training.recipe import World
from holdfast_workers.training.step_loop import train


def trained(port: int, cache_dir: Path, world: World, spec: TrainingSpec, folder: Path) -> str:
    """Train, write the last state, and return the digest of this rank's part."""
    recipe = started(port, cache_dir, world, spec)
    train(recipe, world, spec, RecordingHooks(), 0)
    rank_files.write(folder, world.rank, recipe, spec.train.last_step)
    process_groups.leave()
    return recipe.state_digest(spec.train.last_step)


def passed_on(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, source: Path, target: Path
) -> tuple[int, str]:
    """Read the state, write it as this mesh has it, and return its step and this part's digest."""
    join(port, world)
    recipe = make(cache_dir, spec)
    recipe.build(world)
    step = rank_files.read(source, world.rank, recipe)
    rank_files.write(target, world.rank, recipe, step)
    process_groups.leave()
    return step, recipe.state_digest(step)
